"""Episode and step numbers of tracks, against a plain loop over steps."""

from __future__ import annotations

import numpy as np
import pytest

from clusterenv.simulation.episodes import EpisodeTracker, choose_tracks, live_steps
from clusterenv.simulation.next_step import StepRing


@pytest.mark.parametrize("seed", range(20))
def test_numbers_and_returns_are_those_of_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 4
    tracker = EpisodeTracker(n)
    step, episode, total = [0] * n, [0] * n, [0.0] * n
    for _ in range(5):
        envs = np.sort(rng.integers(0, n, rng.integers(0, 6)))
        counts = rng.integers(1, 7, len(envs))
        reward = rng.integers(0, 9, counts.sum()).astype(np.float32)
        ended = rng.random(counts.sum()) < rng.choice([0.0, 0.3, 1.0])
        steps, episodes, returns, lengths = [], [], [], []
        for row, env in enumerate(np.repeat(envs, counts)):
            steps.append(step[env])
            episodes.append(episode[env])
            total[env] += reward[row]
            step[env] += 1
            if ended[row]:
                returns.append(total[env])
                lengths.append(step[env])
                step[env], episode[env], total[env] = 0, episode[env] + 1, 0.0
        tracked = tracker.advance(envs, counts, reward, ended)
        assert (tracked.step.tolist(), tracked.episode.tolist()) == (steps, episodes)
        assert (tracked.returns, tracked.lengths) == (returns, lengths)
        assert tracker.step.tolist() == step
        assert tracker.episode.tolist() == episode
        assert tracker.total.tolist() == total


def test_the_step_after_an_end_is_dead_and_the_one_after_it_is_not() -> None:
    over = np.array([[1, 0], [1, 0], [1, 1], [0, 0], [0, 1]], np.bool_)
    live = live_steps(over, np.array([False, True]))
    # The first environment ends in every real step, and its dead step says so again.
    assert live[:, 0].tolist() == [True, False, True, False, True]
    assert live[:, 1].tolist() == [False, True, True, False, True]


def test_the_tracks_that_began_first_are_chosen() -> None:
    waiting = np.ones((8, 3), np.bool_)
    waiting[[1, 3, 5, 7], 1] = False  # half of its steps are real
    waiting[:2, 2] = False
    times, envs = choose_tracks(waiting, 4)
    assert envs.tolist() == [0, 1, 2]
    assert times.T.tolist() == [[0, 1, 2, 3], [0, 2, 4, 6], [2, 3, 4, 5]]
    waiting[4:, 1] = False
    times, envs = choose_tracks(waiting, 4)
    assert envs.tolist() == [0, 0, 2]
    assert times.T.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [2, 3, 4, 5]]


def test_of_two_tracks_that_begin_together_an_environments_first_comes_first() -> None:
    waiting = np.array([[True, False], [True, True]])
    times, envs = choose_tracks(waiting, horizon=1)
    assert envs.tolist() == [0, 1]
    assert times.tolist() == [[0, 1]]


@pytest.mark.parametrize("ends", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("horizon", [1, 5, 16])
def test_recorded_steps_come_out_once_and_in_order(ends: float, horizon: int) -> None:
    """However often episodes end, around the ring and back."""
    rng = np.random.default_rng(1)
    n = 6
    ring = StepRing(n, horizon, EpisodeTracker(n))
    columns = ring.columns
    for name, dtype in (("terminated", np.bool_), ("truncated", np.bool_), ("reward", np.float32)):
        columns[name] = np.zeros((ring.rows, n), dtype)
    stamp = np.zeros((ring.rows, n), np.int64)  # the step at which a row was written
    real: list[list[int]] = [[] for _ in range(n)]
    seen: list[list[int]] = [[] for _ in range(n)]
    dead = np.zeros(n, np.bool_)
    now = 0
    rate = ends * np.linspace(0, 1, n)  # some environments end often, others never
    for _ in range(60):
        for span in ring.spans(all_envs=False):
            for t in span:
                over = ~dead & (rng.random(n) < rate)
                columns["terminated"][t] = over
                stamp[t] = now
                for env in np.flatnonzero(~dead):
                    real[env].append(now)
                dead = over
                now += 1
        tracks = ring.take()
        assert tracks.at.shape == (horizon, n)
        rows = stamp.reshape(-1)[tracks.flat].reshape(horizon, n)
        for column, env in enumerate(tracks.envs):
            seen[env] += rows[:, column].tolist()
    for env in range(n):
        assert seen[env] == real[env][: len(seen[env])]
        assert len(real[env]) - len(seen[env]) <= 3 * horizon
