"""A sum tree: priorities, and draws in proportion to them, vectorised."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["FAN", "Floats", "Ints", "Level", "SumTree"]

logger = logging.getLogger("clusterenv")
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
FAN = 16  # children of a node: two cache lines
_SHIFT = 4  # log2 of it
_TOP = 2048  # nodes at the top, which are summed at the first draw after a change


class Level:
    """One level of the tree; each node has sixteen children in the level below."""

    def __init__(self, below: Floats) -> None:
        self.children = below.reshape(-1, FAN)
        self.sums: Floats = np.zeros(len(self.children))
        self.before: Floats = np.zeros(self.children.shape)
        """Sum of the children before each child."""

    def descend(self, at: Ints, rest: Floats) -> None:
        """Replace each node by the child that contains ``rest``, and ``rest`` by the remainder."""
        before = self.before.take(at, axis=0)
        # One before the first child that begins beyond the rest. If there is none, argmin is 0
        # and the result wraps around to the last child.
        child = (before <= rest[:, None]).argmin(1)
        child -= 1
        child &= FAN - 1
        at <<= _SHIFT
        at += child
        child += np.arange(0, before.size, FAN)
        rest -= before.reshape(-1).take(child)

    def add_up(self, at: Ints) -> None:
        children = self.children.take(at, axis=0)
        before = np.zeros(children.shape)
        _running_sums(children[:, :-1], before[:, 1:])
        self.sums[at] = before[:, -1] + children[:, -1]
        self.before[at] = before

    def add_up_range(self, start: int, end: int) -> None:
        children, before = self.children[start:end], self.before[start:end]
        _running_sums(children[:, :-1], before[:, 1:])
        np.add(before[:, -1], children[:, -1], out=self.sums[start:end])


def _running_sums(numbers: Floats, out: Floats) -> None:
    """Write the running sums of the last axis; torch is five times as fast as NumPy."""
    torch.cumsum(torch.from_numpy(numbers), -1, out=torch.from_numpy(out))


class SumTree:
    """A tree of sums with sixteen children per node; ``level`` is compiled if Numba is installed.

    Each node stores the running sums of its children, so one vector comparison finds the child to
    descend to. All sums are computed from the leaves: rounding errors do not accumulate, and
    setting a leaf twice in one call is safe.
    """

    def __init__(self, size: int, level: type[Level] | None = None) -> None:
        depth, top = _shape(size)
        self.leaves: Floats = np.zeros(top << (_SHIFT * depth))
        """The priorities, with padding at the end."""
        self._levels: list[Level] = []
        below = self.leaves
        for _ in range(depth):
            self._levels.append((level or _level_kind())(below))
            below = self._levels[-1].sums
        self._top = below
        self._running: Floats = np.zeros(top + 1)
        """Sum before each node at the top; the last entry is the total."""
        self._changed = False

    @staticmethod
    def bytes_needed(size: int) -> int:
        """Return the bytes of a tree with ``size`` leaves."""
        depth, top = _shape(size)
        numbers = sum(top << (_SHIFT * level) for level in range(depth + 1))
        return 8 * (2 * numbers + 1)  # each sum, and the running sum before it

    @property
    def total(self) -> float:
        return float(self._running_sums()[-1])

    def put(self, at: Ints, values: npt.NDArray[Any] | float) -> None:
        """Set some leaves; if one is given twice, the last value wins."""
        self._changed = True
        self.leaves[at] = values
        for level in self._levels:
            at = at >> _SHIFT
            level.add_up(at)

    def put_range(
        self, start: int, end: int, values: npt.NDArray[Any] | float, zeros: int = 0
    ) -> None:
        """Set consecutive leaves, and the ``zeros`` leaves after them to 0."""
        self.leaves[start:end] = values
        self.leaves[end : end + zeros] = 0
        end += zeros
        if start >= end:
            return
        self._changed = True
        for level in self._levels:
            start, end = start >> _SHIFT, -(-end // FAN)
            level.add_up_range(start, end)

    def find(self, sums: Floats) -> Ints:
        """Return for each number the leaf at which the running sum exceeds it."""
        running = self._running_sums()
        at = running[1:-1].searchsorted(sums, side="right")
        if not self._levels:
            return at
        rest = sums - running.take(at)
        for level in reversed(self._levels):
            level.descend(at, rest)
        return at

    def _running_sums(self) -> Floats:
        if self._changed:
            _running_sums(self._top, self._running[1:])
            self._changed = False
        return self._running


@functools.cache
def _level_kind() -> type[Level]:
    """Return the compiled level if Numba is installed and supports this NumPy."""
    if importlib.util.find_spec("numba") is None:
        return Level
    try:
        from clusterenv.store.samplers.sum_tree_numba import CompiledLevel
    except ImportError as error:
        logger.warning("Priorities go without Numba, which cannot be imported: %s", error)
        return Level
    return CompiledLevel


def _shape(size: int) -> tuple[int, int]:
    """Return the number of levels below the top, and of nodes at the top."""
    depth = 0
    while size > _TOP << (_SHIFT * depth):
        depth += 1
    return depth, -(-size // (1 << (_SHIFT * depth)))
