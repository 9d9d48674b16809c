"""Where metrics are written: CSV, JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

from clusterenv.errors import ConfigError
from pipelines.files import create
from pipelines.metrics import Metrics

__all__ = ["CsvFile", "JsonLines", "Sink", "TensorBoard", "WandB", "read_csv"]


class Sink(Protocol):
    """Takes one record after the other; its steps never go back."""

    def write(self, metrics: Metrics) -> None:
        """Write a record so that a reader sees it at once."""

    def close(self) -> None:
        """End the log."""


class _Lines(ABC):
    """A text file that a resumed run truncates to its checkpoint.

    Parameters
    ----------
    path
        The file.
    upto
        Steps of the checkpoint that a run resumes from; ``None`` starts a new run.
    """

    def __init__(self, path: Path, upto: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[str] = []
        if upto is not None and path.is_file():
            with path.open(newline="") as file:
                # A run that was killed may leave half a line.
                whole = [line for line in file if line.endswith("\n")]
            kept = [line for line in whole if self.steps(line) <= upto]
        beside = path.with_suffix(".tmp")  # a kill here must not cost the lines
        with io.TextIOWrapper(create(beside), newline="") as file:
            file.writelines(kept)
        beside.replace(path)
        self.first = kept[0] if kept else None
        self.file = path.open("a", newline="", buffering=1)

    @abstractmethod
    def steps(self, line: str) -> int:
        """Return the steps that a line speaks of."""

    def close(self) -> None:
        """End the log."""
        self.file.close()


class CsvFile(_Lines):
    """``progress.csv``: one column per metric of the learner."""

    def __init__(self, path: Path, upto: int | None) -> None:
        super().__init__(path, upto)
        self._names = self.first.strip().split(",") if self.first else None

    def steps(self, line: str) -> int:
        steps = line.partition(",")[0]
        return 0 if steps == "steps" else int(steps)

    def write(self, metrics: Metrics) -> None:
        given, writer = metrics.given(), csv.writer(self.file, lineterminator="\n")
        if self._names is None:
            self._names = list(given)
            writer.writerow(self._names)
        writer.writerow([_short(given[name]) if name in given else "" for name in self._names])


class JsonLines(_Lines):
    """``metrics.jsonl``: an object per record; numbers that are not finite are ``null``."""

    def steps(self, line: str) -> int:
        return int(json.loads(line)["steps"])

    def write(self, metrics: Metrics) -> None:
        given = metrics.given().items()
        record = {name: value if math.isfinite(value) else None for name, value in given}
        self.file.write(json.dumps(record) + "\n")


class TensorBoard:
    """Event files, a scalar per name.

    Parameters
    ----------
    directory
        Of the event files.
    upto
        Steps of the checkpoint that a run resumes from; ``None`` starts a new run.
    """

    def __init__(self, directory: Path, upto: int | None) -> None:
        # Here, as it takes long, and those who only read a log need none of it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=upto + 1 if upto else None)

    def write(self, metrics: Metrics) -> None:
        for name, value in metrics.given().items():
            if name != "steps":
                self._writer.add_scalar(name, value, metrics.steps)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, named after the run's directory.

    What wandb's own variables say holds: ``WANDB_PROJECT``, ``WANDB_MODE=offline``, …

    Parameters
    ----------
    directory
        The run's; wandb keeps its files there too.

    Raises
    ------
    ConfigError
        If wandb is not installed, or does not let anyone in.
    """

    def __init__(self, directory: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "--wandb needs a package that is not here: pip install 'clusterenv[wandb]'"
            ) from None
        directory.mkdir(parents=True, exist_ok=True)
        name = directory.name
        project = os.environ.get("WANDB_PROJECT", "clusterenv")
        try:
            self._run: Any = wandb.init(
                project=project, dir=str(directory), name=name, id=name, resume="allow"
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"--wandb: {error}. Log in first (wandb login), or keep the run on this machine: "
                "WANDB_MODE=offline"
            ) from error

    def write(self, metrics: Metrics) -> None:
        self._run.log(metrics.given(), step=metrics.steps)

    def close(self) -> None:
        self._run.finish()


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the whole rows of a ``progress.csv``; none if there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def _short(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else f"{value:.6g}"
