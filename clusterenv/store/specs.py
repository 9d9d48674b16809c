"""What the columns of a store are, and whether a batch has the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from clusterenv.arrow import from_arrow
from clusterenv.batch import Batch
from clusterenv.errors import ConfigError, SchemaMismatch
from clusterenv.schema import Column

__all__ = ["Spec", "Specs", "specs_of", "specs_of_schema"]

_NEEDED = ("obs", "action", "reward", "terminated", "truncated", "env", "episode", "step")


@dataclass(frozen=True)
class Spec:
    """What one column holds in each row."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, column: Column) -> Spec:
        """Return what a column holds."""
        return cls(column.dtype, column.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def is_of(self, column: Column) -> bool:
        """Whether a column holds this in each row."""
        return column.dtype == self.dtype and column.shape[1:] == self.shape

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Specs:
    """All columns: of rows, of observations (a subset of these), and of recurrent state.

    Raises
    ------
    SchemaMismatch
        If a column is missing without which rows cannot be sampled.
    """

    rows: Mapping[str, Spec]
    obs: tuple[str, ...]
    state: Mapping[str, Spec]

    def __post_init__(self) -> None:
        kinds = {name.split(".")[0] for name in self.rows}
        for name in _NEEDED:
            if name not in kinds:
                raise SchemaMismatch(
                    f"there is no column {name!r}, only {', '.join(self.rows)}; a store takes "
                    "the batches of a Collector"
                )

    def check(self, batch: Batch) -> None:
        """Raise unless a batch has these columns, all of them for all of its rows.

        Raises
        ------
        SchemaMismatch
            If a column is missing, new, or of another dtype, shape or length, or if the next
            observation of a row is missing.
        ConfigError
            If the batch has no rows.
        """
        rows, width = batch.num_rows, batch.num_envs
        fits = set(batch.names) == self.rows.keys() and batch.tail.keys() == set(self.obs)
        fits = fits and batch.state.keys() == self.state.keys()
        fits = fits and all(spec.is_of(batch.flat(name)) for name, spec in self.rows.items())
        fits = fits and all(self.rows[name].is_of(tail) for name, tail in batch.tail.items())
        fits = fits and all(self.state[name].is_of(part) for name, part in batch.state.items())
        if not fits:
            raise SchemaMismatch(_difference(self, batch))
        if not rows or rows % width:
            raise ConfigError(
                f"a batch of {rows} rows of {width} environments: there are no rows, or not as "
                "many of each; a store takes the batches of a Collector"
            )
        lengths = [(f"column {name!r}", len(batch.flat(name)), rows) for name in self.rows]
        lengths += [
            (f"next {name!r}", len(tail), len(batch.tail_rows)) for name, tail in batch.tail.items()
        ]
        for part, found, wanted in lengths:
            if found != wanted:
                raise SchemaMismatch(f"{part} of a batch has {found} rows for {wanted} rows")
        for name, state in batch.state.items():
            # A block whose first time row has left knows no state.
            if len(state) not in (width, 0):
                raise SchemaMismatch(
                    f"state {name!r} of a batch has {len(state)} rows for {width} environments"
                )
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


def specs_of(batch: Batch) -> Specs:
    """Return the columns of a batch."""
    return Specs(
        {name: Spec.of(batch.flat(name)) for name in batch.names},
        tuple(batch.tail),
        {name: Spec.of(part) for name, part in batch.state.items()},
    )


def specs_of_schema(schema: pa.Schema) -> Specs:
    """Return the columns that an Arrow schema of batches describes."""
    rows = {field.name: Spec.of(from_arrow(field, pa.array([], field.type))) for field in schema}
    for name, spec in rows.items():
        if spec.dtype.hasobject:
            raise SchemaMismatch(
                f"column {name!r} is of type {schema.field(name).type}, which a store cannot hold; "
                "the schema of a batch: ReplayStore(..., schema=batch.record_batch.schema)"
            )
    return Specs(rows, tuple(name for name in rows if name.split(".")[0] == "obs"), {})


def _difference(expected: Specs, batch: Batch) -> str:
    def table(
        rows: Mapping[str, Spec], tail: Mapping[str, Spec], state: Mapping[str, Spec]
    ) -> dict[str, str]:
        parts = {"column": rows, "next": tail, "state": state}
        return {
            f"{kind} {name!r}": str(spec)
            for kind, part in parts.items()
            for name, spec in part.items()
        }

    wanted = table(
        expected.rows, {name: expected.rows[name] for name in expected.obs}, expected.state
    )
    found = table(
        {name: Spec.of(batch.flat(name)) for name in batch.names},
        {name: Spec.of(tail) for name, tail in batch.tail.items()},
        {name: Spec.of(part) for name, part in batch.state.items()},
    )
    part = next(
        part for part in [*wanted, *found] if wanted.get(part, "none") != found.get(part, "none")
    )
    return (
        f"the batch of shard {batch.shard} does not fit this store: {part} expected "
        f"{wanted.get(part, 'none')}, got {found.get(part, 'none')}; a store takes the batches of "
        "one environment and one kind of policy"
    )
