"""A training run's directory and what the user sees of it; the same for every learner."""

from __future__ import annotations

import csv
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TextIO

import torch
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

from clusterenv.errors import ConfigError

__all__ = ["Interrupt", "Run"]

SECONDS_BETWEEN_LINES = 5.0


class Run:
    """Writes ``progress.csv``, TensorBoard events, ``checkpoint.pt`` and ``curve.png``.

    Parameters
    ----------
    out
        The directory; made if missing.
    columns
        Of ``progress.csv``; ``steps`` and ``mean_return`` must be among them.
    resume
        Go on with what is in the directory; otherwise it must hold no checkpoint.
    quiet
        Print nothing.
    checkpoint
        Name of the checkpoint to resume, if the learner names each anew.

    Raises
    ------
    ConfigError
        If there is nothing to resume, or something that would be overwritten.
    """

    def __init__(
        self,
        out: Path,
        columns: Sequence[str],
        *,
        resume: bool = False,
        quiet: bool = False,
        checkpoint: str = "checkpoint.pt",
    ) -> None:
        self.out = out
        self.columns = tuple(columns)
        self.quiet = quiet
        self.checkpoint = out / checkpoint
        self.progress = out / "progress.csv"
        if resume and not self.checkpoint.is_file():
            raise ConfigError(
                f"nothing to resume: {self.checkpoint} does not exist; start afresh with "
                f"--out {out}, and continue that run with --out {out} --resume"
            )
        if not resume and self.checkpoint.exists():
            raise ConfigError(
                f"{out} holds another run's checkpoint; continue it with --out {out} --resume, "
                f"or write elsewhere: --out {out}-2"
            )
        self._resumes = resume
        self._file: TextIO | None = None
        self._tensorboard: SummaryWriter | None = None
        self._line_at = -math.inf
        self._terminal = sys.stdout.isatty()

    def load(self) -> dict[str, Any]:
        """Return what :meth:`save` was given last."""
        return dict(torch.load(self.checkpoint, weights_only=True))

    def save(self, state: Mapping[str, Any], name: str | None = None) -> None:
        """Write the checkpoint: tensors, numbers, and containers of them.

        A reader, or a crash, sees the old checkpoint or the new one, never half of one.

        Parameters
        ----------
        state
            What :meth:`load` will return.
        name
            Of the file, if it is to lie beside the checkpoint before.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        if name is not None:
            self.checkpoint = self.out / name
        beside = self.checkpoint.with_suffix(".tmp")
        with beside.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.checkpoint)
        directory = os.open(self.out, os.O_RDONLY)
        try:
            os.fsync(directory)  # the name too is on the disk before anything refers to it
        finally:
            os.close(directory)

    def open(self, steps: int = 0) -> None:
        """Begin to log at ``steps``; rows of a resumed run beyond its checkpoint are dropped."""
        self.out.mkdir(parents=True, exist_ok=True)
        kept = self._rows(upto=steps) if self._resumes else []
        beside = self.progress.with_suffix(".tmp")  # a kill here must not cost the rows
        with beside.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            writer.writerows([row[name] for name in self.columns] for row in kept)
        beside.replace(self.progress)
        self._file = self.progress.open("a", newline="")
        self._tensorboard = SummaryWriter(str(self.out), purge_step=steps + 1 if steps else None)

    def log(self, row: Mapping[str, float], **more: float) -> None:
        """Log one update: its columns to ``progress.csv``, everything to TensorBoard."""
        assert self._file is not None, "open() the run first"
        assert self._tensorboard is not None
        csv.writer(self._file).writerow([_short(row[name]) for name in self.columns])
        self._file.flush()
        for name, value in {**row, **more}.items():
            if name != "steps":
                self._tensorboard.add_scalar(name, value, int(row["steps"]))

    def show(self, row: Mapping[str, float], total_steps: int, *, last: bool = False) -> None:
        """Show a row: in place in a terminal, else as a line every few seconds and at the end."""
        if self.quiet:
            return
        rate = row["steps_per_second"]
        left = max(0.0, total_steps - row["steps"]) / rate if rate else math.inf
        apart = row.get("judged_return", math.nan)
        alike = math.isnan(apart) or apart == row["mean_return"]
        judged = "" if alike else f" (judged {apart:.1f})"
        text = (
            f"{row['steps']:>11,.0f} steps {row['steps'] / total_steps:4.0%}  {rate:>7,.0f}/s  "
            f"return {row['mean_return']:8.1f}{judged}  version {row['version']:.0f}  "
            f"pulls {row['pulls']:.0f}  lag {row['lag_mean']:.2f}  {left:,.0f} s left"
        )
        if self._terminal:
            print(f"\r\x1b[K{text}", end="\n" if last else "", flush=True)
        elif last or time.monotonic() - self._line_at >= SECONDS_BETWEEN_LINES:
            self._line_at = time.monotonic()
            print(text, flush=True)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if not self.quiet:
            print(text, flush=True)

    def close(self) -> None:
        """End the logs."""
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._file = self._tensorboard = None

    def draw(self, title: str) -> Path:
        """Draw the return over the steps to ``curve.png``, from ``progress.csv``."""
        rows = self._rows()
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(
            [float(row["steps"]) for row in rows], [float(row["mean_return"]) for row in rows]
        )
        axes.set(title=title, xlabel="steps", ylabel="mean return of the last 100 episodes")
        axes.grid(alpha=0.3)
        path = self.out / "curve.png"
        figure.savefig(path, dpi=120)
        return path

    def _rows(self, upto: float = math.inf) -> list[dict[str, str]]:
        if not self.progress.is_file():
            return []
        with self.progress.open(newline="") as file:
            # A run that was killed may leave half a line.
            rows = [row for row in csv.DictReader(file) if None not in row.values()]
        return [row for row in rows if float(row["steps"]) <= upto]


class Interrupt:
    """Turns the first Ctrl-C into a wish, :attr:`wanted`; the second interrupts as usual."""

    def __init__(self, notice: str, quiet: bool = False) -> None:
        self.wanted = False
        self._notice = notice
        self._quiet = quiet
        self._before: Any = None
        # Python delivers signals to the main thread, and only it may set handlers.
        self._installs = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupt:
        if self._installs:
            self._before = signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._installs:
            signal.signal(signal.SIGINT, self._before)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        signal.signal(signal.SIGINT, self._before)
        if not self._quiet:
            print(f"\n{self._notice}", flush=True)


def _short(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else f"{value:.6g}"
