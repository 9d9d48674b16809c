"""A learner that is too slow makes the shards wait: memory stays flat."""

from __future__ import annotations

import time
from typing import Any

from agents import Still
from conftest import memory
from distributed import Client
from worlds import Wide

import clusterenv


def test_nobody_runs_ahead_of_a_learner_that_rests(client: Client, leaves_nothing: None) -> None:
    # A fragment is 8 MB. Free to run ahead, two shards would fill gigabytes meanwhile.
    options: dict[str, Any] = {"num_envs": 2, "shards": 2, "horizon": 32, "cluster": client}
    with clusterenv.Collector(Wide, Still(), credits=3, **options) as collector:
        for _ in range(12):
            next(iter(collector))
        before = memory(client)
        rows = []
        for _ in range(8):
            time.sleep(0.5)
            rows.append(collector.stats().rows)
        # What had been granted arrives: three fragments of each shard, and no more.
        assert rows[-1] == rows[-2] == 12 * 32 + 2 * 3 * 32
        growth = [now - then for now, then in zip(memory(client), before, strict=True)]
        assert max(growth) < 2 * 3 * 8 * 2**20 + 16 * 2**20
