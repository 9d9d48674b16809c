"""Open files in a directory that others may be able to write to.

A file is read only if it is a regular file: no symbolic link is followed, and no FIFO is waited
for. A file is written only where it was just created. This holds for the last part of a path; the
directory itself may be a symbolic link of the user's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

__all__ = ["create", "map_file", "open_regular", "read_file"]

_CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file.

    Raises
    ------
    OSError
        If it cannot be opened, or is a symbolic link or anything but a regular file.
    """
    try:
        fd = os.open(path, flags | _CAREFULLY, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            said = "It is a symbolic link, which a store does not follow"
            raise OSError(errno.ELOOP, said, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "It is not a regular file", str(path))
    return fd


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file; raises as :func:`open_regular`."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def map_file(path: Path) -> pa.Buffer:
    """Return the bytes of a regular file, mapped: they outlive the file's removal.

    Raises as :func:`open_regular`.
    """
    fd = open_regular(path)
    try:
        # By the descriptor, as the path may name another file by now. Arrow keeps the mapping and
        # closes its descriptor, of which there are fewer than a store may have files.
        with pa.memory_map(f"/dev/fd/{fd}") as source:
            return source.read_buffer()
    finally:
        os.close(fd)


def create(path: Path, directory: int | None = None) -> BinaryIO:
    """Create a file for writing and reading, in place of what a killed process left there.

    Parameters
    ----------
    path
        The file.
    directory
        Descriptor of the directory that ``path`` begins at; by default the working directory.

    Raises
    ------
    OSError
        If it cannot be created, or another process creates it at the same moment.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666, dir_fd=directory)

    with contextlib.suppress(FileNotFoundError):
        os.unlink(path, dir_fd=directory)
    return open(path, "x+b", opener=opener)  # with "x", no symbolic link is followed
