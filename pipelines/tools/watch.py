"""Print the versions of a run as they are announced: divergences, pulls, lag and return.

``clusterenv watch --cluster tcp://scheduler:8786`` follows a run from any machine with access to
the cluster, until the run ends.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import clusterenv
from clusterenv.errors import ConfigError
from pipelines.experiment import options
from pipelines.experiment.checks import Count, Options

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Args", "cells", "watch"]

COLUMNS = ("time", "version", "divergence", "in use", "pulls", "lag", "steps", "return")


@dataclass(frozen=True)
class Args(Options):
    """What to follow."""

    cluster: str  # scheduler address, or a scheduler file
    run: str | None = None  # name or number of the run; default: the only one
    last: Count = 20  # versions in the table

    def __post_init__(self) -> None:
        super().__post_init__()
        if "://" not in self.cluster and not self.cluster.endswith(".json"):
            raise ConfigError(
                f"--cluster {self.cluster} is no running cluster, which the run is on: --cluster "
                "tcp://scheduler:8786, or --cluster scheduler.json"
            )


def cells(announcement: clusterenv.Announcement) -> tuple[str, ...]:
    """Return the row of a version, by :data:`COLUMNS`.

    Examples
    --------
    >>> cells(clusterenv.Announcement(7, {5: 0.02, 6: 0.01}, {}, 7, pulls=12, rows=2048))[1:]
    ('7', '0.02', '5 … 6', '12', '0.00', '2,048', '–')
    """
    used, mean = announcement.divergences, announcement.mean_return
    least, most = min(used, default=announcement.version), max(used, default=announcement.version)
    return (
        time.strftime("%H:%M:%S", time.localtime(announcement.time)),
        f"{announcement.version:,}",
        f"{max(used.values()):.3g}" if used else "–",
        f"{least:,}" if least == most else f"{least:,} … {most:,}",
        f"{announcement.pulls:,}",
        f"{announcement.lag:.2f}",
        f"{announcement.rows:,}",
        "–" if mean is None else f"{mean:.1f}",
    )


def watch(args: Args) -> None:
    """Follow a run to its end.

    Raises
    ------
    ConfigError
        If there is no such run, or none was named and there are several.
    """
    with clusterenv.connect(args.cluster, set_as_default=False) as client:
        following = clusterenv.follow(client, args.run)
        with _printer(args.last) as show:
            for announcement in following:
                show(announcement)
    print("the run has ended")


@contextlib.contextmanager
def _printer(last: int) -> Iterator[Callable[[clusterenv.Announcement], None]]:
    """Return what shows a version: in a live table, or as a line where no person watches."""
    if not sys.stdout.isatty():
        print(*(f"{name:>12}" for name in COLUMNS))
        yield lambda said: print(*(f"{cell:>12}" for cell in cells(said)), flush=True)
        return
    from rich.live import Live

    shown: deque[clusterenv.Announcement] = deque(maxlen=last)
    with Live(refresh_per_second=4) as live:

        def show(announcement: clusterenv.Announcement) -> None:
            shown.append(announcement)
            live.update(_table(shown))

        yield show


def _table(shown: deque[clusterenv.Announcement]) -> Table:
    from rich.table import Table

    table = Table(title=f"run {shown[-1].run}", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for announcement in shown:
        table.add_row(*cells(announcement))
    return table


def main(words: Sequence[str]) -> None:
    """Read the command line and watch."""
    watch(options.read(Args, words, description=__doc__, prog="clusterenv watch"))
