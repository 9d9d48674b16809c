"""Tables of an experiment: a dataclass per row, in a CSV file that is replaced as a whole."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pipelines.experiment.files import create
from pipelines.experiment.sinks import read_csv

__all__ = ["read", "write"]

Record = TypeVar("Record")
CASTS: dict[Any, Callable[[str], object]] = {
    "str": str,
    "int": int,
    "float": float,
    "int | None": lambda text: int(text) if text else None,
    "float | None": lambda text: float(text) if text else None,
}


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to a temporary file, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    with io.TextIOWrapper(create(beside), newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    beside.replace(path)


def read(path: Path, kind: type[Record]) -> list[Record]:
    """Return the rows of a file as dataclasses; none if there is no such file."""
    casts = {field.name: CASTS[field.type] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return [
        kind(**{name: cast(row[name]) for name, cast in casts.items()}) for row in read_csv(path)
    ]
