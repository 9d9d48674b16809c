"""Bookkeeping of recorded steps, for all environments at once: episodes, returns, tracks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Book", "Ledger", "choose_tracks", "steps_until_enough"]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Book(NamedTuple):
    """What a block of steps was: each ``[time, env]``, and the episodes that ended in it."""

    step: npt.NDArray[np.int32]
    """In the episode, from 0; meaningless for dead steps."""
    episode: npt.NDArray[np.int32]
    returns: list[float]
    lengths: list[int]


@dataclass
class Ledger:
    """Where every environment stands: its episode, the steps taken and the reward so far."""

    step: Ints
    episode: Ints
    total: npt.NDArray[np.float64]

    @classmethod
    def begin(cls, n: int) -> Ledger:
        """Return the ledger of ``n`` environments before their first step."""
        return cls(np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n))

    def post(self, reward: npt.NDArray[Any], ended: Bools, live: Bools | None = None) -> Book:
        """Enter a block of steps.

        Parameters
        ----------
        reward, ended
            Of each step, ``[time, env]``.
        live
            Which steps are real; a step after an end that only resets is not. By default
            all are.
        """
        horizon, n = ended.shape
        times = np.arange(horizon)[:, None]
        last = np.maximum.accumulate(np.where(ended, times, -1))
        before = np.concatenate([np.full((1, n), -1), last[:-1]])
        reset = 0 if live is None else 1  # steps spent on resetting after an end
        opening = self.step if live is None else self.step - ~live[0]
        step = np.where(before < 0, times + opening, times - before - 1 - reset)
        episode = self.episode + np.cumsum(ended, axis=0) - ended
        gained = np.cumsum(reward if live is None else reward * live, axis=0, dtype=np.float64)
        at, env = np.nonzero(ended)
        since = before[at, env]
        earlier = np.where(since < 0, -self.total[env], gained[np.maximum(since, 0), env])
        book = Book(
            step.astype(np.int32),
            episode.astype(np.int32),
            (gained[at, env] - earlier).tolist(),
            (step[at, env] + 1).tolist(),
        )
        newest = last[-1]
        rest = gained[-1] - gained[np.maximum(newest, 0), np.arange(n)]
        self.total = np.where(newest < 0, self.total + gained[-1], rest)
        after = np.maximum(horizon - newest - 1 - reset, 0)
        self.step = np.where(newest < 0, horizon + opening, after)
        self.episode = self.episode + ended.sum(axis=0)
        return book


def steps_until_enough(waiting: Ints, horizon: int, all_envs: bool) -> int:
    """Return how many steps at least it takes until a fragment can be full.

    Parameters
    ----------
    waiting
        Rows of each environment that are in no fragment yet.
    horizon
        Rows of a track.
    all_envs
        Whether every environment must give a track; otherwise as many tracks as there are
        environments are enough, whoever gives them.
    """
    if all_envs:
        return max(0, horizon - int(waiting.min()))
    missing = len(waiting) - int((waiting // horizon).sum())
    if missing <= 0:
        return 0
    lack = np.sort(horizon - waiting % horizon)
    return int(lack[min(missing, len(lack)) - 1])


def choose_tracks(live: Bools, horizon: int, n: int) -> tuple[Ints, Ints]:
    """Choose the ``n`` tracks that began first.

    An environment with few resets gives more tracks than one with many, so no environment
    runs ahead of the others and nothing has to be thrown away.

    Parameters
    ----------
    live
        Rows that wait, ``[time, env]``.

    Returns
    -------
    times, envs
        Times of each track's rows ``[horizon, n]`` and its environment ``[n]``, in the order
        of environments.
    """
    count = np.cumsum(live, axis=0)
    complete = count[-1] // horizon
    start, env = np.nonzero(live & ((count - 1) % horizon == 0))
    number = (count[start, env] - 1) // horizon
    whole = np.flatnonzero(number < complete[env])[:n]  # in the order in which they began
    env, number = env[whole], number[whole]
    order = np.lexsort((number, env))
    env, number = env[order], number[order]
    _, times = np.nonzero(live.T)
    first = np.concatenate([[0], np.cumsum(count[-1])[:-1]])[env] + number * horizon
    return times[first + np.arange(horizon)[:, None]], env
