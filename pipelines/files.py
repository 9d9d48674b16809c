"""Files of a run, which are written under a temporary name and then renamed."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

__all__ = ["create"]


def create(path: Path) -> BinaryIO:
    """Create a file for writing; replace one that a killed process left, follow no link."""
    path.unlink(missing_ok=True)
    return path.open("xb")
