"""Where rows and observations are stored.

A row number never repeats; row ``r`` occupies slot ``r % capacity``. Side slots, behind those of
the rows, hold observations that no row holds, such as those at the end of an episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clusterenv.data.spaces import Column

__all__ = ["Block", "Ints", "NextSlots", "RecurrentStates", "SideSlots", "pieces", "put"]

Ints = npt.NDArray[np.int64]
Pieces = list[tuple[slice, slice]]


@dataclass(slots=True)
class Block:
    """The rows of one batch: ``start`` to ``end``, ``num_envs`` in each time row."""

    start: int
    end: int
    num_envs: int
    run: int
    shard: int
    incarnation: int
    policy_version: int
    tail_rows: Ints
    """Numbers of the rows whose next observation came with the batch, ascending."""
    tail_slots: Ints
    rejoined: tuple[Ints, Ints] | None = None
    """Last rows of tracks that continue with an earlier row of the block, and these rows."""


def pieces(row: int, count: int, capacity: int) -> Pieces:
    """Return the slots of ``count`` rows from ``row`` on, and which rows: one pair, or two."""
    at = row % capacity
    beyond = at + count - capacity
    if beyond <= 0:
        return [(slice(at, at + count), slice(None))]
    return [
        (slice(at, capacity), slice(count - beyond)),
        (slice(beyond), slice(count - beyond, count)),
    ]


def put(column: Column, row: int, values: Column, capacity: int) -> None:
    """Write one value per row, from ``row`` on."""
    for to, of in pieces(row, len(values), capacity):
        column[to] = values[of]


class SideSlots:
    """A ring of slots from ``first`` on, each with an owner: the newest row that needs it.

    Slots are reused in order, so the owner of a slot, and every row before it, must have been
    evicted by then. ``ordered`` says whether owners always come in ascending order.
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
        """Take a slot for each owner; return them as numbers, and as the fastest index."""
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


class NextSlots:
    """The slot of each row's next observation: that of a later row, or a side slot."""

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
        """Undo the joins of a block's tracks with its rows before ``first``, which were evicted."""
        if block.rejoined is not None:
            rows, then = block.rejoined
            rows = rows[then < first]
            # The tails of the last time row are the last ones.
            self._slots[rows % self._capacity] = block.tail_slots[rows - block.end]


class RecurrentStates:
    """Recurrent states, beside the first tails of each block.

    ``columns`` have one state per side slot; ``at`` has the index of each row's state, or -1.
    """

    def __init__(self, columns: Mapping[str, Column], at: Ints) -> None:
        self._columns = columns
        self._at = at
        self._capacity = len(at)

    def add(self, block: Block, states: Mapping[str, Column]) -> None:
        """Store the states of a block's first time row; empty arrays if they are unknown."""
        put(self._at, block.start, np.full(block.end - block.start, -1), self._capacity)
        if all(len(column) for column in states.values()):
            at = block.tail_slots[: block.num_envs] - self._capacity
            for name, column in states.items():
                self._columns[name][at] = column
            put(self._at, block.start, at, self._capacity)

    def of(self, slots: Ints) -> tuple[dict[str, Column], npt.NDArray[np.bool_]]:
        """Return the state before the rows in these slots, and whether it is known."""
        at = self._at[slots]
        return {name: column[at] for name, column in self._columns.items()}, at >= 0
