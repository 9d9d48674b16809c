"""Files and locks in a directory that others may be able to write to.

Only regular files are read: symbolic links are not followed, and a FIFO does not block. Only newly
created files are written. This applies to the last part of a path; the directory itself may be a
symbolic link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from clusterenv.data.processes import ProcessGuard
from clusterenv.errors import StoreInUse, StoreUnreadable

__all__ = ["DirectoryLock", "create", "map_file", "open_regular", "read_file"]

_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file; raise ``OSError`` if it is a link, FIFO or other."""
    try:
        fd = os.open(path, flags | _OPEN_FLAGS, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            reason = "It is a symbolic link, which a store does not follow"
            raise OSError(errno.ELOOP, reason, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "It is not a regular file", str(path))
    return fd


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file; raise as :func:`open_regular`."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def map_file(path: Path) -> pa.Buffer:
    """Map a regular file into memory; the mapping outlives the removal of the file."""
    fd = open_regular(path)
    try:
        # By the descriptor, because the path may name another file by now. Arrow keeps the mapping
        # and closes its descriptor: a store may have more files than descriptors.
        with pa.memory_map(f"/dev/fd/{fd}") as source:
            return source.read_buffer()
    finally:
        os.close(fd)


def create(path: Path, directory: int | None = None) -> BinaryIO:
    """Create a file for writing and reading; replace one that a killed process left.

    ``path`` is relative to the directory with this descriptor, by default the working directory.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666, dir_fd=directory)

    with contextlib.suppress(FileNotFoundError):
        os.unlink(path, dir_fd=directory)
    return open(path, "x+b", opener=opener)  # with "x", no symbolic link is followed


class DirectoryLock:
    """Creates a directory, and locks it until this process releases it or ends, even if killed.

    Raises ``StoreInUse`` if another store has locked the directory; ``StoreUnreadable`` if the
    directory cannot be created or written.
    """

    def __init__(self, directory: Path) -> None:
        self.guard = ProcessGuard(f"the store in {directory}", "files")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = open_regular(directory / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StoreUnreadable(
                f"{directory} cannot be written: {error}; choose a directory of your own"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = os.read(self._fd, 32).decode(errors="replace").strip()
            os.close(self._fd)
            if who == str(os.getpid()):
                advice = "in this process; close that store, or choose another directory"
            else:
                holder = f"process {who}" if who else "another process"
                advice = f"in {holder}; wait for it, stop it, or choose another directory"
            raise StoreInUse(f"{directory} is open {advice}") from error
        if os.fstat(self._fd).st_nlink == 1:  # a hard link could be any file of the user
            with contextlib.suppress(OSError):  # a full disk; the number is only a hint
                os.ftruncate(self._fd, 0)
                os.write(self._fd, f"{os.getpid()}\n".encode())

    @property
    def is_held(self) -> bool:
        """Whether this process has the lock; false in a fork of that process."""
        return self.guard.is_here and self._fd >= 0

    def release(self) -> None:
        """Release the lock; does nothing the second time, or in a fork."""
        if self.is_held:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # also for forks of this process
            os.close(self._fd)
            self._fd = -1
