"""Conversion of batches to self-contained Arrow record batches, and back.

The columns are those of the batch, and its origin. Some are null in most rows: ``next_obs`` is set
where no row of the batch holds the next observation, ``state.…`` in the first time row, and
``older_obs`` where a stack of frames does not continue a row before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from clusterenv.data.arrow import from_arrow, from_sparse, to_arrow, to_sparse
from clusterenv.data.batch import Batch
from clusterenv.data.buffer_pool import BufferPool
from clusterenv.data.spaces import Column
from clusterenv.store.table.stacks import Stack, stack_starts, stacks_of

__all__ = ["from_record_batch", "to_record_batch"]

_Sparse = tuple[Any, Column]  # rows, and their values
_ORIGIN = {"run": np.int64, "shard": np.int32, "incarnation": np.int32}


def to_record_batch(batch: Batch, stack: Stack | None = None) -> pa.RecordBatch:
    """Return a batch as a record batch."""
    total, order = batch.num_rows, np.argsort(batch.tail_rows, kind="stable")
    tail_rows = batch.tail_rows[order]
    stacks = stacks_of(stack, list(batch.tail))
    parts = []
    for name in batch.names:
        column = batch.flat(name)
        if name in stacks:
            column = stacks[name].newest(column)
        parts.append(to_arrow(name, np.ascontiguousarray(column)))
    for name, dtype in _ORIGIN.items():
        parts.append(to_arrow(name, np.full(total, getattr(batch, name), dtype)))
    for name, tail in batch.tail.items():
        if name not in stacks:
            parts.append(to_sparse(f"next_{name}", tail_rows, tail[order], total))
            continue
        newest, starts = stacks[name].newest(tail[order]), stack_starts(batch)
        older = stacks[name].older(batch.flat(name)[starts])
        parts.append(to_sparse(f"next_{name}", tail_rows, newest, total))
        parts.append(to_sparse(f"older_{name}", starts, older, total))
    for name, state in batch.state.items():
        parts.append(to_sparse(f"state.{name}", np.arange(len(state)), state, total))
    fields, arrays = zip(*parts, strict=True)
    return pa.record_batch(list(arrays), schema=pa.schema(fields))


def from_record_batch(
    rows: pa.RecordBatch, num_envs: int, policy_version: int, stack: Stack | None = None
) -> Batch:
    """Return the batch that was converted to this record batch."""
    columns: dict[str, Column] = {}
    sparse: dict[str, _Sparse] = {}
    for field, array in zip(rows.schema, rows.columns, strict=True):
        if pa.types.is_list(field.type) or field.name.startswith("next_obs"):
            sparse[field.name] = from_sparse(field, array)
        else:
            columns[field.name] = from_arrow(field, array)
    run, shard, incarnation = (int(columns.pop(name)[0]) for name in _ORIGIN)
    tail_rows, tail = np.empty(0, np.int64), {}
    observations = [name for name in columns if f"next_{name}" in sparse]
    for name in observations:
        tail_rows, tail[name] = sparse[f"next_{name}"]
    for name, stacked in stacks_of(stack, observations).items():
        older, ends = sparse[f"older_{name}"], sparse[f"next_{name}"]
        columns[name], tail[name] = _stacked(columns[name], older, ends, num_envs, stacked)
    states = {name: values for name, (_, values) in sparse.items() if name.startswith("state.")}
    return Batch(
        columns,
        num_envs,
        tail_rows=tail_rows,
        tail=tail,
        state={name.removeprefix("state."): values for name, values in states.items()},
        run=run,
        shard=shard,
        incarnation=incarnation,
        policy_version=policy_version,
    )


def _stacked(
    frames: Column, older: _Sparse, tail: _Sparse, num_envs: int, stack: Stack
) -> tuple[Column, Column]:
    """Return the stacks of rows and tails, from single frames."""
    (starts, before_starts), (tail_rows, last) = older, tail
    rows, before = len(frames), stack.size - 1
    if before_starts.shape[1:] != (before, *frames.shape[1:]):
        raise ValueError(f"older frames of shape {before_starts.shape[1:]}, but stack={stack}")
    pool = np.concatenate([frames, before_starts.reshape(-1, *frames.shape[1:]), last])
    previous = np.arange(len(pool))
    previous[:rows] -= num_envs
    side = (rows + np.arange(len(starts) * before)).reshape(len(starts), before)
    previous[side[:, 1:]] = side[:, :-1]
    previous[starts] = side[:, -1]
    ends = rows + side.size + np.arange(len(last))
    previous[ends] = tail_rows
    buffers = BufferPool()
    return (
        stack.join(pool, stack.history(np.arange(rows), previous), buffers),
        stack.join(pool, stack.history(ends, previous), buffers),
    )
