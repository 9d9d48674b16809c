"""Where metrics are written: CSV, JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from clusterenv.errors import ConfigError
from pipelines.experiment.files import create
from pipelines.experiment.metrics import Metrics

__all__ = ["CsvFile", "JsonLines", "Sink", "TensorBoard", "WandB", "read_csv"]

JUDGED_BY = ("rollout/mean_return", "eval/eval_return")
"""Metrics beside the hyperparameters."""


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
        self.path = path
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
        given = metrics.given()
        if self._names is None:
            self._names = list(given)
            self._writer.writerow(self._names)
        elif more := [name for name in given if name not in self._names]:
            self._add_columns(more)
        row = [_short(name, given[name]) if name in given else "" for name in self._names]
        self._writer.writerow(row)

    @property
    def _writer(self) -> Any:
        return csv.writer(self.file, lineterminator="\n")

    def _add_columns(self, names: list[str]) -> None:
        """Write the file anew, with columns that are empty so far: a resumed run may log more."""
        self.file.close()
        beside = self.path.with_suffix(".tmp")
        assert self._names is not None
        with self.path.open(newline="") as old, io.TextIOWrapper(create(beside), newline="") as new:
            writer = csv.writer(new, lineterminator="\n")
            for number, row in enumerate(csv.reader(old)):
                writer.writerow([*row, *(names if not number else [""] * len(names))])
        beside.replace(self.path)
        self._names += names
        self.file = self.path.open("a", newline="", buffering=1)


class JsonLines(_Lines):
    """``metrics.jsonl``: an object per record; numbers that are not finite are ``null``."""

    def steps(self, line: str) -> int:
        return int(json.loads(line)["steps"])

    def write(self, metrics: Metrics) -> None:
        given = metrics.given().items()
        record = {name: value if math.isfinite(value) else None for name, value in given}
        self.file.write(json.dumps(record) + "\n")


class TensorBoard:
    """Event files: a scalar per metric, under its group, and the hyperparameters of the run.

    Parameters
    ----------
    directory
        Of the event files.
    upto
        Steps of the checkpoint that a run resumes from; ``None`` starts a new run.
    hyperparameters
        Shown in the tab HPARAMS, a row for each run.
    """

    def __init__(
        self, directory: Path, upto: int | None, hyperparameters: Mapping[str, Any] | None = None
    ) -> None:
        # Here, as it takes long, and those who only read a log need none of it.
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(str(directory), purge_step=upto + 1 if upto else None)
        self._evaluated: float | None = None
        self._end: Any = None
        if hyperparameters is not None:
            shown = {name: _hyperparameter(value) for name, value in hyperparameters.items()}
            experiment, begin, self._end = hparams(shown, dict.fromkeys(JUDGED_BY))  # type: ignore[no-untyped-call]
            # Not by add_hparams, which makes a run of its own below the directory.
            self._add(experiment)
            self._add(begin)

    def write(self, metrics: Metrics) -> None:
        at = metrics.eval_steps
        evaluated = at is not None and math.isfinite(at) and at != self._evaluated
        for tag, value in metrics.tags().items():
            if not tag.startswith("eval/"):
                self._writer.add_scalar(tag, value, metrics.steps)
            elif evaluated and tag != "eval/eval_steps":  # once, where it belongs
                self._writer.add_scalar(tag, value, int(at or 0))
        if evaluated:
            self._evaluated = at

    def close(self) -> None:
        if self._end is not None:
            self._add(self._end)
        self._writer.close()

    def _add(self, summary: Any) -> None:
        writer: Any = self._writer
        writer.file_writer.add_summary(summary)


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


def _hyperparameter(value: Any) -> float | str:
    """Return an option as TensorBoard takes it: a finite number, or text."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (int, float)) and math.isfinite(value):
        return value
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _short(name: str, value: float) -> str:
    if name.startswith("eval_") and math.isnan(value):
        return ""  # not evaluated yet
    return f"{value:d}" if isinstance(value, int) else f"{value:.6g}"
