"""When fragments and weights are counted: no cluster, no clock."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from agents import cartpole_policy

from clusterenv import Never, Stats
from clusterenv.data.spaces import Layout
from clusterenv.head.fleet.placement import split
from clusterenv.head.fleet.roster import Roster
from clusterenv.head.monitor.stats import Tally
from clusterenv.sync.publisher import Publisher
from clusterenv.transport.messages import FragmentMeta


class Counting:
    """A tally with its roster of two shards."""

    def __init__(self) -> None:
        self.roster, self.tally = Roster(split(4, 2)), Tally(0)
        layout = Layout(gym.spaces.Box(-1, 1, (4,), np.float32))
        self._publisher = Publisher(cartpole_policy(), Never(), layout, lambda: [0])

    def arrives(self, shard: int, *returns: float, **numbers: int) -> None:
        """A fragment of 8 rows in 100 bytes."""
        told = {"version": 0, "newest": 0, "dropped": 0, "checks": 0, "pulls": 0, **numbers}
        lengths = [int(value) for value in returns]
        meta = FragmentMeta(divergence=0.5, returns=[*returns], lengths=lengths, cuts=[], **told)
        self.tally.add(self.roster.received(shard, 8, meta), 100)

    def stats(self) -> Stats:
        return self.tally.stats(self.roster, self._publisher, announced_bytes=0)


def lasting(stats: Stats) -> dict[str, Any]:
    """What does not depend on time."""
    gone = ("seconds", "steps_per_second", "queued", "queued_by_shard")
    return {name: value for name, value in vars(stats).items() if name not in gone}


def test_nothing_of_a_rollout_is_counted_before_it_is_complete() -> None:
    counting = Counting()
    before = lasting(counting.stats())
    counting.arrives(1, 3.0, 4.0, version=1, newest=3, dropped=2, checks=2, pulls=1)
    counting.tally.sent(50)
    counting.tally.sent(60, relayed=True)
    assert lasting(counting.stats()) == before
    assert counting.stats().queued_by_shard == [0, 1]
    counting.arrives(0, 5.0, version=3, newest=3)
    counting.tally.settle(counting.roster)
    stats = counting.stats()
    assert (stats.rows, stats.wire_bytes, stats.episodes, stats.dropped_rows) == (16, 200, 3, 2)
    assert (stats.returns, stats.lengths) == ([5.0, 3.0, 4.0], [5, 3, 4])  # by shard
    assert (stats.lag_min, stats.lag_mean, stats.lag_max) == (0, 1.0, 2)
    assert (stats.checks, stats.pulls, stats.versions) == (2, 1, [3, 1])
    assert (stats.weight_bytes, stats.relayed_bytes) == (50, 60)
    counting.tally.settle(counting.roster)
    assert lasting(counting.stats()) == lasting(stats)


def test_rows_that_arrived_for_a_rollout_that_nobody_takes_are_dropped() -> None:
    counting = Counting()
    counting.arrives(0, 5.0)
    counting.tally.settle(counting.roster)
    counting.arrives(0, 6.0)
    counting.arrives(1, 7.0)
    counting.tally.discard()
    counting.tally.settle(counting.roster)
    stats = counting.stats()
    assert (stats.rows, stats.dropped_rows, stats.returns) == (8, 16, [5.0])
