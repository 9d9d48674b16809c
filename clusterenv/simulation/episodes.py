"""Bookkeeping of steps, for all environments at once: episodes, returns, tracks.

A track is a sequence of consecutive real steps of one environment. Books are kept track by
track, so arrays here are flat and track-major: all steps of the first track, then of the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Book", "Ledger", "choose_tracks", "live_steps", "steps_until_enough"]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Book(NamedTuple):
    """What the steps of some tracks were, and the episodes that ended in them."""

    step: npt.NDArray[np.int32]
    """In the episode, from 0."""
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

    def cut(self, env: int) -> None:
        """End the episode of one environment, if it has had a step, without a return."""
        if self.step[env]:
            self.step[env], self.total[env] = 0, 0.0
            self.episode[env] += 1

    def post(self, envs: Ints, counts: Ints, reward: npt.NDArray[Any], ended: Bools) -> Book:
        """Enter tracks.

        Parameters
        ----------
        envs
            The environment of each track, in rising order; tracks of the same environment
            follow each other in time.
        counts
            Steps of each track, at least one.
        reward, ended
            Of each step, track-major.
        """
        rows = len(ended)
        if not rows:
            return Book(np.empty(0, np.int32), np.empty(0, np.int32), [], [])
        heads = np.flatnonzero(np.diff(envs, prepend=-1))  # the first track of each environment
        # A run is a piece of an episode: it begins where an environment's steps begin, going on
        # with the episode that was open, or after an end.
        begins = np.zeros(rows, np.bool_)
        begins[(np.cumsum(counts) - counts)[heads]] = True
        after = begins.copy()
        after[1:] |= ended[:-1]
        starts = np.flatnonzero(after)
        lengths = np.diff(starts, append=rows)
        opens = begins[starts]
        first = np.flatnonzero(opens)
        owner = np.cumsum(opens) - 1
        env = envs[heads]
        opening = np.where(opens, self.step[env[owner]], 0)
        episode = self.episode[env[owner]] + np.arange(len(starts)) - first[owner]
        gained = np.add.reduceat(reward, starts, dtype=np.float64)
        gained += np.where(opens, self.total[env[owner]], 0.0)
        closed = ended[starts + lengths - 1]
        taken = opening + lengths
        numbers = np.arange(rows, dtype=np.int32)
        numbers -= np.repeat((starts - opening).astype(np.int32), lengths)
        book = Book(
            numbers,
            np.repeat(episode.astype(np.int32), lengths),
            gained[closed].tolist(),
            taken[closed].tolist(),
        )
        last = np.append(first[1:], len(starts)) - 1
        over = closed[last]
        self.step[env] = np.where(over, 0, taken[last])
        self.total[env] = np.where(over, 0.0, gained[last])
        self.episode[env] = episode[last] + over
        return book

    def post_block(self, envs: Ints, reward: npt.NDArray[Any], ended: Bools) -> Book:
        """Enter tracks of equal length: all arrays, also those returned, are ``[time, track]``."""
        horizon, n = ended.shape
        counts = np.full(n, horizon)
        book = self.post(envs, counts, reward.T.reshape(-1), ended.T.reshape(-1))
        return book._replace(
            step=np.ascontiguousarray(book.step.reshape(n, horizon).T),
            episode=np.ascontiguousarray(book.episode.reshape(n, horizon).T),
        )


def live_steps(over: Bools, dead: Bools) -> Bools:
    """Return which steps are real: the step after an end only resets.

    Parameters
    ----------
    over
        Whether a step said that an episode is over, ``[time, env]``.
    dead
        Whether the first of the steps only resets.
    """
    resets = np.concatenate([dead[None], over[:-1]])
    if (over & resets).any():  # an engine that repeats the end in the step that resets
        for t in range(1, len(over)):
            resets[t] = over[t - 1] & ~resets[t - 1]
    return ~resets


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


def choose_tracks(waiting: Bools, horizon: int) -> tuple[Ints, Ints]:
    """Choose as many tracks as there are environments: those that began first.

    An environment with few resets gives more tracks than one with many, so no environment
    runs ahead of the others and nothing has to be thrown away.

    Parameters
    ----------
    waiting
        Real steps that are in no fragment yet, ``[time, env]``.

    Returns
    -------
    times, envs
        Times of each track's rows ``[horizon, n]`` and its environment ``[n]``, in the order
        of environments.
    """
    window, n = waiting.shape
    by_env = np.ascontiguousarray(waiting.T)
    at = np.flatnonzero(by_env)  # env * window + time
    counts = np.count_nonzero(by_env, axis=1)
    whole = counts // horizon
    env = np.repeat(np.arange(n), whole)
    number = np.arange(len(env)) - np.repeat(np.cumsum(whole) - whole, whole)
    first = (np.cumsum(counts) - counts)[env] + number * horizon
    began = at[first] - env * window
    # Of two that began at the same time, the one that is its environment's first.
    order = began * (int(whole.max()) + 1) + number
    chosen = np.sort(np.argsort(order, kind="stable")[:n])
    env, first = env[chosen], first[chosen]
    times = at[first + np.arange(horizon)[:, None]]
    times -= env * window
    return times, env
