"""Ape-X: the ladder, priorities made on the workers, and DQN's learner on top."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from distributed import Client
from torch import Tensor, nn

import clusterenv
from clusterenv.data.fragment import Fragment
from clusterenv.policies import Context
from clusterenv.store import Prioritized, ReplayStore
from pipelines.apex import Apex, Args, Explorers, ladder
from pipelines.experiment import run

BOX = gym.spaces.Box(-1, 1, (4,), np.float32)


class Values(nn.Module):
    """Two actions, worth the observation and ten times as much."""

    def forward(self, obs: Tensor) -> Tensor:
        return torch.cat([obs, 10 * obs], dim=-1)


def test_every_environment_has_its_epsilon() -> None:
    found = ladder(8)
    assert found == pytest.approx([0.4 ** (1 + 7 * i / 7) for i in range(8)])
    assert found[0] == pytest.approx(0.4)
    assert found[-1] == pytest.approx(0.4**8)
    assert ladder(1) == [0.4]
    for num_envs, judged in ((8, [6, 7]), (3, [2])):
        learner = Apex(Args(num_envs=num_envs), BOX, gym.spaces.Discrete(2))
        assert list(learner.judged()) == judged
        assert learner.policy.epsilon.tolist() == pytest.approx(ladder(num_envs))
        assert learner.scalars(5) == {}  # nothing scales the ladder


def explorers(n_step: int = 1, gamma: float = 0.5) -> Explorers:
    return Explorers(Values(), [0.5, 0.5], n_step, gamma)


def test_explorers_remember_the_value_of_what_they_took() -> None:
    torch.manual_seed(1)
    obs = torch.rand(64, 1)
    action, extras, _ = explorers().act(obs, Context(torch.arange(64)))
    assert set(action.tolist()) == {0, 1}
    torch.testing.assert_close(extras["q"], 10 * obs[:, 0])
    torch.testing.assert_close(extras["q_taken"], torch.where(action == 0, 1, 10) * obs[:, 0])


def fragment() -> Fragment:
    """Two environments, three time rows; the first one's episode is truncated after two.

    In the second, the last row is terminal. Observations of environment 0 are 1, 2, then anew 5,
    of environment 1 they are 3, 4, 6; the best action is worth ten times that.
    """
    obs = np.array([1, 3, 2, 4, 5, 6], np.float32)[:, None]
    columns = {
        "obs": obs,
        "reward": np.array([1, 2, 3, 4, 5, 6], np.float32),
        "terminated": np.array([False, False, False, False, False, True]),
        "truncated": np.array([False, False, True, False, False, False]),
        "q": 10 * obs[:, 0],
        "q_taken": np.array([10, 3, 20, 40, 5, 60], np.float32),
    }
    tail_rows = np.array([2, 5, 4])
    tail = {"obs": np.array([[7], [8], [9]], np.float32)}
    return Fragment(columns, 2, tail_rows, tail, {})


def test_priorities_of_one_step() -> None:
    found = explorers(n_step=1).annotate(fragment())["priority"]
    targets = [
        1 + 0.5 * 20,
        2 + 0.5 * 40,
        3 + 0.5 * 70,  # truncated: the true next observation is 7
        4 + 0.5 * 60,
        5 + 0.5 * 90,  # the fragment ends, the episode does not
        6,  # terminated
    ]
    taken = fragment().columns["q_taken"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.abs(targets - taken))


def test_priorities_of_two_steps_end_with_the_episode_and_the_fragment() -> None:
    found = explorers(n_step=2).annotate(fragment())["priority"]
    targets = [
        1 + 0.5 * 3 + 0.25 * 70,
        2 + 0.5 * 4 + 0.25 * 60,
        3 + 0.5 * 70,
        4 + 0.5 * 6,
        5 + 0.5 * 90,
        6,
    ]
    np.testing.assert_allclose(found, np.abs(targets - fragment().columns["q_taken"]))


@pytest.fixture
def cluster(client: Client, leaves_nothing: None) -> str:
    return str(client.scheduler.address)


def test_priorities_from_the_workers_are_those_the_head_would_compute(cluster: str) -> None:
    torch.manual_seed(1)
    gamma, q = 0.9, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    policy = Explorers(q, ladder(4), 1, gamma)
    options = {"num_envs": 4, "horizon": 64, "shards": 2, "seed": 1, "cluster": cluster}
    with clusterenv.Collector("CartPole-v1", policy, **options) as collector:
        batches = collector.rollout()
    for batch in batches:
        store = ReplayStore(256, sampler=Prioritized(alpha=1.0, beta=0.0, epsilon=1e-9))
        store.add(batch)
        sample = store.sample(512, columns=["priority"], tensors=True)
        with torch.no_grad():
            best = q(sample["next_obs"]).max(-1).values
            taken = q(sample["obs"]).gather(-1, sample["action"].unsqueeze(-1)).squeeze(-1)
        error = sample["reward"] + gamma * ~sample["terminated"] * best - taken
        torch.testing.assert_close(sample["priority"], error.abs(), rtol=1e-4, atol=1e-5)
        drawn = np.bincount(sample["indices"], minlength=batch.num_rows) / 512
        share = batch.flat("priority") / batch.flat("priority").sum()
        np.testing.assert_allclose(drawn, share, atol=2 / 512)  # stratified: never far off


def test_a_run_reports_all_and_the_least_exploring(tmp_path: Path, cluster: str) -> None:
    args = Apex.preset(
        "CartPole-v1",
        total_steps=4_000,
        num_envs=8,
        horizon=16,
        shards=3,
        min_rows=256,
        batch=32,
        hidden=(16,),
        rows_per_update=16,
        log_every=500,
        out=tmp_path,
        quiet=True,
        cluster=cluster,
    )
    result = run(Apex, args)
    assert result.steps >= 4_000
    with (tmp_path / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["mean_return"]) == pytest.approx(result.mean_return, rel=1e-4)
    judged = float(rows[-1]["judged_return"])
    assert math.isnan(judged) or judged == pytest.approx(result.judged_return, rel=1e-4)
    names = clusterenv.open_dataset(result.dataset).schema.names
    assert {"exploratory", "priority", "q", "q_taken"} <= set(names)
