"""Checks of a batch before it changes a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clusterenv.data.batch import Batch
from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError, SchemaMismatch
from clusterenv.store.table.continuation import Continuations, Envs
from clusterenv.store.table.schema import TableSchema
from clusterenv.store.table.stacks import Stack, stack_starts

__all__ = ["Admission", "Admitted"]

Ints = npt.NDArray[np.int64]


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


class Admission:
    """Decides whether a table of these columns and sizes can take a batch.

    Raises ``SchemaMismatch`` if there are observations without next observations; ``ConfigError``
    if the observations cannot be stacks of frames.
    """

    def __init__(
        self, schema: TableSchema, capacity: int, side: int, stack: Stack | None = None
    ) -> None:
        observations = [name for name in schema.rows if name.split(".")[0] == "obs"]
        if set(schema.obs) != set(observations):
            raise SchemaMismatch(
                f"the observations are {', '.join(observations)}, and the next observations "
                f"{', '.join(schema.obs) or 'missing'}; tail must hold each of them, as in the "
                "batches of a Collector"
            )
        self._schema = schema
        self._capacity = capacity
        self._side = side
        self._stack = stack
        self.stacked: list[str] = [] if stack is None else stack.of(schema.obs)
        """Observations that are stacks of frames."""
        if stack is not None:
            for name in self.stacked:
                stack.frame(schema.rows[name].shape)

    def check(self, batch: Batch, continuations: Continuations, thorough: bool) -> Admitted:
        """Raise if a batch cannot be added; ``thorough`` checks all stacks of frames, not some.

        Raises ``SchemaMismatch`` if a column is missing, new, or of another dtype or shape;
        ``ConfigError`` if the batch is larger than the table, its observations are not stacks as
        configured, or its environment numbers are invalid.
        """
        columns, whole = self._schema.check(batch)
        if batch.num_rows > self._capacity:
            raise ConfigError(
                f"a batch of {batch.num_rows:,} rows does not fit into capacity="
                f"{self._capacity:,}: ReplayStore({10 * batch.num_rows:_})"
            )
        tail_rows: Ints = batch.tail_rows
        tail: Mapping[str, Column] = batch.tail
        if not whole:
            tail_rows, tail = _ascending(tail_rows, tail)
        starts, side_slots = None, len(tail_rows)
        if self._stack is not None:
            for name in self.stacked:
                self._stack.check(batch, name, thorough)
            starts = stack_starts(batch)
            side_slots += len(starts) * (self._stack.size - 1)
        if side_slots > self._side:
            raise ConfigError(
                f"a batch of {batch.num_rows:,} rows has {side_slots:,} observations beside those "
                f"of its rows (ends of episodes and of fragments), and there is room for "
                f"{self._side:,}: collect with a longer horizon, or ReplayStore(..., side=1.0)"
            )
        envs = continuations.check(batch)
        return Admitted(columns, whole, tail_rows, tail, starts, side_slots, envs)


def _ascending(rows: Ints, columns: Mapping[str, Column]) -> tuple[Ints, Mapping[str, Column]]:
    """Sort rows, and their columns with them."""
    if (rows[1:] > rows[:-1]).all():
        return rows, columns
    order = np.argsort(rows, kind="stable")
    return rows[order], {name: column[order] for name, column in columns.items()}
