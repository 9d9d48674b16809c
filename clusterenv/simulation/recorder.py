"""Steps of engines that spend some of them on resetting, recorded until they become tracks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clusterenv.data.spaces import Column
from clusterenv.simulation.episodes import (
    Book,
    Ledger,
    choose_tracks,
    live_steps,
    steps_until_enough,
)

__all__ = ["Recorder", "Tracks"]

_ARENA = 6  # horizons of steps kept: at worst every second step only resets

Ints = npt.NDArray[np.int64]


class Tracks(NamedTuple):
    """Which recorded steps are a fragment's rows."""

    at: Ints
    """Time row in the ring of every row, ``[horizon, n]``."""
    envs: Ints
    """The environment of each track, from 0."""
    flat: Ints
    """Rows of the ring's columns, flat, for every row of the fragment."""


class Recorder:
    """A ring of recorded steps, and which of them are real and in no fragment yet.

    Parameters
    ----------
    n
        Environments.
    horizon
        Rows of a track.
    ledger
        Steps that are forgotten are entered here: their episodes go on all the same.
    """

    def __init__(self, n: int, horizon: int, ledger: Ledger) -> None:
        self.rows = _ARENA * horizon
        self.columns: dict[str, Column] = {}
        self.versions = np.zeros(self.rows, np.int32)
        self._n = n
        self._horizon = horizon
        self._ledger = ledger
        self.now = 0
        """Steps recorded so far."""
        self._dead = np.zeros(n, np.bool_)
        self._live = np.zeros((self.rows, n), np.bool_)
        self._waiting = np.zeros(n, np.int64)  # real steps that are in no fragment yet
        self._since = np.zeros(n, np.int64)  # the step from which they count

    @property
    def waiting_rows(self) -> int:
        """Real steps that are in no fragment."""
        return int(self._waiting.sum())

    def spans(self, all_envs: bool) -> Iterator[range]:
        """Yield the time rows to be filled, without a gap, until a fragment is full."""
        while steps := steps_until_enough(self._waiting, self._horizon, all_envs):
            start = self.now % self.rows
            stop = min(start + steps, self.rows)
            yield range(start, stop)
            over = self.columns["terminated"][start:stop] | self.columns["truncated"][start:stop]
            live = self._live[start:stop] = live_steps(over, self._dead)
            self._dead = over[-1] & live[-1]
            self._waiting += np.count_nonzero(live, axis=0)
            self.now += stop - start

    def take(self) -> Tracks:
        """Choose the steps of a fragment; they wait no longer."""
        window, waiting = self._window()
        times, envs = choose_tracks(waiting, self._horizon)
        self._waiting -= self._horizon * np.bincount(envs, minlength=self._n)
        self._since[envs] = window + times[-1] + 1  # the last track of an environment counts
        times += window % self.rows
        np.subtract(times, self.rows, out=times, where=times >= self.rows)  # faster than modulo
        return Tracks(times, envs, (times * self._n + envs).reshape(-1))

    def forget(self) -> Book:
        """Let go of all steps that wait, and return what they were."""
        window, waiting = self._window()
        env, time = np.nonzero(waiting.T)
        at = (window + time) % self.rows
        envs, counts = np.unique(env, return_counts=True)
        reward, terminated, truncated = (
            self.columns[name][at, env] for name in ("reward", "terminated", "truncated")
        )
        self._waiting[:] = 0
        self._since[:] = self.now
        return self._ledger.post(envs, counts, reward, terminated | truncated)

    def _window(self) -> tuple[int, npt.NDArray[np.bool_]]:
        """Return the first step of those that may wait, and which of them do."""
        first = int(self._since.min())
        times = np.arange(first, self.now)
        return first, self._live[times % self.rows] & (times[:, None] >= self._since)
