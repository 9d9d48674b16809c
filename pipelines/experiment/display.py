"""Progress display of a run: a panel in a terminal, lines elsewhere, a summary at the end."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelines.experiment.metrics import Metrics
from pipelines.experiment.terminal import Terminal
from pipelines.experiment.wording import count

__all__ = ["Display", "duration", "facts", "line", "size", "sparkline", "summary"]

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_PANELS = 0.5  # at 3 ms each: 0.6 % of a core
HISTORY = 28
FACT_WIDTH = 26  # of a fact with a history beside it
BARS = "▁▂▃▄▅▆▇█"
LEAST_SPAN = 0.2  # of the largest value: smaller changes do not fill a history's height

Fact = tuple[str, str]
"""A label, and what is to be said under it."""


# What is said, apart from how it is shown


def line(metrics: Metrics, total: int, ended: str = "") -> str:
    """Return the progress of a run as one line; ``ended`` says why there is no more to come.

    Examples
    --------
    >>> line(Metrics(steps=500, steps_per_second=100, mean_return=20.5, version=3), 1000)
    '        500 steps  50%      100/s  return     20.5  version 3  lag 0.00  pulls 0  5 s left'
    """
    policy = ""
    if metrics.version:
        policy = f"  version {metrics.version}  lag {metrics.lag_mean:.2f}  pulls {metrics.pulls}"
    return (
        f"{metrics.steps:>11,} steps {_percent(metrics, total, ended):>3}%  "
        f"{metrics.steps_per_second:>7,.0f}/s  return {_score(metrics.mean_return):>8}"
        f"{_judged(metrics)}{_brief(metrics)}{policy}{_trouble(metrics, '  ')}  "
        f"{ended or _left(metrics, total)}"
    )


def facts(metrics: Metrics, total: int, ended: str = "") -> list[Fact]:
    """Return the progress of a run, by label; ``ended`` as for :func:`line`."""
    score = f"{_score(metrics.mean_return)}{_judged(metrics)}"
    said = [
        ("steps", f"{metrics.steps:,} of {total:,}, {ended or _left(metrics, total)}"),
        ("steps/s", f"{metrics.steps_per_second:,.0f} on average"),
        ("return", f"{score}, {count(metrics.episodes, 'episode')}"),
        *_evaluation(metrics),
    ]
    if metrics.version:
        lag = f"{metrics.lag_mean:.2f} behind on average"
        said.append(("policy", f"version {metrics.version:,}, shards {lag}, {_pulls(metrics)}"))
    if metrics.store_rows is not None:
        said.append(("store", _store(metrics)))
    said.append(("trouble", _trouble(metrics) or "none"))
    return said


def summary(metrics: Metrics, best: float, files: Iterable[str], go_on: str) -> list[Fact]:
    """Return how a run ended, by label.

    Parameters
    ----------
    metrics
        The last.
    best
        The best mean return there was.
    files
        What was written.
    go_on
        The command that continues from here.
    """
    # One clock: of a run in several sessions, metrics.steps_per_second is that of the last.
    rate = metrics.steps / metrics.seconds if metrics.seconds else 0.0
    took = f"{metrics.steps:,} in {duration(metrics.seconds)}, {rate:,.0f}/s"
    said = [
        ("steps", took),
        ("return", f"{_score(metrics.mean_return)}{_judged(metrics)}, best {_score(best)}"),
        *_evaluation(metrics),
        ("policy", f"{count(metrics.version, 'version')}, {_pulls(metrics)}; {_weights(metrics)}"),
    ]
    if metrics.store_rows is not None:
        said.append(("store", _store(metrics)))
    said.append(("trouble", _trouble(metrics) or "none"))
    said += [("wrote" if not index else "", file) for index, file in enumerate(files)]
    said.append(("go on", go_on))
    return said


def sparkline(values: Sequence[float]) -> str:
    """Return bars as high as the values, from the least to the greatest.

    Values that differ by less than a fifth of the largest are drawn as what they are: almost flat.

    Examples
    --------
    >>> sparkline([0, 1, 2, 7])
    '▁▂▃█'
    >>> sparkline([500, 497, 500]), sparkline([3, 3])
    ('▅▄▅', '▄▄')
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    least, most = min(finite), max(finite)
    span = max(most - least, LEAST_SPAN * max(map(abs, finite))) or 1.0
    bottom = (least + most - span) / 2
    top = len(BARS) - 1
    return "".join(BARS[math.floor(top * (value - bottom) / span + 0.5)] for value in finite)


def scale(values: Sequence[float]) -> str:
    """Return what the lowest and the highest bar of a history stand for.

    Examples
    --------
    >>> scale([20.5, 480.0, math.nan]), scale([3.0, 3.0])
    ('20 to 480', '')
    """
    finite = [value for value in values if math.isfinite(value)]
    ends = [f"{end:,.0f}" for end in (min(finite), max(finite))] if finite else ["", ""]
    return "" if ends[0] == ends[1] else " to ".join(ends)


def duration(seconds: float) -> str:
    """Format a duration for people.

    Examples
    --------
    >>> duration(9.4), duration(125), duration(7_500), duration(200_000)
    ('9 s', '2 min 05 s', '2 h 05 min', '2 d 07 h')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02d} h"
    if hours:
        return f"{hours} h {minute:02d} min"
    return f"{minutes} min {second:02d} s" if minutes else f"{second} s"


def size(nbytes: float) -> str:
    """Format a number of bytes for people.

    Examples
    --------
    >>> size(999), size(1_234_567)
    ('999 B', '1.2 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def _percent(metrics: Metrics, total: int, ended: str) -> int:
    """Return the progress, rounded down: 100 means the end."""
    return 100 if ended or metrics.steps >= total else 100 * metrics.steps // total


def _left(metrics: Metrics, total: int) -> str:
    if metrics.steps >= total:
        return "done"
    if not metrics.steps_per_second:
        return "beginning"
    return f"{duration(max(0, total - metrics.steps) / metrics.steps_per_second)} left"


def _score(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f}"  # no episode has ended


def _judged(metrics: Metrics) -> str:
    apart = metrics.judged_return
    alike = apart is None or math.isnan(apart) or apart == metrics.mean_return
    return "" if alike else f" (judged {apart:.1f})"


def _brief(metrics: Metrics) -> str:
    evaluated = metrics.eval_return
    return "" if evaluated is None else f"  eval {_score(evaluated):>7}"


def _evaluation(metrics: Metrics) -> list[Fact]:
    """Return the newest evaluation, if the run is evaluated."""
    mean, at = metrics.eval_return, metrics.eval_steps
    low, high = metrics.eval_return_low, metrics.eval_return_high
    if mean is None or at is None or low is None or high is None:
        return []
    if math.isnan(mean):
        return [("eval", "none yet")]
    interval = "" if math.isnan(low) else f" (95 %: {_score(low)} to {_score(high)})"
    return [("eval", f"{_score(mean)}{interval} at {int(at):,} steps")]


def _pulls(metrics: Metrics) -> str:
    possible = metrics.pulls + metrics.pulls_saved
    saved = f", {metrics.pulls_saved / possible:.0%} saved" if possible else ""
    return f"{count(metrics.pulls, 'pull')}{saved}"


def _weights(metrics: Metrics) -> str:
    """Return the weight bytes sent, and saved: as many pulls of their mean size."""
    sent = f"{size(metrics.weight_bytes)} of weights sent"
    if not (metrics.pulls and metrics.pulls_saved):
        return sent
    return f"{sent}, {size(metrics.weight_bytes / metrics.pulls * metrics.pulls_saved)} saved"


def _store(metrics: Metrics) -> str:
    rows, capacity = metrics.store_rows or 0, metrics.store_capacity or 1
    return (
        f"{count(rows, 'row')}, {rows / capacity:.0%} full, {size(metrics.store_bytes or 0)}, "
        f"over {count(metrics.store_age or 0, 'version')}"
    )


def _trouble(metrics: Metrics, before: str = "") -> str:
    """Return the losses and faults so far; empty if there were none."""
    counts = (
        (metrics.restarts, "restart", ""),
        (metrics.rebuilt, "environment", " rebuilt"),
        (metrics.lost_rows, "row", " lost"),
    )
    said = ", ".join(f"{count(number, noun)}{what}" for number, noun, what in counts if number)
    return f"{before}{said}" if said else ""


# How it is shown


class _Form(Protocol):
    """A way to show facts."""

    seconds: float
    """Between two times."""

    def show(self, metrics: Metrics, ended: str = "") -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """For files and pipes: a line now and then."""

    seconds = SECONDS_BETWEEN_LINES

    def __init__(self, title: str, total: int) -> None:
        self._total = total

    def show(self, metrics: Metrics, ended: str = "") -> None:
        print(line(metrics, self._total, ended), flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        """Nothing is left to do."""


class _Panel:
    """For terminals: facts that stay in place, whatever else is printed."""

    seconds = SECONDS_BETWEEN_PANELS

    def __init__(self, title: str, total: int, console: Console | None = None) -> None:
        self._title, self._total = title, total
        self._rates: deque[float] = deque(maxlen=HISTORY)
        self._returns: deque[float] = deque(maxlen=HISTORY)
        self._before, self._steps = (0, 0.0), -1
        self._live = Live(console=console, auto_refresh=False)
        self._width = self._live.console.width
        self._live.start()

    def show(self, metrics: Metrics, ended: str = "") -> None:
        steps, seconds = self._before
        if metrics.seconds > seconds:
            if steps:
                self._rates.append((metrics.steps - steps) / (metrics.seconds - seconds))
            self._before = (metrics.steps, metrics.seconds)
        if metrics.steps != self._steps:
            self._returns.append(metrics.mean_return)
            self._steps = metrics.steps
        if (width := self._live.console.width) < self._width:
            # The terminal has wrapped the lines, and the panel has more of them than it knows.
            self._live.console.clear()
        self._width = width
        self._live.update(self._render(metrics, ended), refresh=True)

    def _render(self, metrics: Metrics, ended: str) -> Table:
        done = self._total if ended else min(metrics.steps, self._total)
        histories = {"steps/s": self._rates, "return": self._returns}
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", justify="right")
        grid.add_row("", Text(self._title, style="bold"))
        grid.add_row("", ProgressBar(self._total, done, width=60))
        for label, text in facts(metrics, self._total, ended):
            alarming = label == "trouble" and text != "none"
            values = tuple(histories.get(label, ()))
            history = sparkline(values)
            said = (text.ljust(FACT_WIDTH) if history else text, "yellow" if alarming else "")
            bars = Text.assemble(said, (history, "cyan"), (f"  {scale(values)}", "dim"))
            # A line that wraps would grow the panel, and a narrower terminal keep half of it.
            bars.no_wrap, bars.overflow = True, "ellipsis"
            grid.add_row(label, bars)
        return grid

    def say(self, text: str) -> None:
        # Rich would wrap lines and colour numbers: paths are to be copied.
        self._live.console.print(Text(text, overflow="ignore", no_wrap=True), crop=False)

    def close(self) -> None:
        self._live.stop()


class _Notebook:
    """For notebooks: one line of output that changes."""

    seconds = 1.0

    def __init__(self, title: str, total: int) -> None:
        from IPython.display import display

        self._title, self._total = title, total
        shown = {"text/plain": title}
        self._handle: Any = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def show(self, metrics: Metrics, ended: str = "") -> None:
        text = f"{self._title}: {line(metrics, self._total, ended).strip()}"
        self._handle.update({"text/plain": text}, raw=True)

    def say(self, text: str) -> None:
        print(text)

    def close(self) -> None:
        """Leave the line there."""


class Display:
    """Shows the progress of a run, in a form that suits the output.

    Parameters
    ----------
    title
        What runs.
    total
        Steps that it is to make.
    quiet
        Show nothing.
    cluster
        It runs on, as the user named it.
    """

    def __init__(
        self, title: str, total: int, quiet: bool = False, cluster: str | None = None
    ) -> None:
        self._title, self._total, self._quiet = title, total, quiet
        running = cluster is not None and ("://" in cluster or cluster.endswith(".json"))
        self._begins = f"connecting to {cluster}" if running else "starting the workers"
        self._form: _Form | None = None
        self._terminal: Terminal | None = None
        self._shown = -math.inf
        self._newest: Metrics | None = None

    def __enter__(self) -> Display:
        if not self._quiet and not _in_notebook() and sys.stdout.isatty():
            self._terminal = Terminal(self._say_above)
        self.say(f"{self._title}: {self._begins}")  # which may take a while
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None

    def _say_above(self, text: str) -> bool:
        """Print a line above the panel, if there is one."""
        form = self._form
        if form is not None:
            form.say(text)
        return form is not None

    @property
    def due(self) -> bool:
        """Whether it is time to show something; what is shown sooner waits, for the last."""
        pause = self._form.seconds if self._form is not None else 0.0
        return not self._quiet and time.monotonic() - self._shown >= pause

    def show(self, metrics: Metrics) -> None:
        """Show a record, unless another was shown a moment ago."""
        self._newest = metrics
        if self.due:
            self._form = self._form or self._make_form()
            self._shown, self._newest = time.monotonic(), None
            with self._while_output_is_read():
                self._form.show(metrics)

    def finish(self, metrics: Metrics, ended: str) -> None:
        """Show the last record of a run that has come to its end, and why that is."""
        if not self._quiet:
            self._form = self._form or self._make_form()
            self._newest = None
            with self._while_output_is_read():
                self._form.show(metrics, ended)

    def _make_form(self) -> _Form:
        if _in_notebook():
            return _Notebook(self._title, self._total)
        if self._terminal is not None:
            return _Panel(self._title, self._total, Console(file=self._terminal.out))
        if sys.stdout.isatty():
            return _Panel(self._title, self._total)
        return _Lines(self._title, self._total)

    @contextmanager
    def _while_output_is_read(self) -> Iterator[None]:
        """Continue silently after the reader of a pipe has exited: ``clusterenv … | head``."""
        try:
            yield
        except BrokenPipeError:
            self._quiet, self._form = True, None
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def say(self, text: str) -> None:
        """Print a line that stays."""
        with self._while_output_is_read():
            if self._form is not None:
                self._form.say(text)
            elif not self._quiet:
                print(text, flush=True)

    def close(self) -> None:
        """Show the last record, if it was not, and leave it there."""
        form, newest, self._newest = self._form, self._newest, None
        if form is not None:
            if self._terminal is not None:
                self._terminal.flush()
            with self._while_output_is_read():
                if newest is not None:
                    form.show(newest)
                form.close()
            self._form = None  # only now: until the panel is closed, lines go above it

    def sum_up(self, said: Sequence[Fact]) -> None:
        """Print facts that stay, as a table."""
        self.close()
        for label, text in said:
            self.say(f"{label:>9}  {text}")


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")
