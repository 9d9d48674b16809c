"""A ring of recorded steps, of which some only reset an environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clusterenv.data.spaces import Column
from clusterenv.simulation.episodes import (
    EpisodeTracker,
    TrackedSteps,
    choose_tracks,
    live_steps,
    steps_until_enough,
)

__all__ = ["RING_HORIZONS", "StepRing", "Tracks"]

RING_HORIZONS = 6
"""Length of the ring, in horizons: in the worst case every second step only resets."""

Ints = npt.NDArray[np.int64]


class Tracks(NamedTuple):
    """The recorded steps that become a fragment's rows."""

    at: Ints
    """Each row's time row in the ring, ``[horizon, n]``."""
    envs: Ints
    """The environment of each track, from 0."""
    flat: Ints
    """Each row's index into the ring's flattened columns."""


class StepRing:
    """Recorded steps, and which of them are real and in no fragment yet.

    Parameters
    ----------
    n
        Number of environments.
    horizon
        Rows of a track.
    tracker
        Counts the steps that are dropped: their episodes continue.
    """

    def __init__(self, n: int, horizon: int, tracker: EpisodeTracker) -> None:
        self.rows = RING_HORIZONS * horizon
        self.columns: dict[str, Column] = {}
        self.versions = np.zeros(self.rows, np.int32)
        self._n = n
        self._horizon = horizon
        self._tracker = tracker
        self.now = 0
        """Steps recorded so far."""
        self._dead = np.zeros(n, np.bool_)
        self._live = np.zeros((self.rows, n), np.bool_)
        self._waiting = np.zeros(n, np.int64)  # real steps that are in no fragment yet
        self._since = np.zeros(n, np.int64)  # the first step that may be in the next fragment

    @property
    def waiting_rows(self) -> int:
        """Real steps that are in no fragment."""
        return int(self._waiting.sum())

    def spans(self, all_envs: bool) -> Iterator[range]:
        """Yield consecutive time rows for the caller to fill, until a fragment is full."""
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
        """Choose the steps of a fragment and mark them as used."""
        window, waiting = self._window()
        times, envs = choose_tracks(waiting, self._horizon)
        self._waiting -= self._horizon * np.bincount(envs, minlength=self._n)
        self._since[envs] = window + times[-1] + 1  # the last of an environment's tracks wins
        times += window % self.rows
        np.subtract(times, self.rows, out=times, where=times >= self.rows)  # faster than modulo
        return Tracks(times, envs, (times * self._n + envs).reshape(-1))

    def drop(self) -> TrackedSteps:
        """Drop all steps that are in no fragment, and return them."""
        window, waiting = self._window()
        env, time = np.nonzero(waiting.T)
        at = (window + time) % self.rows
        envs, counts = np.unique(env, return_counts=True)
        reward, terminated, truncated = (
            self.columns[name][at, env] for name in ("reward", "terminated", "truncated")
        )
        self._waiting[:] = 0
        self._since[:] = self.now
        return self._tracker.advance(envs, counts, reward, terminated | truncated)

    def _window(self) -> tuple[int, npt.NDArray[np.bool_]]:
        """Return the first step that may be unused, and which steps since then are."""
        first = int(self._since.min())
        times = np.arange(first, self.now)
        return first, self._live[times % self.rows] & (times[:, None] >= self._since)
