"""Which rows go on from which, against a table of every environment."""

from __future__ import annotations

import numpy as np
import pytest

from clusterenv import Batch
from clusterenv.store.links import Links


def batch_of(envs: list[int], heads: dict[int, tuple[int, int]], horizon: int, shard: int) -> Batch:
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
        shard=shard,
        incarnation=0,
        policy_version=0,
    )


@pytest.mark.parametrize("seed", range(20))
def test_rows_go_on_as_the_table_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [[0, 1, 2], [3, 4], [5], [2, 3], [1, 4, 5], [0, 1, 2, 3, 4, 5]]
    often = groups[: int(rng.integers(2, 4))]  # mostly the same, and none in two of them
    links = Links()
    table: dict[int, tuple[int, int, int, int]] = {}  # row, shard, episode and step
    start, whole = 0, 0
    for _ in range(120):
        envs = often[int(rng.integers(len(often)))]
        if rng.random() < 0.1:
            envs = groups[int(rng.integers(len(groups)))]
        shard, horizon = int(rng.random() < 0.1), int(rng.integers(1, 4))
        heads = {}
        for env in envs:
            _, _, episode, step = table.get(env, (0, 0, 0, -1))
            heads[env] = (episode + 1, 0) if rng.random() < 0.1 else (episode, step + 1)
        first = max(0, start - int(rng.integers(3, 40)))
        wanted = [
            (table[env][0], start + at)
            for at, env in enumerate(envs)
            if env in table
            and table[env][0] >= first
            and table[env][1:] == (shard, heads[env][0], heads[env][1] - 1)
        ]
        batch = batch_of(envs, heads, horizon, shard)
        before, after = links.add(batch, links.check(batch), start, first)
        assert list(zip(before, after, strict=True)) == wanted
        whole += isinstance(before, range)
        last = start + len(envs) * (horizon - 1)
        for at, env in enumerate(envs):
            table[env] = (last + at, shard, heads[env][0], heads[env][1] + horizon - 1)
        start += len(envs) * horizon
    assert whole > 10
