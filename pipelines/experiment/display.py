"""Progress display of a run: a panel in a terminal, one line in a notebook, lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelines.experiment.facts import Fact, facts, line, scale, sparkline
from pipelines.experiment.metrics import Metrics
from pipelines.experiment.terminal import Terminal

__all__ = ["Display"]

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_PANELS = 0.5  # at 3 ms each: 0.6 % of a core
HISTORY = 28
FACT_WIDTH = 26  # of a fact with a history beside it


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
