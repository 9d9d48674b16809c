"""Priorities, and drawing in proportion to them, for many at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["SumTree"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_FAN = 16  # children of a node: two cache lines
_SHIFT = 4
_TOP = 2048  # nodes at the top; these are added up at each draw that follows a change


class SumTree:
    """Sums of sixteen leaves, sums of sixteen of these, until few are left.

    For each node there are the running sums of its children, so one comparison with all of
    them finds the child to go to. All sums are exact functions of the leaves: nothing
    accumulates rounding errors, and setting one leaf twice in a call does no harm.

    Examples
    --------
    >>> tree = SumTree(4)
    >>> tree.put(np.array([0, 3]), np.array([1.0, 3.0]))
    >>> tree.total, tree.find(np.array([0.5, 1.5, 3.9])).tolist()
    (4.0, [0, 3, 3])
    """

    def __init__(self, size: int) -> None:
        depth, top = _shape(size)
        self.leaves: Floats = np.zeros(top << (_SHIFT * depth))
        """The priorities; the end may be padding."""
        self._levels: list[_Level] = []
        below = self.leaves
        for _ in range(depth):
            self._levels.append(_Level(below))
            below = self._levels[-1].sums
        self._top = below
        self._running: Floats = np.zeros(top + 1)
        """What comes before each node at the top; after the last, the total."""
        self._changed = False

    @staticmethod
    def bytes_needed(size: int) -> int:
        """Return the bytes of a tree with so many leaves."""
        depth, top = _shape(size)
        numbers = sum(top << (_SHIFT * level) for level in range(depth + 1))
        return 8 * (2 * numbers + 1)  # each number, and the running sum before it

    @property
    def nbytes(self) -> int:
        """Bytes of all numbers."""
        levels = sum(level.sums.nbytes + level.before.nbytes for level in self._levels)
        return self.leaves.nbytes + levels + self._running.nbytes

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._running_sums()[-1])

    def put(self, at: Ints, values: npt.NDArray[Any] | float) -> None:
        """Set some leaves; of one that is given twice, the later value stays."""
        self._changed = True
        self.leaves[at] = values
        for level in self._levels:
            at = at >> _SHIFT
            level.add_up(at)

    def put_range(
        self, start: int, end: int, values: npt.NDArray[Any] | float, zeros: int = 0
    ) -> None:
        """Set neighbouring leaves, and as many as ``zeros`` after them to 0."""
        self.leaves[start:end] = values
        self.leaves[end : end + zeros] = 0
        end += zeros
        if start >= end:
            return
        self._changed = True
        for level in self._levels:
            start, end = start >> _SHIFT, -(-end // _FAN)
            level.add_up_range(start, end)

    def find(self, sums: Floats) -> Ints:
        """Return for each number the leaf at which the running sum passes it."""
        running = self._running_sums()
        at = running[1:-1].searchsorted(sums, side="right")
        if not self._levels:
            return at
        rest = sums - running.take(at)
        each = np.arange(0, _FAN * len(sums), _FAN)
        for level in reversed(self._levels):
            before = level.before.take(at, axis=0)
            # One less than the first child that begins beyond the rest. If none does, argmin
            # is 0, and the last child is meant.
            child = (before <= rest[:, None]).argmin(1)
            child -= 1
            child &= _FAN - 1
            at <<= _SHIFT
            at += child
            if level is not self._levels[0]:
                child += each
                rest -= before.reshape(-1).take(child)
        return at

    def _running_sums(self) -> Floats:
        if self._changed:
            _add_up(self._top, self._running[1:])
            self._changed = False
        return self._running


class _Level:
    """Nodes that each have sixteen numbers of the level below."""

    def __init__(self, below: Floats) -> None:
        self._children = below.reshape(-1, _FAN)
        self.sums: Floats = np.zeros(len(self._children))
        self.before: Floats = np.zeros(self._children.shape)
        """What the children before each child sum up to."""

    def add_up(self, at: Ints) -> None:
        """Add up the children of some nodes."""
        children = self._children.take(at, axis=0)
        before = np.zeros(children.shape)
        _add_up(children[:, :-1], before[:, 1:])
        self.sums[at] = before[:, -1] + children[:, -1]
        self.before[at] = before

    def add_up_range(self, start: int, end: int) -> None:
        """Add up the children of neighbouring nodes."""
        children, before = self._children[start:end], self.before[start:end]
        _add_up(children[:, :-1], before[:, 1:])
        np.add(before[:, -1], children[:, -1], out=self.sums[start:end])


def _add_up(numbers: Floats, running: Floats) -> None:
    """Write the running sums of the last axis; torch takes a fifth of NumPy's time."""
    torch.cumsum(torch.from_numpy(numbers), -1, out=torch.from_numpy(running))


def _shape(size: int) -> tuple[int, int]:
    """Return how many levels there are below the top, and the nodes of the top."""
    depth = 0
    while size > _TOP << (_SHIFT * depth):
        depth += 1
    return depth, -(-size // (1 << (_SHIFT * depth)))
