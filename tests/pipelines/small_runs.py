"""Short runs of DQN, and a check of the rows that they leave on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import clusterenv
from pipelines.dqn import DQN, Args

ROOT = Path(__file__).parents[2]


def small(out: Path | None, **changes: object) -> Args:
    """A run of some hundred updates."""
    settings = {
        "total_steps": 1_024,
        "num_envs": 4,
        "horizon": 8,
        "shards": 2,
        "min_rows": 128,
        "batch": 16,
        "hidden": (16,),
        "log_every": 128,
        "checkpoint_every": 256,
        "rows_per_update": 8,
        "publish_every": 8,
        "epsilon_steps": 500,
        "quiet": True,
    }
    return DQN.preset("CartPole-v1", **{**settings, "out": out, **changes})


def check_rows(dataset: Path) -> int:
    """Fail unless every row follows the one before; return how many there are."""
    table = clusterenv.open_dataset(dataset).to_table()
    names = ("run", "incarnation", "env", "episode", "step")
    keys = np.stack([table[name].to_numpy() for name in names], axis=1)
    assert len(np.unique(keys, axis=0)) == len(keys)
    ends = table["terminated"].to_numpy() | table["truncated"].to_numpy()
    for source in np.unique(keys[:, :3], axis=0):
        mine = (keys[:, :3] == source).all(1)
        episode, step, over = keys[mine, 3], keys[mine, 4], ends[mine]
        assert (episode[0], step[0]) == (0, 0)
        np.testing.assert_array_equal(episode[1:], episode[:-1] + over[:-1])
        np.testing.assert_array_equal(step[1:], np.where(over[:-1], 0, step[:-1] + 1))
    return len(keys)
