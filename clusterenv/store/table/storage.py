"""Allocation of columns, in memory or in memory-mapped files."""

from __future__ import annotations

import os
import re
import shutil
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from clusterenv.data.spaces import Column
from clusterenv.errors import StoreTooLarge, StoreUnreadable
from clusterenv.store.files import DirectoryLock, create

__all__ = ["FileStorage", "MemoryStorage", "Needed", "available_memory", "readable"]

_RESERVE = 0.05  # of the free bytes, for everything else
_CGROUP = Path("/sys/fs/cgroup")
_FILES = re.compile(r"^inactive_file (\d+)$", re.MULTILINE)

Needed = Callable[[int], int]
"""Returns the bytes that a capacity needs."""


def readable(nbytes: float) -> str:
    """Format a size for people, such as ``28.2 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.{0 if unit == 'bytes' else 1}f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def available_memory() -> int:
    """Return the bytes that this process can still allocate, within its container's limit."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        files = _FILES.search((_CGROUP / "memory.stat").read_text())
        used -= int(files[1]) if files else 0  # the page cache shrinks on demand
        free = free if limit == "max" else min(free, int(limit) - used)
    except (OSError, ValueError):
        pass  # no container, or one without these files
    return free


def _check_free(needed: Needed, free: int, capacity: int, where: str, advice: str) -> None:
    """Raise ``StoreTooLarge`` unless the bytes for this capacity are free."""
    usable = int(free * (1 - _RESERVE))
    if needed(capacity) <= usable:
        return
    least, most = 0, capacity  # the former fits, the latter does not
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if needed(middle) <= usable else (least, middle)
    unit = 10 ** max(0, len(str(least)) - 3)
    fits = least // unit * unit
    raise StoreTooLarge(
        f"capacity={capacity:,} takes {readable(needed(capacity))} of {where}, and "
        f"{readable(free)} are free; {f'capacity={fits:_} fits' if fits else 'no capacity fits'}"
        f"{advice}"
    )


class MemoryStorage:
    """Columns in memory; a fork has its own copy."""

    def check_process(self) -> None:
        """Do nothing: a fork cannot change its parent's memory."""

    def check(self, columns: Needed, sampler: Needed, capacity: int) -> None:
        advice = ", or put the columns into files: ReplayStore(..., directory='replay')"
        free = available_memory()
        _check_free(lambda n: columns(n) + sampler(n), free, capacity, "memory", advice)

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column:
        """Return an array; its pages are allocated when they are written."""
        return np.empty(shape, dtype)

    def close(self) -> None:
        """Do nothing: arrays are garbage-collected."""


class FileStorage:
    """Columns in memory-mapped files of a directory, which closing the store removes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "columns"
        right = f"ReplayStore(..., directory={str(directory / 'replay')!r})"
        if self._directory.exists() and not (directory / "lock").is_file():
            raise StoreUnreadable(
                f"{self._directory} is there, and no store made it; choose another directory: "
                f"{right}"
            )
        self._lock = DirectoryLock(directory)
        shutil.rmtree(self._directory, ignore_errors=True)  # left by a killed process
        try:
            self._directory.mkdir()
            self._fd = os.open(self._directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            self._lock.release()
            raise StoreUnreadable(
                f"{self._directory} cannot be made: {error}; choose another directory: {right}"
            ) from error

    def check_process(self) -> None:
        """Raise ``WrongProcess`` in a fork, which shares the files of its parent."""
        self._lock.guard.check()

    def check(self, columns: Needed, sampler: Needed, capacity: int) -> None:
        free = shutil.disk_usage(self._directory).free
        _check_free(columns, free, capacity, f"the disk of {self._directory}", "")
        _check_free(sampler, available_memory(), capacity, "memory for priorities", "")

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column:
        """Return a memory-mapped array; its disk blocks are reserved now."""
        path = Path(urllib.parse.quote(name, safe=""))  # keys may contain slashes
        nbytes = max(1, dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
        with create(path, self._fd) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                raise StoreTooLarge(
                    f"{self._directory / path} needs {readable(nbytes)}, which the disk does not "
                    f"have: {error}"
                ) from error
            return np.asarray(np.memmap(file, dtype, "r+", shape=shape))

    def close(self) -> None:
        """Remove the files, except in a fork."""
        os.close(self._fd)
        if self._lock.is_held:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._lock.release()
