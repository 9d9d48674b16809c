"""What a run writes down as it goes, and the curve that is drawn of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.experiment.metrics import Metrics
from pipelines.experiment.sinks import CsvFile, JsonLines, Sink, TensorBoard, WandB, read_csv

__all__ = ["RunLog"]


class RunLog:
    """Writes metrics to ``progress.csv``, ``metrics.jsonl`` and TensorBoard; draws ``curve.png``.

    Parameters
    ----------
    out
        The run directory.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.progress = out / "progress.csv"
        self._sinks: list[Sink] = []

    def open(
        self,
        upto: int | None,
        wandb: bool = False,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to log.

        Parameters
        ----------
        upto
            Steps of the checkpoint that a run resumes from: later records are dropped. ``None``
            begins a new log.
        wandb
            Log to Weights & Biases too.
        hyperparameters
            Learner and options of the run, for TensorBoard's table.
        """
        self._sinks = [
            *([WandB(self.out)] if wandb else []),  # the one that may be missing comes first
            CsvFile(self.progress, upto),
            JsonLines(self.out / "metrics.jsonl", upto),
            TensorBoard(self.out, upto, hyperparameters),
        ]

    def write(self, metrics: Metrics) -> None:
        """Log a record everywhere."""
        assert self._sinks, "open() the log first"
        for sink in self._sinks:
            sink.write(metrics)

    def close(self) -> None:
        """End the log."""
        while self._sinks:
            self._sinks.pop().close()

    @property
    def best(self) -> float:
        """The best mean return so far; NaN if no episode ended."""
        returns = (float(row["mean_return"]) for row in read_csv(self.progress))
        return max((value for value in returns if math.isfinite(value)), default=math.nan)

    def draw(self, title: str) -> Path:
        """Draw the return over the steps to ``curve.png``, from ``progress.csv``."""
        from matplotlib.figure import Figure  # here, as --help needs none of it

        rows = read_csv(self.progress)
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        steps, returns = ([float(row[name]) for row in rows] for name in ("steps", "mean_return"))
        axes.plot(steps, returns, label="mean of the last 100 episodes")
        axes.set(title=title, xlabel="steps", ylabel="mean return of the last 100 episodes")
        if evaluated := _evaluated(rows):
            at, mean, low, high = zip(*evaluated, strict=True)
            axes.plot(at, mean, marker=".", label="evaluation, with its 95 % interval")
            axes.fill_between(at, low, high, alpha=0.2, color=axes.lines[-1].get_color())
            axes.set_ylabel("return")
            axes.legend(frameon=False)
        axes.grid(alpha=0.3)
        path = self.out / "curve.png"
        figure.savefig(path, dpi=120)
        return path


def _evaluated(rows: list[dict[str, str]]) -> list[tuple[float, ...]]:
    """Return steps, mean and interval of each evaluation in a ``progress.csv``."""
    names = ("eval_steps", "eval_return", "eval_return_low", "eval_return_high")
    found = {tuple(float(row[name]) for name in names) for row in rows if row.get(names[0])}
    return sorted(found)
