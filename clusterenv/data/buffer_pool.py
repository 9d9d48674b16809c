"""Reuses the memory of large arrays.

The operating system maps fresh memory page by page, and each page fault takes longer than filling
the page. Without reuse, large arrays that are allocated again and again, such as samples of
frames, spend more time in page faults than in copying.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterenv.data.spaces import Column

__all__ = ["LARGE", "BufferPool"]

LARGE = 1 << 20
"""Bytes from which on an array is pooled; malloc itself reuses smaller ones."""
_MAX_FREE = 256 << 20  # bytes of free buffers to keep; more is returned to the system
_STEPS = 8  # sizes between a power of two and the next

_Buffer = npt.NDArray[np.uint8]
_Free = dict[int, list[_Buffer]]  # by size


class BufferPool:
    """Allocates arrays, from the memory of earlier arrays that are no longer referenced.

    The caller owns the array. Its memory returns to the pool when the array, and every view and
    tensor that shares it, has been garbage-collected.

    Examples
    --------
    >>> pool = BufferPool()
    >>> array = pool.empty((4, 1_000_000), np.dtype(np.float32))
    >>> address = array.ctypes.data
    >>> del array
    >>> pool.empty((4, 999_000), np.dtype(np.float32)).ctypes.data == address
    True
    """

    def __init__(self) -> None:
        self._free: _Free = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column:
        """Return an array with arbitrary contents."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LARGE:
            return np.empty(shape, dtype)
        size = _rounded(nbytes)
        try:
            buffer = self._free[size].pop()
        except (KeyError, IndexError):
            buffer = np.empty(size, np.uint8)
        return np.asarray(_Pooled(buffer, self._free))[:nbytes].view(dtype).reshape(shape)

    @property
    def free_bytes(self) -> int:
        """Bytes of buffers that no array uses."""
        return _nbytes(self._free)


class _Pooled:
    """Base of all arrays that share a buffer: returns it to the pool when the last is deleted."""

    __slots__ = ("__array_interface__", "_buffer", "_free")

    def __init__(self, buffer: _Buffer, free: _Free) -> None:
        self.__array_interface__ = buffer.__array_interface__
        self._buffer = buffer
        self._free = free

    def __del__(self) -> None:
        # Other threads may allocate and free at any point: each statement alone is atomic.
        same_size = self._free.setdefault(len(self._buffer), [])
        same_size.append(self._buffer)
        if _nbytes(self._free) > _MAX_FREE:  # drop other sizes first: this one is in use now
            for buffers in list(self._free.values()):
                if buffers is not same_size:
                    buffers.clear()
        while _nbytes(self._free) > _MAX_FREE:
            del same_size[:1]


def _nbytes(free: _Free) -> int:
    return sum(size * len(buffers) for size, buffers in list(free.items()))


def _rounded(nbytes: int) -> int:
    """Round up to one of eight sizes per power of two, so that similar arrays share buffers.

    Examples
    --------
    >>> _rounded(1_000_000), _rounded(1_040_000), _rounded(1_100_000)
    (1048576, 1048576, 1179648)
    """
    step = (1 << (nbytes - 1).bit_length() - 1) // _STEPS
    return -(-nbytes // step) * step
