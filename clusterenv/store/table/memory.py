"""Where a store's columns lie: in memory, or in files that are mapped into it."""

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
from clusterenv.store.journal.files import create
from clusterenv.store.journal.lock import DirectoryLock

__all__ = ["InFiles", "InMemory", "Needed", "available_memory", "readable"]

_LEAVE = 0.05  # of what is free, for everything else
_CGROUP = Path("/sys/fs/cgroup")
_FILES = re.compile(r"^inactive_file (\d+)$", re.MULTILINE)

Needed = Callable[[int], int]
"""Bytes that a capacity takes."""


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
        files = _FILES.search((_CGROUP / "memory.stat").read_text())
        used -= int(files[1]) if files else 0  # files in memory make room when it is needed
        free = free if limit == "max" else min(free, int(limit) - used)
    except (OSError, ValueError):
        pass  # no container, or one that does not say
    return free


def _refuse(needed: Needed, free: int, capacity: int, where: str, advice: str) -> None:
    usable = int(free * (1 - _LEAVE))
    if needed(capacity) <= usable:
        return
    least, most = 0, capacity  # the first fits, the other does not
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


class InMemory:
    """Columns in memory; a fork has a copy of its own."""

    def check_process(self) -> None:
        """Nothing to do: what a fork does stays in the fork."""

    def check(self, columns: Needed, sampler: Needed, capacity: int) -> None:
        """Raise if not so many bytes are free."""

        def needed(capacity: int) -> int:
            return columns(capacity) + sampler(capacity)

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
        known = (directory / "lock").is_file()
        self._directory = directory / "columns"
        if self._directory.exists() and not known:
            raise StoreUnreadable(
                f"{self._directory} is there, and no store made it; choose another directory: "
                f"ReplayStore(..., directory={str(directory / 'replay')!r})"
            )
        self._lock = DirectoryLock(directory)
        shutil.rmtree(self._directory, ignore_errors=True)  # of a process that was killed
        try:
            self._directory.mkdir()
            self._fd = os.open(self._directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            self._lock.release()
            raise StoreUnreadable(
                f"{self._directory} cannot be made: {error}; choose another directory: "
                f"ReplayStore(..., directory={str(directory / 'replay')!r})"
            ) from error

    def check_process(self) -> None:
        """Raise ``WrongProcess`` in a fork, whose columns are those of its parent."""
        self._lock.check()

    def check(self, columns: Needed, sampler: Needed, capacity: int) -> None:
        """Raise if the disk has not so many bytes free, or memory for what the sampler keeps."""
        free = shutil.disk_usage(self._directory).free
        _refuse(columns, free, capacity, f"the disk of {self._directory}", "")
        _refuse(sampler, available_memory(), capacity, "memory for priorities", "")

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column:
        """Return an array that is a file; its blocks are taken now, so the disk cannot fill up."""
        path = Path(urllib.parse.quote(name, safe=""))  # keys may have slashes
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
        """Remove the files, unless they are those of a parent process."""
        os.close(self._fd)
        if self._lock.is_held:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._lock.release()
