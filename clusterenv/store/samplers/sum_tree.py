"""Priorities, and drawing in proportion to them, for many at a time."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterenv.store.samplers.tree_level import FAN, SHIFT, Floats, Ints, Level, running_sums

__all__ = ["SumTree"]

logger = logging.getLogger("clusterenv")
_TOP = 2048  # nodes at the top; these are added up at each draw that follows a change


class SumTree:
    """Sums of sixteen leaves, sums of sixteen of these, until few are left.

    For each node there are the running sums of its children, so one comparison with all of
    them finds the child to go to. All sums are exact functions of the leaves: nothing
    accumulates rounding errors, and setting one leaf twice in a call does no harm.

    Parameters
    ----------
    size
        Leaves.
    level
        What does the work of a level; by default the compiled one if Numba is installed.

    Examples
    --------
    >>> tree = SumTree(4)
    >>> tree.put(np.array([0, 3]), np.array([1.0, 3.0]))
    >>> tree.total, tree.find(np.array([0.5, 1.5, 3.9])).tolist()
    (4.0, [0, 3, 3])
    """

    def __init__(self, size: int, level: type[Level] | None = None) -> None:
        depth, top = _shape(size)
        self.leaves: Floats = np.zeros(top << (SHIFT * depth))
        """The priorities; the end may be padding."""
        self._levels: list[Level] = []
        below = self.leaves
        for _ in range(depth):
            self._levels.append((level or _level_kind())(below))
            below = self._levels[-1].sums
        self._top = below
        self._running: Floats = np.zeros(top + 1)
        """What comes before each node at the top; after the last, the total."""
        self._changed = False

    @staticmethod
    def bytes_needed(size: int) -> int:
        """Return the bytes of a tree with so many leaves."""
        depth, top = _shape(size)
        numbers = sum(top << (SHIFT * level) for level in range(depth + 1))
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
            at = at >> SHIFT
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
            start, end = start >> SHIFT, -(-end // FAN)
            level.add_up_range(start, end)

    def find(self, sums: Floats) -> Ints:
        """Return for each number the leaf at which the running sum passes it."""
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
            running_sums(self._top, self._running[1:])
            self._changed = False
        return self._running


@functools.cache
def _level_kind() -> type[Level]:
    """Return the compiled level if Numba is there, and of a version that fits NumPy's."""
    if importlib.util.find_spec("numba") is None:
        return Level
    try:
        from clusterenv.store.samplers.compiled_level import CompiledLevel
    except ImportError as error:
        logger.warning("Priorities go without Numba, which cannot be imported: %s", error)
        return Level
    return CompiledLevel


def _shape(size: int) -> tuple[int, int]:
    """Return how many levels there are below the top, and the nodes of the top."""
    depth = 0
    while size > _TOP << (SHIFT * depth):
        depth += 1
    return depth, -(-size // (1 << (SHIFT * depth)))
