"""Everything for which a store's rows may refuse a batch, looked at before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clusterenv.data.batch import Batch
from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError, SchemaMismatch
from clusterenv.store.table.links import Envs, Links
from clusterenv.store.table.specs import Specs
from clusterenv.store.table.stacks import Stack, stack_starts

__all__ = ["Admission", "Admitted"]

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Admitted:
    """A batch that a ring can take, as it takes it."""

    columns: list[Column]
    """In the ring's order."""
    through: bool
    """Whether no episode ends in it, and only its last time row has tails, in order."""
    tail_rows: Ints
    """Ascending."""
    tail: Mapping[str, Column]
    starts: Ints | None
    """Rows whose stack of frames does not go on from the row before; ``None`` without stacks."""
    beside: int
    """Observations besides those of its rows."""
    envs: Envs
    """Its environments."""


class Admission:
    """What a ring of these columns and sizes can take.

    Raises
    ------
    SchemaMismatch
        If there are observations without next observations.
    ConfigError
        If the observations cannot be stacks of frames.
    """

    def __init__(self, specs: Specs, capacity: int, side: int, stack: Stack | None = None) -> None:
        observations = [name for name in specs.rows if name.split(".")[0] == "obs"]
        if set(specs.obs) != set(observations):
            raise SchemaMismatch(
                f"the observations are {', '.join(observations)}, and the next observations "
                f"{', '.join(specs.obs) or 'missing'}; tail must hold each of them, as in the "
                "batches of a Collector"
            )
        self.specs = specs
        self.capacity = capacity
        self.side = side
        self.stack = stack
        self.stacked: list[str] = [] if stack is None else stack.of(specs.obs)
        """Observations that are stacks of frames."""
        if stack is not None:
            for name in self.stacked:
                stack.frame(specs.rows[name].shape)

    def check(self, batch: Batch, links: Links, thorough: bool) -> Admitted:
        """Raise if a ring cannot take a batch.

        Parameters
        ----------
        links
            The environments that the ring knows.
        thorough
            Whether all stacks of frames are looked at.

        Raises
        ------
        SchemaMismatch
            If a column is missing, new, or of another dtype or shape.
        ConfigError
            If the batch is larger than the ring, its observations are not the stacks that they
            should be, or its environments have numbers that cannot be.
        """
        columns, through = self.specs.check(batch)
        if batch.num_rows > self.capacity:
            raise ConfigError(
                f"a batch of {batch.num_rows:,} rows does not fit into capacity={self.capacity:,}: "
                f"ReplayStore({10 * batch.num_rows:_})"
            )
        tail_rows: Ints = batch.tail_rows
        tail: Mapping[str, Column] = batch.tail
        if not through:
            tail_rows, tail = _ascending(tail_rows, tail)
        starts, beside = None, len(tail_rows)
        if self.stack is not None:
            for name in self.stacked:
                self.stack.check(batch, name, thorough)
            starts = stack_starts(batch)
            beside += len(starts) * (self.stack.size - 1)
        if beside > self.side:
            raise ConfigError(
                f"a batch of {batch.num_rows:,} rows has {beside:,} observations beside those of "
                f"its rows (ends of episodes and of fragments), and there is room for "
                f"{self.side:,}: collect with a longer horizon, or ReplayStore(..., side=1.0)"
            )
        return Admitted(columns, through, tail_rows, tail, starts, beside, links.check(batch))


def _ascending(rows: Ints, columns: Mapping[str, Column]) -> tuple[Ints, Mapping[str, Column]]:
    """Return rows in ascending order, and what belongs to them."""
    if (rows[1:] > rows[:-1]).all():
        return rows, columns
    order = np.argsort(rows, kind="stable")
    return rows[order], {name: column[order] for name, column in columns.items()}
