"""Short runs, what they log, and a check of the rows that they leave on disk."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import wait_until
from torch import Tensor

import clusterenv
from pipelines import cli
from pipelines.dqn import DQN, Args
from pipelines.experiment.directories import note_of

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


def progress(out: Path) -> list[dict[str, float]]:
    """Return what a run has logged."""
    with (out / "progress.csv").open() as file:
        return [{name: float(row[name] or "nan") for name in row} for row in csv.DictReader(file)]


def rows_learned(row: dict[str, float]) -> float:
    """Return the rows that a learner took, by the metrics of its work."""
    return row["learner_rows_per_second"] * row["learner_share"] * row["seconds"]


def check_same(state: Any, other: Any) -> None:
    """Fail unless two states of a learner are the same to the last digit."""
    if isinstance(state, Mapping):
        assert state.keys() == other.keys()
        for name in state:
            check_same(state[name], other[name])
    elif isinstance(state, Tensor):
        assert torch.equal(state, other)
    else:
        assert state == other


def killed_and_gone_on(words: str, out: Path, cluster: str) -> None:
    """Kill a run of 20,000 steps when it has saved some, and let the same command finish it."""
    steps = ["--total-steps", "20000", "--cluster", cluster, "--out", str(out)]
    command = [sys.executable, "-m", "pipelines.cli", *words.split(), *steps]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            saved = wait_until(lambda: (note_of(out) or {}).get("steps", 0) >= 512, 60)
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert saved
    note = note_of(out) or {}
    assert not note["finished"]
    assert cli.main([*words.split(), *steps]) == 0
    counted = [row["steps"] for row in progress(out)]
    assert counted == sorted(set(counted))  # no row twice
    assert counted[-1] >= 20_000
    after = note_of(out) or {}
    assert after["finished"]
    assert after["number"] > note["number"]
