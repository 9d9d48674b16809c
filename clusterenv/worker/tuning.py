"""Process-wide settings that make a worker faster, where the process is ours to change."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Literal

import torch

from clusterenv.data.processes import OWN_WORKER, this_process

__all__ = ["Tune", "keep_freed_memory", "may_tune", "tune_process"]

Tune = bool | Literal["auto"]
"""The setting ``clusterenv.worker.tune``."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # as in glibc's malloc.h
_KEPT = 64 << 20  # bytes at the top of a heap
_ARRAY = 32 << 20  # bytes; the largest that older versions of glibc accept


def may_tune(tune: Tune, head: tuple[int, int]) -> bool:
    """Whether this process may be tuned.

    ``tune`` is ``True`` for any worker, ``"auto"`` for workers that ClusterEnv started, ``False``
    for none. The head's process is never tuned: workers may be threads of it.
    """
    if head == this_process():
        return False
    return OWN_WORKER in os.environ if tune == "auto" else bool(tune)


def tune_process() -> None:
    """Let torch use one thread, and malloc keep freed memory; for the whole process.

    Call it in the thread that uses torch: threads that used it before keep their number.
    """
    torch.set_num_threads(1)  # the shards are the parallelism
    keep_freed_memory()


@functools.cache
def keep_freed_memory() -> bool:
    """Let malloc keep freed memory for the next array; return whether it does.

    A shard allocates arrays of the same sizes again and again. Dask starts workers with
    ``MALLOC_TRIM_THRESHOLD_=65536``: each array is returned to the system when it is freed, and
    allocated again page by page. Without glibc's ``mallopt`` nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEPT) and mallopt(_M_MMAP_THRESHOLD, _ARRAY))
