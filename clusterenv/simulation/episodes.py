"""Episode numbers, step numbers, returns and lengths, computed for whole fragments at once.

A track is a sequence of consecutive real steps of one environment. Flat arrays here are
track-major: all steps of the first track, then of the next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["EpisodeTracker", "TrackedSteps", "choose_tracks", "live_steps", "steps_until_enough"]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class TrackedSteps(NamedTuple):
    """Step and episode numbers of some tracks, and the episodes that ended in them."""

    step: npt.NDArray[np.int32]
    """Within the episode, from 0."""
    episode: npt.NDArray[np.int32]
    returns: list[float]
    lengths: list[int]


class EpisodeTracker:
    """The current episode of each of ``n`` environments: its number, length and return so far."""

    def __init__(self, n: int) -> None:
        self.step: Ints = np.zeros(n, np.int64)
        self.episode: Ints = np.zeros(n, np.int64)
        self.total: npt.NDArray[np.float64] = np.zeros(n)

    def cut(self, env: int) -> None:
        """End the episode of one environment, if it has any steps, without a return."""
        if self.step[env]:
            self.step[env], self.total[env] = 0, 0.0
            self.episode[env] += 1

    def advance(
        self, envs: Ints, counts: Ints, reward: npt.NDArray[Any], ended: Bools
    ) -> TrackedSteps:
        """Continue the episodes with the steps of some tracks.

        ``envs`` are the environments of the tracks, in ascending order; tracks of the same
        environment are in the order of time. ``counts`` are the steps of each track, at least one.
        """
        rows = len(ended)
        if not rows:
            return TrackedSteps(np.empty(0, np.int32), np.empty(0, np.int32), [], [])
        heads = np.flatnonzero(np.diff(envs, prepend=-1))  # the first track of each environment
        # A run is a piece of an episode. It starts with an environment's first step here, where
        # it continues the open episode, or after an end.
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
        tracked = TrackedSteps(
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
        return tracked

    def advance_block(self, envs: Ints, reward: npt.NDArray[Any], ended: Bools) -> TrackedSteps:
        """As :meth:`advance` for tracks of equal length, in ``[time, track]`` arrays.

        The step and episode numbers are flat and time-major, as in a fragment.
        """
        horizon, n = ended.shape
        counts = np.full(n, horizon)
        tracked = self.advance(envs, counts, reward.T.reshape(-1), ended.T.reshape(-1))
        return tracked._replace(
            step=tracked.step.reshape(n, horizon).T.reshape(-1),
            episode=tracked.episode.reshape(n, horizon).T.reshape(-1),
        )


def live_steps(over: Bools, dead: Bools) -> Bools:
    """Return which steps are real; the step after the end of an episode only resets.

    ``over``, ``[time, env]``, are the steps that returned the end of an episode, ``dead`` the
    environments whose first step only resets.
    """
    resets = np.concatenate([dead[None], over[:-1]])
    if (over & resets).any():  # an engine that reports the end again with the reset
        for t in range(1, len(over)):
            resets[t] = over[t - 1] & ~resets[t - 1]
    return ~resets


def steps_until_enough(waiting: Ints, horizon: int, all_envs: bool) -> int:
    """Return the least number of steps after which a fragment can be full.

    ``waiting`` are the rows of each environment that are in no fragment yet. With ``all_envs``
    every environment must contribute a track; otherwise as many tracks as there are environments
    are enough.
    """
    if all_envs:
        return max(0, horizon - int(waiting.min()))
    missing = len(waiting) - int((waiting // horizon).sum())
    if missing <= 0:
        return 0
    lack = np.sort(horizon - waiting % horizon)
    return int(lack[min(missing, len(lack)) - 1])


def choose_tracks(waiting: Bools, horizon: int) -> tuple[Ints, Ints]:
    """Choose as many tracks as there are environments: those that start first.

    An environment with few resets contributes more tracks than one with many, so that no rows
    have to be dropped. ``waiting`` are the real steps that are in no fragment yet, ``[time, env]``.
    Return the times of each track's rows ``[horizon, n]`` and its environment ``[n]``, in the
    order of environments.
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
    # Of two that start at the same time, the one that is its environment's first.
    order = began * (int(whole.max()) + 1) + number
    chosen = np.sort(np.argsort(order, kind="stable")[:n])
    env, first = env[chosen], first[chosen]
    times = at[first + np.arange(horizon)[:, None]]
    times -= env * window
    return times, env
