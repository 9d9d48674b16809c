"""Returns by environment, added up from batches, equal those added up row by row."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from batches import Fleet

from pipelines.experiment.episodes import WINDOW, Episodes


@pytest.mark.parametrize("tracks", [False, True], ids=["one track each", "several tracks"])
def test_returns_are_those_of_the_rows_one_by_one(tracks: bool) -> None:
    fleet = Fleet(shards=2, envs=4, horizon=5, tracks=tracks, seed=3)
    episodes, open_returns, finished = Episodes(8), defaultdict(float), []
    for _ in range(40):
        batch, rows = fleet.next()
        expected = []
        width = batch.num_envs
        for track in range(width):  # tracks of one environment follow each other
            for row in rows[track::width]:
                open_returns[row.env] += row.reward
                if row.terminated or row.truncated:
                    expected.append((row.env, open_returns.pop(row.env)))
        found = episodes.add(batch)
        assert [env for env, _ in found] == [env for env, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected])
        finished += expected
    assert episodes.count == len(finished) > WINDOW
    assert list(episodes.returns) == pytest.approx([value for _, value in finished[-WINDOW:]])


def test_an_episode_that_was_lost_with_its_worker_is_in_no_return() -> None:
    fleet, episodes = Fleet(shards=1, envs=2, horizon=3, episode=50, seed=6), Episodes(2)
    assert not episodes.add(fleet.next()[0])
    fleet.restart(0)
    found, rows = [], []
    while not found:
        batch, more = fleet.next()
        found, rows = episodes.add(batch), rows + more
    env, value = found[0]
    mine = [row for row in rows if (row.env, row.episode) == (env, 0)]
    assert value == pytest.approx(sum(row.reward for row in mine))


def test_the_environments_that_are_judged_have_a_window_as_long_in_steps() -> None:
    fleet = Fleet(shards=2, envs=4, horizon=5, seed=4)
    episodes = Episodes(8, judged=[6, 7])
    assert math.isnan(episodes.judgement)
    judged = []
    while len(judged) < 40:
        judged += [value for env, value in episodes.add(fleet.next()[0]) if env >= 6]
    assert list(episodes.judged_returns) == judged[-25:]
    assert episodes.judgement == pytest.approx(sum(judged[-25:]) / 25)


def test_a_state_goes_on_where_it_was() -> None:
    fleet = Fleet(seed=5)
    first, second = Episodes(6), Episodes(6)
    for _ in range(50):
        first.add(fleet.next()[0])
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
