"""A training run's directory, the same for every learner, and how it is interrupted."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from clusterenv.errors import ConfigError, Diverged
from pipelines import checkpoints
from pipelines.directories import taken
from pipelines.metrics import Metrics
from pipelines.sinks import CsvFile, JsonLines, Sink, TensorBoard, WandB, read_csv

__all__ = ["Interrupt", "Run"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Run:
    """Writes metrics, ``checkpoint.pt`` and ``curve.png``.

    Metrics go to ``progress.csv``, ``metrics.jsonl`` and TensorBoard's event files.

    Parameters
    ----------
    out
        The directory; made if missing.
    resume
        Go on with what is in the directory; otherwise it must hold no checkpoint.
    checkpoint
        Name of the checkpoint to resume, if the learner gives each one a new name.
    wandb
        Log to Weights & Biases too.

    Raises
    ------
    ConfigError
        If there is nothing to resume, or something that would be overwritten.
    """

    def __init__(
        self,
        out: Path,
        *,
        resume: bool = False,
        checkpoint: str = "checkpoint.pt",
        wandb: bool = False,
    ) -> None:
        self.out = out
        self.checkpoint = out / checkpoint
        self.progress = out / "progress.csv"
        if resume and not self.checkpoint.is_file():
            raise ConfigError(
                f"nothing to resume: {self.checkpoint} does not exist; begin a run elsewhere: "
                f"--out {taken(out)}-2"
            )
        if not resume and self.checkpoint.exists():
            raise ConfigError(
                f"{out} holds another run's checkpoint; continue it with --out {out} --resume, "
                f"or write elsewhere: --out {taken(out)}-2"
            )
        self._resumes = resume
        self._wandb = wandb
        self._sinks: list[Sink] = []

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

        Raises
        ------
        Diverged
            If a tensor holds NaN; the checkpoint before is left as it is.
        """
        for place, tensor in _tensors(state):
            if tensor.is_floating_point() and tensor.isnan().any():
                last = f"{self.checkpoint} is as it was" if self.checkpoint.exists() else "nothing"
                raise Diverged(
                    f"the learner's {place} holds NaN and is not saved; what is saved: {last}"
                )
        if name is not None:
            self.checkpoint = self.out / name
        checkpoints.save(self.checkpoint, state)

    def open(self, steps: int = 0) -> None:
        """Begin to log at ``steps``; records of a resumed run beyond its checkpoint are dropped."""
        upto = steps if self._resumes else None
        self._sinks = [
            *([WandB(self.out)] if self._wandb else []),  # the one that may be missing comes first
            CsvFile(self.progress, upto),
            JsonLines(self.out / "metrics.jsonl", upto),
            TensorBoard(self.out, upto),
        ]

    def log(self, metrics: Metrics) -> None:
        """Log a record everywhere."""
        assert self._sinks, "open() the run first"
        for sink in self._sinks:
            sink.write(metrics)

    def close(self) -> None:
        """End the logs."""
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


def _tensors(value: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Return all tensors of a state, and where each is."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _tensors(part, f"{place}.{name}" if place else str(name))


class Interrupt:
    """Ends a run on Ctrl-C, or on SIGTERM, which batch systems send before they end a job.

    While the run starts there is nothing to save: the first signal raises ``KeyboardInterrupt``,
    and whatever was started, queued jobs too, is closed on the way out. After :meth:`started` it
    is a wish, :attr:`wanted`, that the run looks at. The second signal acts as usual.

    Parameters
    ----------
    notice
        Printed when the wish is heard.
    quiet
        Print nothing.
    """

    def __init__(self, notice: str, quiet: bool = False) -> None:
        self.wanted = False
        self._starting = True
        self._notice = notice
        self._quiet = quiet
        self._before: dict[int, Any] = {}
        # Python delivers signals to the main thread, and only it may set handlers.
        self._installs = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupt:
        if self._installs:
            self._before = {number: signal.signal(number, self._heard) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def started(self) -> None:
        """Look at :attr:`wanted` from now on."""
        self._starting = False

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        if self._starting:
            raise KeyboardInterrupt(
                f"stopped by {signal.Signals(number).name} while workers started; the jobs and "
                "processes that it had asked for are ended"
            )
        self.wanted = True
        if not self._quiet:
            print(f"\n{self._notice}", flush=True)
