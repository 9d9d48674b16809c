"""Record batches of which stacked observations are stored as single frames.

``obs`` is then the newest frame, and ``older_obs`` holds the frames before it where a stack does
not continue a row before. All other columns are those of :mod:`clusterenv.data.record_batch`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from clusterenv.data.batch import Batch
from clusterenv.data.buffer_pool import BufferPool
from clusterenv.data.record_batch import ORIGIN, STATE, Sparse, next_of, rows_of, to_record_batch
from clusterenv.data.spaces import Column
from clusterenv.store.table.stacks import Stack, stack_starts, stacks_of

__all__ = ["from_record_batch", "with_frames_once"]


def with_frames_once(batch: Batch, stack: Stack) -> pa.RecordBatch:
    """Return a batch as a record batch in which each frame is there once."""
    columns = {name: batch.flat(name) for name in batch.names}
    sparse = {}
    stacks, starts = stacks_of(stack, list(batch.tail)), stack_starts(batch)
    tails = {next_of(name): name for name in stacks}
    for name, (rows, values) in batch.sparse.items():
        if name not in tails:
            sparse[name] = rows, values
            continue
        obs = tails[name]
        stacked, column = stacks[obs], columns[obs]
        columns[obs] = stacked.newest(column)
        sparse[name] = rows, stacked.newest(values)
        sparse[_older(obs)] = starts, stacked.older(column[starts])
    return to_record_batch(columns, batch.origin, sparse)


def from_record_batch(
    rows: pa.RecordBatch, num_envs: int, policy_version: int, stack: Stack | None = None
) -> Batch:
    """Return the batch of a record batch, with its stacks of frames put together."""
    columns, sparse = rows_of(rows)
    run, shard, incarnation = (int(columns.pop(name)[0]) for name in ORIGIN)
    tail_rows, tail = np.empty(0, np.int64), {}
    observations = [name for name in columns if next_of(name) in sparse]
    for name in observations:
        tail_rows, tail[name] = sparse[next_of(name)]
    for name, stacked in stacks_of(stack, observations).items():
        older, ends = sparse[_older(name)], sparse[next_of(name)]
        columns[name], tail[name] = _stacked(columns[name], older, ends, num_envs, stacked)
    states = {name: values for name, (_, values) in sparse.items() if name.startswith(STATE)}
    return Batch(
        columns,
        num_envs,
        tail_rows=tail_rows,
        tail=tail,
        state={name.removeprefix(STATE): values for name, values in states.items()},
        run=run,
        shard=shard,
        incarnation=incarnation,
        policy_version=policy_version,
    )


def _older(name: str) -> str:
    return f"older_{name}"


def _stacked(
    frames: Column, older: Sparse, tail: Sparse, num_envs: int, stack: Stack
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
