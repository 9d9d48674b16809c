"""What the training programs share: their options, the settings, the clock and the report.

A program trains one learner on one environment with one seed, and prints a line of JSON. Without
``--goal`` it measures the environment steps per second that reach an update, with the settings
below, the same for all. With ``--goal`` it trains with its library's own settings until the mean
return of the last 100 finished training episodes is at least that much, or ``--timeout`` is over.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.peers.common import WARM_UP

WORKERS, ENVS = 2, 16
ENDLESS = 1_000_000_000  # steps; the clock ends the run first
WINDOW = 100  # episodes
HIDDEN = (64, 64)

# The settings with which steps per second are measured.
PPO_HORIZON, PPO_EPOCHS, PPO_MINIBATCHES = 128, 4, 4
STREAM_HORIZON = 32  # of asynchronous learners; a batch is what one worker collects in it
STREAM_BATCH = STREAM_HORIZON * ENVS // WORKERS
DQN_BATCH, DQN_ROWS_PER_UPDATE, DQN_CAPACITY, DQN_MIN_ROWS = 256, 8, 100_000, 1_000


@dataclass(frozen=True)
class Task:
    """What a program is asked to do."""

    algorithm: str
    env: str
    seed: int
    seconds: float
    goal: float | None
    timeout: float

    @property
    def limit(self) -> float:
        """Seconds from the first environment step after which the run ends anyway."""
        return WARM_UP + self.seconds if self.goal is None else self.timeout


def task_of(description: str | None, algorithms: Sequence[str]) -> Task:
    """Return the task that the command line describes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--algorithm", choices=algorithms, default=algorithms[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15.0, help="to measure steps per second")
    parser.add_argument("--goal", type=float, help="mean return to train to")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, with --goal")
    return Task(**vars(parser.parse_args()))


def rate(marks: Sequence[tuple[float, int]], warm_up: float = WARM_UP) -> float:
    """Return the steps per second between the first mark after the warm-up and the last one.

    Parameters
    ----------
    marks
        Seconds and steps so far, after each of a run's updates or some of them.
    warm_up
        Seconds.

    Examples
    --------
    >>> rate([(1.0, 10), (4.0, 400), (6.0, 1_000)])
    300.0
    """
    warm = [mark for mark in marks if mark[0] >= warm_up]
    if len(warm) < 2:
        raise SystemExit(f"{len(warm)} updates after {warm_up} s are too few for a rate")
    (began, before), (ended, after) = warm[0], warm[-1]
    return (after - before) / (ended - began)


class Training:
    """Where a run stands, by the clock, and whether it is over.

    Parameters
    ----------
    task
        What is asked for.
    clock
        Returns seconds; by default the time of day, which processes share.
    """

    def __init__(self, task: Task, clock: Callable[[], float] = time.time) -> None:
        self._task, self._clock = task, clock
        self._began: float | None = None
        self._returns: deque[float] = deque(maxlen=WINDOW)
        self._marks: list[tuple[float, int]] = []
        self._steps = 0
        self._ended: float | None = None
        self.reached: tuple[float, int] | None = None
        """Seconds and environment steps to the goal."""

    def begin(self, at: float | None = None) -> None:
        """Start the clock: the first environment step is due, or was at ``at``."""
        self._began = self._clock() if at is None else at

    @property
    def seconds(self) -> float:
        """Since the beginning; 0 before."""
        return 0.0 if self._began is None else self._clock() - self._began

    @property
    def over(self) -> bool:
        """Whether the goal is reached, or the time is over."""
        if self._ended is None and (self.reached or self.seconds >= self._task.limit):
            self._ended = self.seconds
        return self._ended is not None

    def updated(self, steps: int) -> None:
        """Note that so many steps have reached an update, in all."""
        self._steps = max(self._steps, steps)
        if self._task.goal is None:
            self._marks.append((self.seconds, steps))

    def episodes(self, returns: Iterable[float], steps: int) -> None:
        """Note the returns of episodes that ended, the first of them first, after so many steps."""
        self._steps = max(self._steps, steps)
        for value in returns:
            self._returns.append(float(value))
            full, goal = len(self._returns) == WINDOW, self._task.goal
            if goal is not None and not self.over and full and self.mean_return >= goal:
                self.reached = self.seconds, steps

    @property
    def mean_return(self) -> float:
        """Of the last 100 episodes; NaN before the first."""
        return statistics.fmean(self._returns) if self._returns else float("nan")

    def report(self, package: str) -> None:
        """Print the result."""
        version = f"{package} {importlib.metadata.version(package)}"
        if self._task.goal is None:
            print_report(version, steps_per_second=rate(self._marks))
        else:
            seconds, steps = self.reached or (self._ended or self.seconds, self._steps)
            reached = self.reached is not None
            print_report(version, reached, seconds, steps, self.mean_return)


def print_report(
    version: str,
    reached: bool | None = None,
    seconds: float | None = None,
    steps: int | None = None,
    mean_return: float | None = None,
    steps_per_second: float | None = None,
) -> None:
    """Print a result as a line of JSON; what was not measured is null."""
    report = {"peer": version.split(" ")[0], "version": version, "reached": reached}
    numbers = {"seconds": seconds, "mean_return": mean_return, "steps_per_second": steps_per_second}
    rounded = {name: None if n is None or n != n else round(n, 2) for name, n in numbers.items()}
    print(json.dumps({**report, "steps": steps, **rounded}), flush=True)
