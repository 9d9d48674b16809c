"""Slots for observations that no row holds, such as those at the end of an episode."""

from __future__ import annotations

import numpy as np

from clusterenv.store.table.slots import Ints

__all__ = ["SideSlots"]


class SideSlots:
    """A ring of slots behind those of the rows.

    Each slot has an owner: the newest row that needs it. Slots are reused in order, so the owner
    of a slot, and every row before it, must have been evicted by then.

    Parameters
    ----------
    owners
        Array for the owners, one per slot.
    first
        Number of the first slot: the capacity of the table.
    ordered
        Whether owners always come in ascending order.

    Examples
    --------
    >>> side = SideSlots(np.zeros(4, np.int64), first=10)
    >>> side.take(np.array([2, 5, 7]))
    (array([10, 11, 12]), slice(10, 13, None))
    >>> side.oldest_row(1), side.oldest_row(2)  # the second slot reuses that of row 2
    (0, 3)
    """

    def __init__(self, owners: Ints, first: int, ordered: bool = True) -> None:
        self._owners = owners
        self._first = first
        self._ordered = ordered
        self._newest_owner = -1
        self.size = len(owners)
        self.taken = 0
        """Slots ever taken."""

    def oldest_row(self, count: int) -> int:
        """Return the oldest row that can stay when ``count`` more slots are taken."""
        reused = self.taken + count - self.size
        return int(self._owners[(reused - 1) % self.size]) + 1 if reused > 0 else 0

    def take(self, owners: Ints) -> tuple[Ints, slice | Ints]:
        """Take a slot for each owner.

        Returns
        -------
        slots, index
            The slots as numbers, and as the index that is fastest to write to.
        """
        start = self.taken % self.size
        end = start + len(owners)
        if not self._ordered:
            owners = np.maximum(np.maximum.accumulate(owners), self._newest_owner)
            self._newest_owner = int(owners[-1])
        self.taken += len(owners)
        if end <= self.size:
            self._owners[start:end] = owners
            start, end = start + self._first, end + self._first
            return np.arange(start, end), slice(start, end)
        slots = np.arange(start, end) % self.size
        self._owners[slots] = owners
        slots += self._first
        return slots, slots
