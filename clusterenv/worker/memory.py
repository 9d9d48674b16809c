"""How a worker's process treats memory that was freed."""

from __future__ import annotations

import ctypes
import functools

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # as in glibc's malloc.h
_KEPT = 64 << 20  # bytes at the top of a heap
_ARRAY = 32 << 20  # bytes; the largest that older versions of glibc accept


@functools.cache
def keep_freed_memory() -> bool:
    """Have malloc keep what is freed, for the next array; return whether it does.

    A shard needs arrays of the same sizes again and again. Dask starts workers with
    ``MALLOC_TRIM_THRESHOLD_=65536``, by which each goes back to the system and
    comes back page by page. Where the C library has no ``mallopt`` nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEPT) and mallopt(_M_MMAP_THRESHOLD, _ARRAY))
