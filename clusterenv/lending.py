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

from clusterenv.schema import Column

__all__ = ["LARGE", "Lender"]

LARGE = 1 << 20
"""Bytes of an array; what is smaller, malloc keeps by itself."""
_MOST = 256 << 20  # bytes that wait for use; more goes back to the system
_STEPS = 8  # sizes between a power of two and the next

Piece = npt.NDArray[np.uint8]


class Lender:
    """Makes arrays, of memory that it lent before if nobody holds it any more.

    Whoever gets an array owns it: its memory comes back when the array, and every view and
    tensor that shares it, has gone. One thread at a time asks for arrays; any may let go.

    Examples
    --------
    >>> lender = Lender()
    >>> array = lender.empty((4, 1_000_000), np.dtype(np.float32))
    >>> place = array.ctypes.data
    >>> del array
    >>> lender.empty((4, 999_000), np.dtype(np.float32)).ctypes.data == place
    True
    """

    def __init__(self) -> None:
        self._waiting: list[Piece] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column:
        """Return an array whose contents are arbitrary."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LARGE:
            return np.empty(shape, dtype)
        loan = _Loan(self._piece(_rounded(nbytes)), self._waiting)
        return np.asarray(loan)[:nbytes].view(dtype).reshape(shape)

    def _piece(self, nbytes: int) -> Piece:
        for k, piece in enumerate(self._waiting):
            if len(piece) == nbytes:
                return self._waiting.pop(k)
        return np.empty(nbytes, np.uint8)


class _Loan:
    """Gives a piece back when it goes, which is when no array refers to it any more."""

    __slots__ = ("__array_interface__", "_piece", "_waiting")

    def __init__(self, piece: Piece, waiting: list[Piece]) -> None:
        self.__array_interface__ = piece.__array_interface__
        self._piece = piece
        self._waiting = waiting

    def __del__(self) -> None:
        self._waiting.append(self._piece)
        while sum(map(len, self._waiting)) > _MOST:
            self._waiting.pop(0)  # has waited longest


def _rounded(nbytes: int) -> int:
    """Return a size that similar numbers of bytes have in common.

    Examples
    --------
    >>> _rounded(1_000_000), _rounded(1_040_000), _rounded(1_100_000)
    (1048576, 1048576, 1179648)
    """
    step = (1 << (nbytes - 1).bit_length() - 1) // _STEPS
    return -(-nbytes // step) * step
