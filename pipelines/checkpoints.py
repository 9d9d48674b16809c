"""Checkpoints: files of tensors that are replaced as a whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipelines.files import create

__all__ = ["save"]


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write tensors, numbers, and containers of them, for ``torch.load``.

    A reader, or a crash, sees the old file or the new one, never half of one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    try:
        with create(beside) as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer hides what the disk said
        beside.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__
        raise (
            OSError(cause.errno, cause.strerror, str(path)) if isinstance(cause, OSError) else error
        ) from error
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the name too is on the disk before anything refers to it
    finally:
        os.close(directory)
