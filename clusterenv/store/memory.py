"""Where a store's columns lie: in memory, or in files that are mapped into it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from clusterenv.errors import StoreTooLarge
from clusterenv.schema import Column
from clusterenv.store.lock import DirectoryLock

__all__ = ["InFiles", "InMemory", "available_memory", "readable"]

_LEAVE = 0.05  # of what is free, for everything else
_CGROUP = Path("/sys/fs/cgroup")


def readable(nbytes: float) -> str:
    """Return a size as people say it.

    Examples
    --------
    >>> readable(28_224_000_000)
    '28.2 GB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.{0 if unit == 'bytes' else 1}f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def available_memory() -> int:
    """Return the bytes that this process may still take, a container's limit included."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        free = free if limit == "max" else min(free, int(limit) - used)
    except (OSError, ValueError):
        pass  # no container, or one that does not say
    return free


def _refuse(needed: int, free: int, capacity: int, where: str, advice: str) -> None:
    usable = int(free * (1 - _LEAVE))
    if needed > usable:
        fits = capacity * usable // needed
        raise StoreTooLarge(
            f"capacity={capacity:,} takes {readable(needed)} of {where}, and {readable(free)} are "
            f"free; capacity={fits:_} fits{advice}"
        )


class InMemory:
    """Columns in memory."""

    def check(self, needed: int, capacity: int) -> None:
        """Raise if so many bytes are not free."""
        advice = ", or put the columns into files: ReplayStore(..., directory='replay')"
        _refuse(needed, available_memory(), capacity, "memory", advice)

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column:
        """Return an array; its pages are taken when they are written."""
        return np.empty(shape, dtype)

    def close(self) -> None:
        """Nothing to do: arrays go when nobody holds them."""


class InFiles:
    """Columns in files of a directory; the system keeps in memory what is used most.

    The files are room to work in, not a record: they are removed when the store is closed.
    """

    def __init__(self, directory: Path) -> None:
        self._lock = DirectoryLock(directory)
        self._directory = directory / "columns"
        shutil.rmtree(self._directory, ignore_errors=True)  # of a process that was killed
        self._directory.mkdir()

    def check(self, needed: int, capacity: int) -> None:
        """Raise if so many bytes are not free on the disk."""
        free = shutil.disk_usage(self._directory).free
        _refuse(needed, free, capacity, f"the disk of {self._directory}", "")

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column:
        """Return an array that is a file; its blocks are taken now, so the disk cannot fill up."""
        path = self._directory / name
        nbytes = max(1, dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
        with path.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                raise StoreTooLarge(
                    f"{path} needs {readable(nbytes)}, which the disk does not have: {error}"
                ) from error
        return np.memmap(path, dtype, "r+", shape=shape)

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._lock.release()
