"""Files of a run: written under a temporary name, then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["create", "replace"]


def create(path: Path) -> BinaryIO:
    """Create a file for writing; replace one that a killed process left, follow no link."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def replace(path: Path, write: Callable[[BinaryIO], object], *, sync: bool = True) -> None:
    """Replace a file as a whole, on the disk when this returns.

    A reader, or a crash, sees the old file or the new one, never half of one. Without ``sync`` the
    system writes it to the disk when it likes, and only a crash of the machine may cost it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    try:
        with create(beside) as file:
            write(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        beside.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer hides what the disk said
        beside.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__
        raise (
            OSError(cause.errno, cause.strerror, str(path)) if isinstance(cause, OSError) else error
        ) from error
    if not sync:
        return
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the name too is on the disk before anything refers to it
    finally:
        os.close(directory)
