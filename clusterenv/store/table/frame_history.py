"""Frames of stacked observations: each is stored once, with a link to the frame before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from clusterenv.data.batch import Batch
from clusterenv.data.spaces import Column
from clusterenv.store.table.slots import Block, Ints, put
from clusterenv.store.table.stacks import Stack

__all__ = ["FrameHistory"]


class FrameHistory:
    """The slot ``previous`` to each frame, for the observations ``names`` that are stacks.

    The older frames of a stack that does not continue the row before are in side slots.
    """

    def __init__(self, stack: Stack, names: Sequence[str], previous: Ints, capacity: int) -> None:
        self.stack = stack
        self.names = names
        self.older = stack.size - 1
        """Frames of a stack besides the newest."""
        self._previous = previous
        self._capacity = capacity

    def owners(self, starts: Ints, first: int, rows: int, width: int) -> Ints:
        """Return the last row that needs each older frame of the rows ``starts`` of a batch.

        The batch has ``rows`` rows, numbered from ``first`` on, and ``width`` environments.
        """
        last = np.minimum(starts + (self.older - 1) * width, rows - 1)
        return first + np.repeat(last, self.older)

    def add(
        self, block: Block, batch: Batch, starts: Ints, slots: Ints, columns: Mapping[str, Column]
    ) -> None:
        """Store the older frames of the rows ``starts`` in side slots, and link all frames."""
        slots = slots.reshape(len(starts), self.older)
        previous = (np.arange(block.start, block.end) - block.num_envs) % self._capacity
        for name in self.names:
            columns[name][slots] = self.stack.older(batch.flat(name)[starts])
        self._previous[slots[:, 1:]] = slots[:, :-1]
        self._previous[slots[:, 0]] = slots[:, 0]
        previous[starts] = slots[:, -1]
        put(self._previous, block.start, previous, self._capacity)
        self._previous[block.tail_slots] = block.tail_rows % self._capacity

    def of(self, slots: Ints) -> Ints:
        """Return the slots of all frames of the stacks in ``slots``, ``[slots, size]``."""
        return self.stack.history(slots, self._previous)
