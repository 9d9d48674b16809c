"""Which rows go on from which, against a table of every environment."""

from __future__ import annotations

import numpy as np
import pytest

from clusterenv import Batch
from clusterenv.errors import ConfigError
from clusterenv.store.table.continuation import Continuations


def batch_of(
    envs: list[int], heads: dict[int, tuple[int, int]], horizon: int, run: int, shard: int
) -> Batch:
    """Return a batch that goes on from the given episodes and steps."""
    width, rows = len(envs), len(envs) * horizon
    episode = np.tile(np.array([heads[env][0] for env in envs], np.int32), horizon)
    first = np.tile(np.array([heads[env][1] for env in envs], np.int32), horizon)
    return Batch(
        {
            "reward": np.zeros(rows, np.float32),
            "env": np.tile(np.array(envs, np.int32), horizon),
            "episode": episode,
            "step": first + np.repeat(np.arange(horizon, dtype=np.int32), width),
        },
        width,
        tail_rows=np.arange(rows - width, rows),
        tail={},
        state={},
        run=run,
        shard=shard,
        incarnation=0,
        policy_version=0,
    )


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_rows_go_on_as_the_table_says(seed: int, runs: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [[0, 1, 2], [3, 4], [5], [2, 3], [1, 4, 5], [0, 1, 2, 3, 4, 5]]
    often = groups[: int(rng.integers(2, 4))]  # mostly the same, and none in two of them
    continuations = Continuations()
    # Row, shard, episode and step of each run's environments.
    tables: list[dict[int, tuple[int, int, int, int]]] = [{} for _ in range(runs)]
    start, first, whole, left = 0, 0, 0, 0
    for _ in range(120):
        envs = often[int(rng.integers(len(often)))]
        if rng.random() < 0.1:
            envs = groups[int(rng.integers(len(groups)))]
        shard, horizon = int(rng.random() < 0.1), int(rng.integers(1, 4))
        run = int(rng.integers(runs))
        table = tables[run]
        heads = {}
        for env in envs:
            _, _, episode, step = table.get(env, (0, 0, 0, -1))
            heads[env] = (episode + 1, 0) if rng.random() < 0.1 else (episode, step + 1)
        first = max(first, start - int(rng.integers(10, 60)))  # rows that left stay away
        wanted = [
            (table[env][0], start + at)
            for at, env in enumerate(envs)
            if env in table
            and table[env][0] >= first
            and table[env][1:] == (shard, heads[env][0], heads[env][1] - 1)
        ]
        batch = batch_of(envs, heads, horizon, run, shard)
        before, after = continuations.add(batch, continuations.check(batch), start, first)
        assert list(zip(before, after, strict=True)) == wanted
        whole += isinstance(before, range)
        left += any(env in table and table[env][0] < first for env in envs)
        last = start + len(envs) * (horizon - 1)
        for at, env in enumerate(envs):
            table[env] = (last + at, shard, heads[env][0], heads[env][1] + horizon - 1)
        start += len(envs) * horizon
    assert whole > 10
    assert left > 3


def test_runs_whose_rows_have_left_are_forgotten() -> None:
    continuations, start = Continuations(), 0
    for run in range(50):
        batch = batch_of([0, 1], {0: (0, 0), 1: (0, 0)}, 3, run, 0)
        continuations.add(batch, continuations.check(batch), start, first=max(0, start - 12))
        start += batch.num_rows
        assert len(continuations._runs) <= 3


def test_many_runs_take_no_more_memory_than_one() -> None:
    continuations, far = Continuations(), 10_000_000
    for run in (1, 2):
        batch = batch_of([far], {far: (0, 0)}, 1, run, 0)
        if run == 2:
            with pytest.raises(ConfigError, match="column 'env' goes from 10000000"):
                continuations.check(batch)
        else:
            continuations.add(batch, continuations.check(batch), 0, 0)
