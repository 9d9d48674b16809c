"""Learners whose policy is evaluated at the head: the same rows, columns and stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from small_runs import check_rows, progress

from clusterenv.errors import ConfigError
from pipelines import learners
from pipelines.experiment import run

SIZES: dict[str, Any] = {"num_envs": 4, "horizon": 16, "shards": 2, "log_every": 1, "quiet": True}
STORE = {"min_rows": 64, "batch": 16, "capacity": 4_000}


@pytest.fixture
def cluster(client: Client, leaves_nothing: None) -> str:
    return str(client.scheduler.address)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ppo", {"epochs": 1}),
        ("impala", {"recurrent": 8, "hidden": (8,)}),
        ("vmpo", {"epochs": 1}),
        ("apex", STORE),
        ("r2d2", {**STORE, "rows_per_update": 16, "hidden": (8,), "units": 8}),
    ],
)
def test_learners_work_unchanged(
    tmp_path: Path, cluster: str, name: str, changes: dict[str, Any]
) -> None:
    kind, out = learners.load(name), tmp_path / "run"
    options = {**SIZES, **changes, "inference": "head", "cluster": cluster, "out": out}
    run(kind, kind.preset("CartPole-v1", total_steps=512, **options))
    result = run(kind, kind.preset("CartPole-v1", total_steps=1_024, **options))
    assert result.steps >= 1_024
    assert (result.pulls, result.weight_bytes) == (0, 0)
    last = progress(out)[-1]
    assert last["updates"] > 0
    assert last["version"] > 0
    if name == "apex":
        check_rows(result.dataset)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cpu"}, "--device cpu is where the head .*: --inference head --device cpu"),
        ({"inference": "head", "overlap": True}, "--inference head acts .*: --no-overlap"),
        ({"inference": "gpu"}, "--inference"),
    ],
)
def test_options_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        learners.load("ppo").preset("CartPole-v1", **changes)
