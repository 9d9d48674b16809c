"""Memory for large arrays that come and go: what nobody holds any more is used again.

The system gives fresh memory page by page, each with an interruption that takes longer than
filling the page. Large arrays that are made again and again, samples of frames for example,
otherwise cost more by their pages than by their contents.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterenv.data.spaces import Column

__all__ = ["LARGE", "BufferPool"]

LARGE = 1 << 20
"""Bytes of an array; what is smaller, malloc keeps by itself."""
_MOST = 256 << 20  # bytes that wait for use; more goes back to the system
_STEPS = 8  # sizes between a power of two and the next

Piece = npt.NDArray[np.uint8]
Waiting = dict[int, list[Piece]]  # by size


class BufferPool:
    """Makes arrays, of memory that it lent before if nobody holds it any more.

    Whoever gets an array owns it: its memory comes back when the array, and every view and
    tensor that shares it, has gone.

    Examples
    --------
    >>> lender = BufferPool()
    >>> array = lender.empty((4, 1_000_000), np.dtype(np.float32))
    >>> place = array.ctypes.data
    >>> del array
    >>> lender.empty((4, 999_000), np.dtype(np.float32)).ctypes.data == place
    True
    """

    def __init__(self) -> None:
        self._waiting: Waiting = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column:
        """Return an array whose contents are arbitrary."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LARGE:
            return np.empty(shape, dtype)
        size = _rounded(nbytes)
        try:
            piece = self._waiting[size].pop()
        except (KeyError, IndexError):
            piece = np.empty(size, np.uint8)
        return np.asarray(_Loan(piece, self._waiting))[:nbytes].view(dtype).reshape(shape)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for use."""
        return _bytes(self._waiting)


class _Loan:
    """Gives a piece back when it goes, which is when no array refers to it any more."""

    __slots__ = ("__array_interface__", "_piece", "_waiting")

    def __init__(self, piece: Piece, waiting: Waiting) -> None:
        self.__array_interface__ = piece.__array_interface__
        self._piece = piece
        self._waiting = waiting

    def __del__(self) -> None:
        # Another thread may take or give at any point: each line alone leaves all in order.
        alike = self._waiting.setdefault(len(self._piece), [])
        alike.append(self._piece)
        if _bytes(self._waiting) > _MOST:  # make room: for what is in use now
            for pieces in list(self._waiting.values()):
                if pieces is not alike:
                    pieces.clear()
        while _bytes(self._waiting) > _MOST:
            del alike[:1]


def _bytes(waiting: Waiting) -> int:
    return sum(size * len(pieces) for size, pieces in list(waiting.items()))


def _rounded(nbytes: int) -> int:
    """Return a size that similar numbers of bytes have in common.

    Examples
    --------
    >>> _rounded(1_000_000), _rounded(1_040_000), _rounded(1_100_000)
    (1048576, 1048576, 1179648)
    """
    step = (1 << (nbytes - 1).bit_length() - 1) // _STEPS
    return -(-nbytes // step) * step
