"""What a prompt, a log or a notebook shows of an object: what matters, on a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client

import clusterenv
from clusterenv import Divergence, Every, EveryVersion, Never, ReplayStore, RolloutStore
from clusterenv.data.summary import Summary
from clusterenv.store import Journal

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
    assert repr(batch).startswith("Batch(shard=")
    assert repr(batch).endswith("horizon=64, num_envs=2, columns=[" + ", ".join(batch.names) + "])")
    assert repr(batch.torch()).startswith("Rollout(horizon=64, num_envs=2, columns=[obs, reward")
    assert repr(rollout).startswith("RolloutStore(rows=256, batches=2, max_lag=None")
    assert repr(replay).startswith("ReplayStore(rows=256, capacity=1,000, sampler=Uniform")
    assert repr(stats).startswith("Stats(rows=256, seconds=")
    assert stats.mean_return == pytest.approx(sum(stats.returns) / len(stats.returns))
    assert f"mean_return={stats.mean_return:.3g}" in repr(stats)
    for shown in (collector, rollout, replay, stats, batch):
        assert len(repr(shown)) < LINES
        table = shown._repr_html_()
        assert table.count("<tr>") == table.count("</tr>") >= 4
        assert ("64" if shown is batch else "256") in table
    assert "<strong>Collector &#x27;lander-&lt;1&gt;&#x27;</strong>" in collector._repr_html_()
    replay.close()
    assert repr(replay) == "ReplayStore(capacity=1,000, closed=True)"


def test_a_vector_environment_is_shown_open_and_closed(client: Client) -> None:
    envs = clusterenv.make_vec("CartPole-v1", 4, shards=2, cluster=client)
    opened = repr(envs)
    envs.close()
    assert opened == "ClusterEnv('CartPole-v1', num_envs=4, shards=2, autoreset=NEXT_STEP)"
    assert repr(envs) == "ClusterEnv('CartPole-v1', num_envs=4, autoreset=NEXT_STEP, closed=True)"
    assert "closed" in envs._repr_html_()


def test_an_evaluator_and_a_dataset_are_shown_by_what_they_hold(
    client: Client, tmp_path: Path
) -> None:
    policy = clusterenv.policies.Categorical(torch.nn.Linear(4, 2))
    options: dict[str, Any] = {"episodes": 5, "num_envs": 4, "seed": 7, "cluster": client}
    with clusterenv.Evaluator("CartPole-v1", policy, **options) as evaluator:
        assert repr(evaluator) == "Evaluator(episodes=5, num_envs=4, seed=7)"
    assert repr(evaluator) == "Evaluator(episodes=5, num_envs=4, seed=7, closed=True)"
    with clusterenv.Collector(
        "CartPole-v1", policy, num_envs=4, horizon=16, shards=1, cluster=client
    ) as collector:
        journal = Journal(tmp_path / "rows")
        journal.append(collector.rollout()[0])
        journal.commit()
        journal.close()
    shown = repr(clusterenv.open_dataset(tmp_path / "rows"))
    assert shown.startswith("Dataset(rows=64, columns=[obs, reward, terminated")
    assert shown.endswith("next_obs])")


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
