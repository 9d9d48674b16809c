"""What a prompt, a log or a notebook shows of an object: what matters, on a line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import Client

import clusterenv
from clusterenv import Divergence, Every, EveryVersion, Never, ReplayStore, RolloutStore
from clusterenv.data.summary import Summary

LINES = 2 * 100  # characters of two lines


@pytest.mark.parametrize(
    ("rule", "said", "html"),
    [
        (EveryVersion(), "EveryVersion()", "pull every version"),
        (Every(4), "Every(4)", "4 versions behind"),
        (Divergence(0.05), "Divergence(0.05)", "above a divergence of 0.05"),
        (Divergence(0.05, max_lag=9), "Divergence(0.05, max_lag=9)", "more than 9 versions"),
        (Never(), "Never()", "never pull"),
    ],
)
def test_a_rule_shows_the_call_that_makes_it(rule: Any, said: str, html: str) -> None:
    assert repr(rule) == said
    assert eval(said) == rule
    assert html in rule._repr_html_()


def test_a_collector_its_batches_and_its_statistics_fit_on_a_line(client: Client) -> None:
    policy = clusterenv.policies.Categorical(torch.nn.Linear(4, 2))
    options: dict[str, Any] = {"num_envs": 4, "horizon": 64, "shards": 2, "cluster": client}
    rollout, replay = RolloutStore(), ReplayStore(1_000)
    with clusterenv.Collector("CartPole-v1", policy, name="lander-<1>", **options) as collector:
        for batch in collector.rollout():
            rollout.add(batch, 0)
            replay.add(batch)
        stats = collector.stats()
        assert repr(collector) == (
            "Collector('lander-<1>', num_envs=4, shards=2, sync=EveryVersion(), version=0, "
            "rows=256)"
        )
    assert repr(collector).endswith("version=0, rows=256, closed=True)")
    assert repr(rollout).startswith("RolloutStore(rows=256, batches=2, max_lag=None")
    assert repr(replay).startswith("ReplayStore(rows=256, capacity=1,000, sampler=Uniform")
    assert repr(stats).startswith("Stats(rows=256, seconds=")
    assert "mean_return=" in repr(stats)
    for shown in (collector, rollout, replay, stats):
        assert len(repr(shown)) < LINES
        table = shown._repr_html_()
        assert table.count("<tr>") == table.count("</tr>") >= 4
        assert "256" in table
    assert "&lt;1&gt;" in collector._repr_html_()
    replay.close()
    assert repr(replay) == "ReplayStore(capacity=1,000, closed=True)"


def test_a_vector_environment_is_shown_open_and_closed(client: Client) -> None:
    envs = clusterenv.make_vec("CartPole-v1", 4, shards=2, cluster=client)
    opened = repr(envs)
    envs.close()
    assert opened == "ClusterEnv('CartPole-v1', num_envs=4, shards=2, autoreset=NEXT_STEP)"
    assert repr(envs) == "ClusterEnv('CartPole-v1', num_envs=4, autoreset=NEXT_STEP, closed=True)"
    assert "closed" in envs._repr_html_()


def test_what_was_not_wholly_made_is_shown_by_its_class() -> None:
    for kind in (clusterenv.Collector, clusterenv.ClusterEnv, ReplayStore):
        half: Summary = kind.__new__(kind)
        assert repr(half) == f"{kind.__name__}()"


def test_dir_shows_the_public_names_only() -> None:
    names = dir(clusterenv)
    assert set(clusterenv.__all__) <= set(names)
    assert not [name for name in names if name.startswith("_") and name != "__version__"]
    assert not {"annotations", "importlib", "Any", "TYPE_CHECKING", "config"} & set(names)
    assert all(getattr(clusterenv, name) is not None for name in names if name != "SB3VecEnv")
