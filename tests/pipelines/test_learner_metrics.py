"""What every learner logs of its steps of learning, and of its episodes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from distributed import Client
from small_runs import progress

from clusterenv.store import Rollout
from pipelines.dqn import DQN
from pipelines.experiment import run
from pipelines.impact import IMPACT
from pipelines.impala import IMPALA
from pipelines.networks.flat_adam import FlatAdam
from pipelines.networks.running import explained_variance
from pipelines.ppo import PPO
from pipelines.vmpo import VMPO

SIZES: dict[str, Any] = {"num_envs": 8, "horizon": 32, "shards": 2, "log_every": 256, "quiet": True}


@pytest.mark.parametrize("kind", [PPO, IMPALA, IMPACT, VMPO, DQN])
def test_a_run_logs_length_gradient_norm_and_explained_variance(
    kind: Any, tmp_path: Path, client: Client, leaves_nothing: None
) -> None:
    more = {"min_rows": 128, "batch": 16} if kind is DQN else {}
    args = {**SIZES, "total_steps": 1_024, "cluster": str(client.scheduler.address), **more}
    run(kind, kind.preset("CartPole-v1", out=tmp_path, **args))
    rows = progress(tmp_path)
    last = rows[-1]
    assert last["mean_length"] == last["mean_return"]  # of CartPole, whose reward is 1 a step
    norms = [row["grad_norm"] for row in rows if not math.isnan(row["grad_norm"])]
    assert norms
    assert min(norms) > 0
    if kind is not DQN:
        explained = [row["explained_variance"] for row in rows]
        assert any(not math.isnan(value) for value in explained)
        assert all(math.isnan(value) or value <= 1 for value in explained)


def test_explained_variance_is_that_of_the_definition() -> None:
    torch.manual_seed(0)
    targets = torch.randn(8, 4)
    values = targets + 0.5 * torch.randn(8, 4)
    expected = 1 - (targets - values).var() / targets.var()
    torch.testing.assert_close(explained_variance(values, targets), expected)
    assert explained_variance(values, torch.ones(8, 4)) == 0  # nothing to explain: finite


def test_the_norm_is_that_of_the_gradient_before_it_is_clipped() -> None:
    net = torch.nn.Linear(3, 1, bias=False)
    loss = 5 * net(torch.tensor([[3.0, 0.0, 4.0]])).sum()
    assert FlatAdam(net, 0.1).descend(loss, max_norm=0.1).item() == pytest.approx(25)


def test_ppos_explained_variance_is_of_the_values_before_the_update() -> None:
    env = gym.make("CartPole-v1")
    args = PPO.args_type(hidden=(8,), normalize_obs=False, epochs=1, minibatches=2)
    learner = PPO(args, env.observation_space, env.action_space)
    obs, ends = torch.randn(16, 2, 4), torch.zeros(16, 2, dtype=torch.bool)
    columns = {"obs": obs, "action": ends.long(), "log_prob": torch.zeros(16, 2) - 0.7}
    columns |= {"terminated": ~ends, "truncated": ends, "reward": torch.randn(16, 2)}
    rows = Rollout(columns, torch.tensor([30, 31]), {"obs": obs[0]})
    with torch.no_grad():
        values = learner.agent.value(obs.flatten(0, 1)).view(16, 2)
    found = learner.learn(rows, 0.0)["explained_variance"]
    # Every step ends an episode: the target is the reward.
    torch.testing.assert_close(found, explained_variance(values, columns["reward"]))
