"""Where the next observation of each row is stored."""

from __future__ import annotations

import numpy as np

from clusterenv.data.spaces import Column
from clusterenv.store.table.slots import Block, Ints, Pieces, put

__all__ = ["NextSlots"]


class NextSlots:
    """The slot of each row's next observation: that of a later row, or a side slot.

    Parameters
    ----------
    slots
        Array with one slot per row.
    """

    def __init__(self, slots: Column) -> None:
        self._slots = slots
        self._capacity = len(slots)
        self._count = np.arange(1024, dtype=slots.dtype)

    def add(self, block: Block, tails: slice | Ints, pieces: Pieces) -> None:
        """Link each row to the next time row; link ``tails`` to the tail slots of the block."""
        slots, capacity = self._slots, self._capacity
        rows, then = block.end - block.start, (block.start + block.num_envs) % capacity
        if len(self._count) < rows:
            self._count = np.arange(rows, dtype=slots.dtype)
        if len(pieces) == 1 and then + rows <= capacity:
            links = slots[pieces[0][0]]
            np.add(self._count[:rows], then, out=links)
            links[tails] = block.tail_slots
        else:
            links = self._count[:rows] + slots.dtype.type(then)
            links[links >= capacity] -= capacity
            links[tails] = block.tail_slots
            put(slots, block.start, links, capacity)

    def join(self, block: Block, before: range | Ints, after: range | Ints) -> None:
        """Link the rows ``before`` to the rows ``after``, which continue their episodes."""
        capacity = self._capacity
        if isinstance(before, range) or isinstance(after, range):
            assert isinstance(before, range)
            assert isinstance(after, range)
            start, count = after.start % capacity, len(before)
            links = np.arange(start, start + count)
            if start + count > capacity:
                links %= capacity
            put(self._slots, before.start, links, capacity)
        elif len(before):
            self._slots[before % capacity] = after % capacity
            if before.max() >= block.start:  # tracks of one batch
                back = before > after
                block.rejoined = before[back], after[back]

    def separate(self, block: Block, first: int) -> None:
        """Undo the joins of a block's tracks with rows that were evicted: those before ``first``.

        The tracks end with their fragment again.
        """
        if block.rejoined is not None:
            rows, then = block.rejoined
            rows = rows[then < first]
            # The tails of the last time row are the last ones.
            self._slots[rows % self._capacity] = block.tail_slots[rows - block.end]
