"""The columns of a table, and the checks of a batch before it is added."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from clusterenv.data.arrow import RowSpec, spec_of
from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_instance
from clusterenv.data.record_batch import ORIGIN, STATE, next_of
from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError, SchemaMismatch
from clusterenv.store.table.continuation import Continuations, Envs
from clusterenv.store.table.slots import Ints
from clusterenv.store.table.stacks import Stack, stack_starts, stacks_of

__all__ = ["Admission", "Admitted", "TableSchema", "schema_of", "schema_of_arrow"]

_NEEDED = ("obs", "action", "reward", "terminated", "truncated", "env", "episode", "step")


@dataclass(frozen=True)
class TableSchema:
    """Columns of rows, names of the observations among them, and columns of recurrent state."""

    rows: Mapping[str, RowSpec]
    obs: tuple[str, ...]
    state: Mapping[str, RowSpec]

    def __post_init__(self) -> None:
        for name, spec in self.rows.items():
            if spec.dtype.hasobject:
                raise SchemaMismatch(
                    f"column {name!r} is text, and a store holds numbers; collect without it, "
                    "Collector(…, text='drop'), or write it to disk: "
                    "clusterenv.store.Journal(directory).append(batch)"
                )
        kinds = {name.split(".")[0] for name in self.rows}
        for name in _NEEDED:
            if name not in kinds:
                raise SchemaMismatch(
                    f"there is no column {name!r}, only {', '.join(self.rows)}; a store takes "
                    "the batches of a Collector"
                )

    @functools.cached_property
    def _dtypes(self) -> list[np.dtype[Any]]:
        return [spec.dtype for spec in self.rows.values()]

    @functools.cached_property
    def _shapes(self) -> Callable[[int], list[tuple[int, ...]]]:
        """Shapes of all columns by number of rows; batches come in few sizes."""
        return functools.lru_cache(maxsize=8)(
            lambda rows: [(rows, *spec.shape) for spec in self.rows.values()]
        )

    def columns(self, batch: Batch) -> list[Column] | None:
        """Return the columns of a batch in the order of the schema; ``None`` if they differ."""
        rows, width, tails = batch.num_rows, batch.num_envs, len(batch.tail_rows)
        if not rows or rows % width or len(batch.names) != len(self.rows):
            return None
        try:
            columns = [batch.flat(name) for name in self.rows]
        except KeyError:
            return None
        if [column.dtype for column in columns] != self._dtypes:
            return None
        if [column.shape for column in columns] != self._shapes(rows):
            return None
        if len(batch.tail) != len(self.obs) or batch.state.keys() != self.state.keys():
            return None
        for name in self.obs:
            tail = batch.tail.get(name)
            if tail is None or len(tail) != tails or RowSpec.of(tail) != self.rows[name]:
                return None
        for name, part in batch.state.items():
            # A block whose first time row was evicted is saved without state.
            if RowSpec.of(part) != self.state[name] or len(part) not in (width, 0):
                return None
        return columns

    def mismatch(self, batch: Batch) -> SchemaMismatch | ConfigError:
        """Return the error that names the difference."""
        rows, width, ends = batch.num_rows, batch.num_envs, len(batch.tail_rows)
        wanted = _table(self.rows, {name: self.rows[name] for name in self.obs}, self.state)
        got = schema_of(batch)
        found = _table(got.rows, {name: RowSpec.of(t) for name, t in batch.tail.items()}, got.state)
        for part in [*wanted, *found]:
            if wanted.get(part, "none") != found.get(part, "none"):
                return SchemaMismatch(
                    f"the batch of shard {batch.shard} does not fit this store: {part} expected "
                    f"{wanted.get(part, 'none')}, got {found.get(part, 'none')}; a store takes the "
                    "batches of one environment and one kind of policy"
                )
        lengths = [(f"column {name!r}", len(batch.flat(name)), rows, "rows") for name in self.rows]
        lengths += [(f"next {k!r}", len(tail), ends, "tail_rows") for k, tail in batch.tail.items()]
        lengths += [(f"state {k!r}", len(h), width, "environments") for k, h in batch.state.items()]
        for part, has, of, what in lengths:
            if has != of:
                return SchemaMismatch(f"{part} of a batch has {has} rows for {of} {what}")
        return ConfigError(
            f"a batch of {rows} rows of {width} environments: there are no rows, or not as many of "
            "each; a store takes the batches of a Collector"
        )


def _table(
    rows: Mapping[str, RowSpec], tail: Mapping[str, RowSpec], state: Mapping[str, RowSpec]
) -> dict[str, str]:
    parts = {"column": rows, "next": tail, "state": state}
    return {
        f"{kind} {name!r}": str(spec) for kind, part in parts.items() for name, spec in part.items()
    }


def schema_of(batch: Batch) -> TableSchema:
    """Return the columns of a batch."""
    return TableSchema(
        {name: RowSpec.of(batch.flat(name)) for name in batch.names},
        tuple(batch.tail),
        {name: RowSpec.of(part) for name, part in batch.state.items()},
    )


def schema_of_arrow(schema: pa.Schema) -> TableSchema:
    """Return the columns of an Arrow schema of batches."""
    right = "ReplayStore(..., schema=batch.record_batch.schema)"
    check_instance("schema", schema, pa.Schema, right)
    rows: dict[str, RowSpec] = {}
    state: dict[str, RowSpec] = {}
    for column in schema:
        name = column.name
        if name in ORIGIN or name.split(".")[0] == next_of("obs"):
            continue
        try:
            spec = spec_of(column)
        except ValueError as error:
            raise SchemaMismatch(
                f"{error}, so a store cannot hold it; the schema of a batch: {right}"
            ) from error
        if name.startswith(STATE):
            state[name.removeprefix(STATE)] = spec
        else:
            rows[name] = spec
    return TableSchema(rows, tuple(name for name in rows if name.split(".")[0] == "obs"), state)


@dataclass(slots=True)
class Admitted:
    """A batch that passed all checks, in the form that a ring adds it."""

    columns: list[Column]
    """In the order of the schema."""
    whole: bool
    """Whether no episode ends in it: only its last time row has tails, in order."""
    tail_rows: Ints
    """Ascending."""
    tail: Mapping[str, Column]
    starts: Ints | None
    """Rows whose stack of frames does not continue the row before; ``None`` without stacks."""
    side_slots: int
    """Side slots that it needs."""
    envs: Envs


@dataclass(slots=True)
class Admission:
    """Decides whether a table of these columns and sizes can take a batch."""

    schema: TableSchema
    capacity: int
    side: int
    stack: Stack | None = None
    stacked: list[str] = field(init=False)
    """Observations that are stacks of frames."""

    def __post_init__(self) -> None:
        schema = self.schema
        observations = [name for name in schema.rows if name.split(".")[0] == "obs"]
        if set(schema.obs) != set(observations):
            raise SchemaMismatch(
                f"the observations are {', '.join(observations)}, and the next observations "
                f"{', '.join(schema.obs) or 'missing'}; tail must hold each of them, as in the "
                "batches of a Collector"
            )
        stacks = stacks_of(self.stack, schema.obs)
        for name in stacks:
            stacks[name].frame(schema.rows[name].shape)
        self.stacked = list(stacks)

    def check(self, batch: Batch, continuations: Continuations, thorough: bool) -> Admitted:
        """Raise if a batch cannot be added; ``thorough`` checks all stacks of frames, not some."""
        columns = self.schema.columns(batch)
        if columns is None:
            raise self.schema.mismatch(batch)
        if batch.num_rows > self.capacity:
            raise ConfigError(
                f"a batch of {batch.num_rows:,} rows does not fit into capacity="
                f"{self.capacity:,}: ReplayStore({10 * batch.num_rows:_})"
            )
        whole = _is_whole(batch)
        tail_rows: Ints = batch.tail_rows
        tail: Mapping[str, Column] = batch.tail
        if not whole:
            _check_tails(batch)
            if not (tail_rows[1:] > tail_rows[:-1]).all():
                order = np.argsort(tail_rows, kind="stable")
                tail_rows = tail_rows[order]
                tail = {name: column[order] for name, column in tail.items()}
        starts, side_slots = None, len(tail_rows)
        if self.stack is not None:
            for name in self.stacked:
                self.stack.check(batch, name, thorough)
            starts = stack_starts(batch)
            side_slots += len(starts) * (self.stack.size - 1)
        if side_slots > self.side:
            raise ConfigError(
                f"a batch of {batch.num_rows:,} rows has {side_slots:,} observations beside those "
                f"of its rows (ends of episodes and of fragments), and there is room for "
                f"{self.side:,}: collect with a longer horizon, or ReplayStore(..., side=1.0)"
            )
        envs = continuations.check(batch)
        return Admitted(columns, whole, tail_rows, tail, starts, side_slots, envs)


def _check_tails(batch: Batch) -> None:
    """Raise unless there is a next observation wherever an episode or the batch ends."""
    ends = batch.flat("terminated") | batch.flat("truncated")
    ends[-batch.num_envs :] = True
    ends[batch.tail_rows] = False
    if ends.any():
        raise SchemaMismatch(
            f"the next observation of row {np.argmax(ends)} is missing, where an episode or the "
            f"batch of shard {batch.shard} ends: tail_rows must name the row, and tail hold the "
            "observation"
        )


def _is_whole(batch: Batch) -> bool:
    """Whether no episode ends in a batch: only its last time row has tails, in order."""
    rows, width, tails = batch.num_rows, batch.num_envs, batch.tail_rows
    return (
        len(tails) == width
        and not np.count_nonzero(batch.flat("terminated"))
        and not np.count_nonzero(batch.flat("truncated"))
        and tails.tobytes() == _last_time_row(rows, width, tails.dtype)
    )


@functools.lru_cache(maxsize=16)
def _last_time_row(rows: int, width: int, dtype: np.dtype[Any]) -> bytes:
    """Return the indices of the last time row; batches come in few sizes."""
    return np.arange(rows - width, rows, dtype=dtype).tobytes()
