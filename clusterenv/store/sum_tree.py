"""Priorities, and drawing in proportion to them, for many at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SumTree"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_TOP = 1024  # sums at the top; these are added up at each draw


class SumTree:
    """Leaves, sums of two neighbours, sums of two of these, until few are left.

    All sums are exact functions of the leaves: nothing accumulates rounding errors, and
    setting one leaf twice in a call does no harm.

    Examples
    --------
    >>> tree = SumTree(4)
    >>> tree.put(np.array([0, 3]), np.array([1.0, 3.0]))
    >>> tree.total, tree.find(np.array([0.5, 1.5, 3.9])).tolist()
    (4.0, [0, 3, 3])
    """

    def __init__(self, size: int) -> None:
        depth = 0
        while size > _TOP << depth:
            depth += 1
        top = -(-size // (1 << depth))
        self._levels = [np.zeros(top << k) for k in range(depth, -1, -1)]

    @property
    def leaves(self) -> Floats:
        """The priorities; the end may be padding."""
        return self._levels[0]

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._levels[-1].sum())

    def put(self, at: Ints, values: npt.NDArray[Any] | float) -> None:
        """Set some leaves; of one that is given twice, the later value stays."""
        self._levels[0][at] = values
        for below, level in zip(self._levels, self._levels[1:], strict=False):
            at = at >> 1
            left = at << 1
            level[at] = below.take(left) + below.take(left + 1)

    def put_range(self, start: int, end: int, values: npt.NDArray[Any] | float) -> None:
        """Set neighbouring leaves."""
        if start >= end:
            return
        self._levels[0][start:end] = values
        for below, level in zip(self._levels, self._levels[1:], strict=False):
            start, end = start >> 1, (end + 1) >> 1
            np.add(below[2 * start : 2 * end : 2], below[2 * start + 1 : 2 * end : 2],
                   out=level[start:end])  # fmt: skip

    def find(self, sums: Floats) -> Ints:
        """Return for each number the leaf at which the running sum passes it."""
        top = self._levels[-1]
        running = np.cumsum(top)
        at = running.searchsorted(sums, side="right")
        np.minimum(at, len(top) - 1, out=at)
        rest = sums - (running - top).take(at)
        left, right = np.empty_like(rest), np.empty(len(rest), np.bool_)
        for level in self._levels[-2::-1]:
            at <<= 1
            level.take(at, out=left, mode="clip")
            np.greater_equal(rest, left, out=right)
            left *= right
            rest -= left
            at += right
        return at
