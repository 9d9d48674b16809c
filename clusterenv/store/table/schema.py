"""The columns of a table, and the check that a batch has the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from clusterenv.data.arrow import from_arrow
from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_instance
from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError, SchemaMismatch

__all__ = ["ColumnSpec", "TableSchema", "schema_of", "schema_of_arrow"]

_NEEDED = ("obs", "action", "reward", "terminated", "truncated", "env", "episode", "step")


@dataclass(frozen=True)
class ColumnSpec:
    """Dtype and shape of one row of a column."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, column: Column) -> ColumnSpec:
        """Return the spec of a column."""
        return cls(column.dtype, column.shape[1:])

    @property
    def nbytes(self) -> int:
        """Size of a row."""
        return self.dtype.itemsize * math.prod(self.shape)

    def matches(self, column: Column) -> bool:
        """Whether a column has this dtype and shape."""
        return column.dtype == self.dtype and column.shape[1:] == self.shape

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class TableSchema:
    """Columns of rows, names of the observations among them, and columns of recurrent state.

    Raises ``SchemaMismatch`` if a column that every sample needs is missing, or a column holds
    text.
    """

    rows: Mapping[str, ColumnSpec]
    obs: tuple[str, ...]
    state: Mapping[str, ColumnSpec]

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

    def check(self, batch: Batch) -> tuple[list[Column], bool]:
        """Raise unless a batch has exactly these columns, for all of its rows.

        Returns the columns in the order of the schema, and whether no episode ends in the batch:
        only its last time row has tails, in order.
        Raises ``SchemaMismatch`` if a column is missing, new, or of another dtype, shape or length,
        or if the next observation of a row is missing; ``ConfigError`` if the batch has no rows.
        """
        columns = self._columns(batch)
        if columns is None:
            raise self._mismatch(batch)
        if _is_whole(batch):
            return columns, True
        width = batch.num_envs
        ends = batch.flat("terminated") | batch.flat("truncated")
        ends[-width:] = True
        ends[batch.tail_rows] = False
        if ends.any():
            row = int(np.argmax(ends))
            raise SchemaMismatch(
                f"the next observation of row {row} is missing, where an episode or the batch of "
                f"shard {batch.shard} ends: tail_rows must name the row, and tail hold the "
                "observation"
            )
        return columns, False

    @functools.cached_property
    def _dtypes(self) -> list[np.dtype[Any]]:
        return [spec.dtype for spec in self.rows.values()]

    @functools.cached_property
    def _shapes(self) -> Callable[[int], list[tuple[int, ...]]]:
        """Shapes of all columns by number of rows; batches come in few sizes."""
        return functools.lru_cache(maxsize=8)(
            lambda rows: [(rows, *spec.shape) for spec in self.rows.values()]
        )

    def _columns(self, batch: Batch) -> list[Column] | None:
        """Return the columns of a batch; ``None`` if it does not fit."""
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
            if tail is None or len(tail) != tails or not self.rows[name].matches(tail):
                return None
        for name, part in batch.state.items():
            # A block whose first time row was evicted is saved without state.
            if not self.state[name].matches(part) or len(part) not in (width, 0):
                return None
        return columns

    def _mismatch(self, batch: Batch) -> SchemaMismatch | ConfigError:
        """Return the error that names the difference."""
        rows, width, ends = batch.num_rows, batch.num_envs, len(batch.tail_rows)
        wanted = _table(self.rows, {name: self.rows[name] for name in self.obs}, self.state)
        got = schema_of(batch)
        found = _table(
            got.rows, {name: ColumnSpec.of(tail) for name, tail in batch.tail.items()}, got.state
        )
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


def schema_of(batch: Batch) -> TableSchema:
    """Return the columns of a batch."""
    return TableSchema(
        {name: ColumnSpec.of(batch.flat(name)) for name in batch.names},
        tuple(batch.tail),
        {name: ColumnSpec.of(part) for name, part in batch.state.items()},
    )


def schema_of_arrow(schema: pa.Schema) -> TableSchema:
    """Return the columns of an Arrow schema of batches, without recurrent state."""
    right = "ReplayStore(..., schema=batch.record_batch.schema)"
    check_instance("schema", schema, pa.Schema, right)
    rows = {
        field.name: ColumnSpec.of(from_arrow(field, pa.array([], field.type))) for field in schema
    }
    for name, spec in rows.items():
        if spec.dtype.hasobject and not pa.types.is_string(schema.field(name).type):
            raise SchemaMismatch(
                f"column {name!r} is of type {schema.field(name).type}, which a store cannot hold; "
                f"the schema of a batch: {right}"
            )
    return TableSchema(rows, tuple(name for name in rows if name.split(".")[0] == "obs"), {})


def _table(
    rows: Mapping[str, ColumnSpec], tail: Mapping[str, ColumnSpec], state: Mapping[str, ColumnSpec]
) -> dict[str, str]:
    parts = {"column": rows, "next": tail, "state": state}
    return {
        f"{kind} {name!r}": str(spec) for kind, part in parts.items() for name, spec in part.items()
    }
