"""V-MPO: its losses, with known values, and its runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from distributed import Client
from small_runs import check_same, killed_and_gone_on, progress, rows_learned
from torch.distributions import Categorical, Normal, kl_divergence

from clusterenv.errors import ConfigError
from clusterenv.store import Rollout
from pipelines.experiment import run
from pipelines.networks.popart import PopArt
from pipelines.vmpo import VMPO, Duals, policy_loss, temperature_loss, top_half

BOX = gym.spaces.Box(-1, 1, (2,), np.float32)


@pytest.fixture
def cluster(client: Client, leaves_nothing: None) -> str:
    """The shared workers' scheduler: no cluster is started for each run."""
    return str(client.scheduler.address)


def short(out: Path | None, steps: int, **changes: Any) -> Any:
    sizes = {"num_envs": 8, "horizon": 16, "shards": 2, "epochs": 1, "log_every": 1, "quiet": True}
    return VMPO.preset("CartPole-v1", total_steps=steps, out=out, **{**sizes, **changes})


def learner_of(actions: gym.Space, **changes: Any) -> VMPO:
    torch.manual_seed(0)
    return VMPO(VMPO.args_type(normalize_obs=False, num_envs=4, **changes), BOX, actions)


# Known values


@pytest.mark.parametrize(
    ("advantages", "kept"),
    [
        ([1.5, 4.0, 123.0, -3.0], [False, True, True, False]),
        ([1.0, 2.0, 3.0], [False, False, True]),
        ([5.0], [True]),
        ([2.0, 2.0, 2.0, 0.0], [True, True, True, False]),  # all as large as the k-th
    ],
)
def test_the_better_half_is_kept(advantages: list[float], kept: list[bool]) -> None:
    assert top_half(torch.tensor(advantages)).tolist() == kept


def test_weights_are_a_softmax_without_a_gradient() -> None:
    advantages = torch.tensor([1.0, 3.0], requires_grad=True)
    log_probs = torch.tensor([-0.5, -2.0], requires_grad=True)
    policy_loss(log_probs, advantages, torch.tensor(2.0)).backward()
    expected = -torch.tensor([0.5, 1.5]).softmax(0)
    torch.testing.assert_close(log_probs.grad, expected)
    assert advantages.grad is None


def test_with_one_sample_the_temperature_falls_by_epsilon() -> None:
    eta = torch.tensor(0.1, requires_grad=True)
    temperature_loss(torch.tensor([3.0]), eta, 0.02).backward()
    assert eta.grad.item() == pytest.approx(0.02, abs=1e-5)


def test_a_penalty_learns_by_how_far_the_policy_steps_and_presses_by_its_size() -> None:
    duals = Duals(1.0, {"alpha": torch.tensor([0.1, 500.0])})
    torch.testing.assert_close(duals["alpha"], torch.tensor([0.1, 500.0]))
    assert duals["eta"].item() == pytest.approx(1.0)
    kl = torch.tensor([0.3, 0.01], requires_grad=True)
    alpha = duals["alpha"]
    loss = duals.penalty("alpha", kl, 0.05)
    (slope,) = torch.autograd.grad(loss, duals.raw["alpha"], retain_graph=True)
    through = torch.autograd.grad(alpha.sum(), duals.raw["alpha"])[0]
    torch.testing.assert_close(slope, through * torch.tensor([0.05 - 0.3, 0.05 - 0.01]))
    loss.backward()
    torch.testing.assert_close(kl.grad, alpha.detach())


def test_divergences_are_those_of_the_distributions() -> None:
    discrete = learner_of(gym.spaces.Discrete(3))
    old, out = torch.randn(2, 8, 3)
    expected = kl_divergence(Categorical(logits=old), Categorical(logits=out)).mean()
    torch.testing.assert_close(discrete.divergences(old, out)["alpha"], expected)

    continuous = learner_of(gym.spaces.Box(-1, 1, (2,), np.float32))
    old, out = torch.randn(2, 8, 2)
    with torch.no_grad():
        continuous.target.head.log_std.copy_(torch.tensor([0.3, -0.2]))
        continuous.agent.head.log_std.copy_(torch.tensor([-0.5, 0.1]))
    before, after = (part.head.log_std.exp() for part in (continuous.target, continuous.agent))
    found = continuous.divergences(old, out)
    # The means, with the target's deviation; the deviations, with the target's mean.
    means = kl_divergence(Normal(old, before), Normal(out, before)).mean(0)
    spreads = kl_divergence(Normal(old, before), Normal(old, after)).mean(0)
    torch.testing.assert_close(found["alpha"], means)
    torch.testing.assert_close(found["alpha_std"], spreads)


def test_a_convex_toy_is_solved() -> None:
    """The advantage is -|s + a|^2: the mean action comes to -s."""
    learner = learner_of(
        gym.spaces.Box(-5, 5, (2,), np.float32), lr=1e-3, grad_norm=1e9, value_coef=0.0
    )
    torch.manual_seed(1)
    for update in range(3_000):
        obs = torch.rand(64, 2) * 2 - 1
        with torch.no_grad():
            old, _ = learner.target(obs)
            action = learner.target.head.distribution(old).sample()
        advantage = -(obs + action).square().sum(-1)
        learner.update(obs, action, old, advantage, torch.zeros(64))
        if update % 50 == 49:
            learner.target.load_state_dict(learner.agent.state_dict())
    obs = torch.tensor([[0.5, -0.5], [-0.8, 0.1]])
    with torch.no_grad():
        torch.testing.assert_close(learner.agent(obs)[0], -obs, atol=0.2, rtol=0)


def test_the_target_acts_and_follows_when_it_is_published() -> None:
    learner = learner_of(gym.spaces.Discrete(2), publish_every=2, epochs=1, minibatches=1)
    assert learner.policy is learner.target
    ends = torch.zeros(8, 4, dtype=torch.bool)
    columns = {"obs": torch.randn(8, 4, 2), "action": ends.long(), "reward": torch.randn(8, 4)}
    columns |= {"terminated": ends, "truncated": ends, "env": torch.arange(4).expand(8, 4)}
    columns |= {"step": torch.arange(8).unsqueeze(1).expand(8, 4), "log_prob": ends.float()}
    rows = Rollout(columns, torch.arange(28, 32), {"obs": torch.randn(4, 2)})
    before = copy.deepcopy(learner.target.state_dict())
    learner.learn(rows, 0.0)
    assert all(torch.equal(before[k], v) for k, v in learner.target.state_dict().items())
    learner.learn(rows, 0.0)
    ours, theirs = learner.agent.state_dict(), learner.target.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(before["actor.0.weight"], theirs["actor.0.weight"])


def test_popart_rescales_the_last_layer_and_keeps_what_it_says() -> None:
    torch.manual_seed(0)
    popart = PopArt(torch.nn.Linear(3, 1), step=0.5)
    obs = torch.randn(8, 3)
    before = popart.value(popart.layer(obs))
    for _ in range(20):
        popart.update(torch.tensor([90.0, 110.0]))
        torch.testing.assert_close(popart.value(popart.layer(obs)), before, atol=1e-2, rtol=1e-3)
    assert popart.mean.item() == pytest.approx(100.0, rel=1e-3)
    assert popart.deviation.item() == pytest.approx(10.0, rel=1e-1)
    torch.testing.assert_close(popart.value(popart.normalize(obs)), obs, atol=1e-3, rtol=1e-3)


def test_a_learner_goes_on_from_its_state_to_the_last_digit() -> None:
    changes = {"popart": 0.1, "publish_every": 2, "epochs": 1}
    first, second = (learner_of(gym.spaces.Discrete(2), **changes) for _ in range(2))
    ends = torch.zeros(8, 4, dtype=torch.bool)
    columns = {"obs": torch.randn(8, 4, 2), "action": ends.long(), "reward": torch.randn(8, 4)}
    columns |= {"terminated": ends, "truncated": ends, "env": torch.arange(4).expand(8, 4)}
    columns |= {"step": torch.arange(8).unsqueeze(1).expand(8, 4), "log_prob": ends.float()}
    rows = Rollout(columns, torch.arange(28, 32), {"obs": torch.randn(4, 2)})
    for _ in range(3):
        first.learn(rows, 0.1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for learner in (first, second):
        torch.manual_seed(3)
        learner.learn(rows, 0.2)
    check_same(first.state_dict(), second.state_dict())


# Runs


def test_a_run_goes_on(tmp_path: Path, cluster: str) -> None:
    run(VMPO, short(tmp_path, 512, cluster=cluster, popart=0.1))
    assert rows_learned(progress(tmp_path)[-1]) == pytest.approx(512, rel=0.02)
    assert run(VMPO, short(tmp_path, 1_024, cluster=cluster, popart=0.1)).steps == 1_024
    assert progress(tmp_path)[-1]["eta"] > 0


def test_continuous_actions_have_a_penalty_per_dimension(tmp_path: Path, cluster: str) -> None:
    sizes = {"num_envs": 4, "horizon": 16, "shards": 1, "epochs": 1, "quiet": True}
    args = VMPO.preset("Pendulum-v1", total_steps=128, out=tmp_path, cluster=cluster, **sizes)
    assert run(VMPO, args).steps == 128


def test_a_killed_run_goes_on_with_the_same_command(tmp_path: Path, cluster: str) -> None:
    sizes = "--num-envs 8 --horizon 16 --shards 2 --epochs 1 --log-every 1 --checkpoint-every 256"
    killed_and_gone_on(f"train vmpo --env CartPole-v1 {sizes}", tmp_path / "run", cluster)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eta": 0}, "--eta must be above 0, got 0"),
        ({"eps_alpha": -1}, "--eps-alpha must be above 0, got -1"),
        ({"dual_lr": 0}, "--dual-lr must be above 0, got 0"),
        ({"minibatches": 4_000}, "--minibatches 4000 leaves fewer than 2 rows in each"),
    ],
)
def test_settings_out_of_range_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VMPO.preset("CartPole-v1", **changes)
