"""Priorities, and drawing in proportion to them, for many at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SumTree"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_FAN = 16  # children of a node: two cache lines
_SHIFT = 4
_TOP = 2048  # nodes at the top; these are added up at each draw


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
        depth = 0
        while size > _TOP << (_SHIFT * depth):
            depth += 1
        top = -(-size // (1 << (_SHIFT * depth)))
        counts = [top << (_SHIFT * level) for level in range(depth, -1, -1)]
        self._values = [np.zeros(count) for count in counts]  # leaves first, top last
        self._before = [np.zeros((count, _FAN)) for count in counts[1:]]
        """Of each node above the leaves: what its children before each child sum up to."""

    @property
    def leaves(self) -> Floats:
        """The priorities; the end may be padding."""
        return self._values[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all sums."""
        return sum(array.nbytes for array in (*self._values, *self._before))

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._values[-1].sum())

    def put(self, at: Ints, values: npt.NDArray[Any] | float) -> None:
        """Set some leaves; of one that is given twice, the later value stays."""
        self._values[0][at] = values
        for below, level, before in zip(self._values, self._values[1:], self._before, strict=False):
            at = at >> _SHIFT
            sums = np.cumsum(below.reshape(-1, _FAN).take(at, axis=0), axis=1)
            before[at, 1:] = sums[:, :-1]
            level[at] = sums[:, -1]

    def put_range(self, start: int, end: int, values: npt.NDArray[Any] | float) -> None:
        """Set neighbouring leaves."""
        if start >= end:
            return
        self._values[0][start:end] = values
        for below, level, before in zip(self._values, self._values[1:], self._before, strict=False):
            start, end = start >> _SHIFT, -(-end // _FAN)
            sums = np.cumsum(below.reshape(-1, _FAN)[start:end], axis=1)
            before[start:end, 1:] = sums[:, :-1]
            level[start:end] = sums[:, -1]

    def find(self, sums: Floats) -> Ints:
        """Return for each number the leaf at which the running sum passes it."""
        top = self._values[-1]
        running = np.cumsum(top)
        at = running.searchsorted(sums, side="right")
        np.minimum(at, len(top) - 1, out=at)
        rest = sums - (running - top).take(at)
        each = np.arange(0, _FAN * len(sums), _FAN)
        for before in reversed(self._before):
            children = before.take(at, axis=0)
            passed = (children <= rest[:, None]).view(np.int8)
            child = np.einsum("ij->i", passed).astype(np.int64)  # twice as fast as sum(axis=1)
            child -= 1
            np.maximum(child, 0, out=child)  # if rounding made the rest negative
            rest -= children.reshape(-1).take(each + child)
            at <<= _SHIFT
            at += child
        return at
