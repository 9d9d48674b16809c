"""PPO from end to end: trains, writes its run, resumes it."""

from __future__ import annotations

import copy
import csv
import math
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from distributed import Client

import clusterenv
from clusterenv import Divergence
from clusterenv.errors import ConfigError, Diverged
from clusterenv.policies import Context
from clusterenv.store import Rollout
from pipelines.experiment import run
from pipelines.networks.actor_critic import ActorCritic
from pipelines.networks.flat_adam import FlatAdam
from pipelines.networks.running import RewardScaler, RunningStats
from pipelines.ppo import PPO, Args

BOX = gym.spaces.Box(-1, 1, (3,), np.float32)


def short(out: Path, steps: int, **changes: object) -> Args:
    """A few updates of 8 × 32 rows."""
    settings = {"out": out, "quiet": True, "anneal": False, "log_every": 1, **changes}
    return PPO.preset(
        "CartPole-v1",
        total_steps=steps,
        **{"num_envs": 8, "horizon": 32, "shards": 2, "epochs": 2, **settings},
    )


@pytest.fixture
def cluster(client: Client, leaves_nothing: None) -> str:
    """The shared workers' scheduler: no cluster is started for each run."""
    return str(client.scheduler.address)


def progress(out: Path) -> list[dict[str, str]]:
    with (out / "progress.csv").open() as file:
        return list(csv.DictReader(file))


def checkpoint(out: Path) -> dict[str, Any]:
    (path,) = out.glob("learner-*.pt")
    return dict(torch.load(path, weights_only=True))


def test_a_run_writes_its_progress_and_can_be_resumed(tmp_path: Path, cluster: str) -> None:
    out = tmp_path / "run"
    every: dict[str, Any] = {"cluster": cluster, "sync": "every-version"}  # each version is pulled
    first = run(PPO, short(out, 3 * 256, **every))
    assert (first.steps, first.out, first.reached_at) == (768, out, None)
    rows = progress(out)
    assert {"steps", "kl", "entropy", "value_loss", "lag_mean"} <= set(rows[0])
    assert "store_rows" not in rows[0]
    assert [int(row["steps"]) for row in rows] == [256, 512, 768]
    assert all(math.isfinite(float(row["value_loss"])) for row in rows)
    assert int(rows[-1]["pulls"]) == first.pulls > 0
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list(out.glob("events.out.tfevents*"))
    assert not list(out.glob("*.tmp"))

    saved = checkpoint(out)
    assert saved["metrics"]["steps"] == saved["steps"] == 768
    # Rows the crash of a run left behind its last checkpoint are not counted twice.
    with (out / "progress.csv").open("a") as file:
        file.write(",".join(["1024"] + ["0"] * (len(rows[0]) - 1)) + "\n1280,")

    second = run(PPO, short(out, 5 * 256, **every))
    assert second.steps == 1280
    assert second.version > first.version
    assert second.pulls > first.pulls
    assert second.seconds > first.seconds
    rows = progress(out)
    assert [int(row["steps"]) for row in rows] == [256, 512, 768, 1024, 1280]
    assert all(math.isfinite(float(row["mean_return"])) for row in rows[3:])
    states = [each["learner"] for each in (saved, checkpoint(out))]
    assert states[1]["agent"]["stats.count"] == 1280
    updates = [state["optimizer"]["state"][0]["step"].item() for state in states]
    assert updates == [3 * 2 * 4, 5 * 2 * 4]


@pytest.mark.parametrize("what", ["weights", "losses"])
def test_a_learner_that_becomes_nan_is_not_saved(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    learn, rounds = PPO.learn, []

    def explode(self: PPO, rows: Rollout, progress: float) -> Any:
        rounds.append(learn(self, rows, progress))
        if len(rounds) < 3:
            return rounds[-1]
        if what == "losses":
            return {**rounds[-1], "value_loss": math.nan}
        with torch.no_grad():
            next(self.agent.parameters()).fill_(math.nan)
        return rounds[-1]

    args = short(tmp_path, 5 * 256, cluster=cluster, checkpoint_every=1)
    with monkeypatch.context() as patched:
        patched.setattr(PPO, "learn", explode)
        with pytest.raises(Diverged, match="the learner has diverged"):
            run(PPO, args)
    assert checkpoint(tmp_path)["steps"] == 512
    assert run(PPO, args).steps == 5 * 256


def test_a_run_is_resumed_with_the_arguments_that_began_it(tmp_path: Path, cluster: str) -> None:
    out = tmp_path / "run"
    run(PPO, short(out, 256, cluster=cluster))
    before = {path: path.read_bytes() for path in out.iterdir()}
    changes: dict[str, object] = {"gamma": 0.5, "lr": 0.5, "seed": 7, "sync": "never"}
    changes |= {"num_envs": 4, "hidden": (32,), "anneal": True, "scale_rewards": True}
    said = {"hidden": "--hidden 64 64 instead of --hidden 32", "gamma": "--gamma 0.98 instead"}
    said |= {"anneal": "--no-anneal instead of --anneal"}
    said |= {"scale_rewards": "no --scale-rewards instead of --scale-rewards"}
    for name, value in changes.items():
        expected = re.escape(said.get(name, f"--{name.replace('_', '-')}"))
        with pytest.raises(ConfigError, match=rf"was begun with {expected}.*--out {out}-2$"):
            run(PPO, short(out, 512, cluster=cluster, **{name: value}))
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    free = {"shards": 1, "threads": 2, "stop_at": 1e6, "checkpoint_every": 1, "restarts": 1}
    assert run(PPO, short(out, 512, **{"cluster": cluster, **free})).steps == 512
    with pytest.raises(ConfigError, match=rf"--fresh begins another run.*--out {out}-2$"):
        run(PPO, short(out, 512, cluster=cluster, fresh=True))


def test_statistics_of_observations_travel_with_the_weights(client: Client) -> None:
    env = gym.make("CartPole-v1")
    torch.manual_seed(0)
    agent = ActorCritic(env.observation_space, env.action_space, (16,))
    options = {"num_envs": 4, "horizon": 16, "shards": 2, "seed": 1, "cluster": client}
    with clusterenv.Collector("CartPole-v1", agent, sync=Divergence(1e-6), **options) as collector:
        batches = collector.rollout()
        with torch.no_grad():
            agent.actor[-1].weight.mul_(100)  # so that observations matter
        collector.publish(agent)
        for batch in collector.rollout():
            agent.stats.update(torch.from_numpy(batch.flat("obs")))
        version = collector.publish(agent)  # nothing but the statistics is new
        batches = collector.rollout()
        assert {batch.policy_version for batch in batches} == {version}
    for batch in batches:
        obs, action = (torch.from_numpy(batch.flat(name)) for name in ("obs", "action"))
        with torch.no_grad():
            expected = agent.distribution(obs).log_prob(action)
        torch.testing.assert_close(torch.from_numpy(batch.flat("log_prob")), expected)


def test_minibatches_that_do_not_come_out_even_have_two_rows_at_least() -> None:
    """The advantages of a single row have no deviation, and would end the network as NaN."""
    torch.manual_seed(0)
    env = gym.make("CartPole-v1")
    agent = ActorCritic(env.observation_space, env.action_space, (16,), normalize_obs=False)
    rollout = stale_rollout(agent, 0.0)  # 64 rows: 21 chunks of 3, and one of 1
    learner_of(agent, epochs=1, minibatches=30).learn(rollout, 0.0)
    assert all(parameter.isfinite().all() for parameter in agent.parameters())


def test_a_goal_ends_the_run(tmp_path: Path, cluster: str) -> None:
    result = run(PPO, short(tmp_path, 20_000, stop_at=10.0, cluster=cluster))
    assert result.reached_at == result.steps < 20_000
    assert result.mean_return >= 10


def test_workers_that_never_pull_keep_the_first_version(tmp_path: Path, cluster: str) -> None:
    result = run(PPO, short(tmp_path, 4 * 256, sync="never", cluster=cluster))
    assert result.version >= 4
    assert float(progress(tmp_path)[-1]["lag_mean"]) > 0


class Plain(torch.optim.SGD):
    """Plain gradient descent, with FlatAdam's method."""

    def descend(self, loss: torch.Tensor, max_norm: float) -> torch.Tensor:
        self.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], max_norm)
        self.step()
        return norm


def learner_of(agent: ActorCritic, **options: Any) -> PPO:
    """Return a learner that improves an agent by plain gradient steps."""
    env = gym.make("CartPole-v1")
    args = Args(hidden=(16,), normalize_obs=False, lr=0.1, anneal=False, **options)
    learner = PPO(args, env.observation_space, env.action_space)
    learner.agent = learner.policy = agent
    learner.optimizer = Plain(agent.parameters(), 0.1)
    return learner


def stale_rollout(agent: ActorCritic, behind: float) -> Rollout:
    """Return rows whose actions have become likelier by ``behind`` since an older version acted."""
    torch.manual_seed(0)
    obs, action = torch.randn(32, 2, 4), torch.zeros(32, 2, dtype=torch.long)
    with torch.no_grad():
        now = agent.distribution(obs.flatten(0, 1)).log_prob(action.flatten())
    ends = torch.zeros(32, 2, dtype=torch.bool)
    columns = {"obs": obs, "action": action, "log_prob": (now - behind).view(32, 2)}
    columns |= {"terminated": ends, "truncated": ends, "reward": torch.randn(32, 2)}
    return Rollout(columns, torch.tensor([62, 63]), {"obs": torch.randn(2, 4)})


@pytest.mark.parametrize("behind", [0.0, 3.0])
def test_rows_of_an_older_version_do_not_hold_the_learner_back(behind: float) -> None:
    """Clipped around the version that acted, rows twenty times likelier would teach nothing."""
    torch.manual_seed(0)
    env = gym.make("CartPole-v1")
    agent = ActorCritic(env.observation_space, env.action_space, (16,), normalize_obs=False)
    rollout = stale_rollout(agent, behind)
    before = [parameter.clone() for parameter in agent.actor.parameters()]
    losses = learner_of(agent, epochs=1, minibatches=1, entropy=0.0).learn(rollout, 0.0)
    assert losses["clip_fraction"] == 0
    moved = [(a - b).abs().max() for a, b in zip(agent.actor.parameters(), before, strict=True)]
    assert max(moved) > 1e-4


def test_the_weight_of_older_rows_is_bounded() -> None:
    torch.manual_seed(0)
    env = gym.make("CartPole-v1")
    found = []
    for behind in (0.0, math.log(2), 3.0):
        torch.manual_seed(1)
        agent = ActorCritic(env.observation_space, env.action_space, (16,), normalize_obs=False)
        rollout = stale_rollout(agent, behind)
        before = agent.actor[-1].bias.clone()
        learner_of(agent, epochs=1, minibatches=1, grad_norm=1e9, entropy=0.0).learn(rollout, 0.0)
        found.append(agent.actor[-1].bias.detach() - before.detach())
    torch.testing.assert_close(found[1], 2 * found[0])
    torch.testing.assert_close(found[2], found[1])


def test_continuous_actions_are_clipped_but_learnt_from_as_sampled() -> None:
    agent = ActorCritic(BOX, gym.spaces.Box(-0.1, 0.1, (2,), np.float32))
    obs = torch.randn(64, 3)
    action, extras, _ = agent.act(obs, Context(torch.arange(64)))
    assert action.abs().max() <= 0.1
    assert extras["raw_action"].abs().max() > 0.1
    expected = agent.distribution(obs).log_prob(extras["raw_action"])
    torch.testing.assert_close(extras["log_prob"], expected)


def test_continuous_training_scales_rewards(tmp_path: Path, cluster: str) -> None:
    args = {"total_steps": 2 * 128, "num_envs": 4, "horizon": 32, "shards": 1, "epochs": 1}
    run(
        PPO,
        PPO.preset("Pendulum-v1", **args, minibatches=2, cluster=cluster, out=tmp_path, quiet=True),
    )
    assert checkpoint(tmp_path)["learner"]["scaler"]["stats.count"] == 256


@pytest.mark.parametrize(
    ("observations", "actions"),
    [
        (gym.spaces.Discrete(3), gym.spaces.Discrete(2)),
        (BOX, gym.spaces.MultiDiscrete([2, 2])),
        (BOX, gym.spaces.Discrete(2, start=1)),
        (BOX, gym.spaces.Box(0, 9, (2,), np.int64)),
    ],
)
def test_spaces_the_agent_cannot_take_are_refused(
    observations: gym.Space, actions: gym.Space
) -> None:
    with pytest.raises(ConfigError, match="an actor"):
        ActorCritic(observations, actions)


def test_running_stats_are_those_of_everything_seen() -> None:
    values = 5 + 3 * torch.randn(1000, 4, generator=torch.Generator().manual_seed(1))
    stats = RunningStats((4,))
    for part in values.split([1, 299, 700]):
        stats.update(part)
    torch.testing.assert_close(stats.mean, values.mean(0))
    torch.testing.assert_close(stats.var, values.var(0, correction=0))


def test_rewards_are_scaled_by_returns_that_begin_anew_with_each_episode() -> None:
    scaler = RewardScaler(num_envs=2, gamma=0.5)
    env = torch.arange(2).expand(2, 2)
    rewards = torch.tensor([[4.0, 1.0], [2.0, 1.0]])
    step = torch.tensor([[0, 7], [1, 0]])
    scaled = scaler(rewards, env, step)
    returns = torch.tensor([4.0, 4.0, 1.0, 1.0])  # env 0: 4, 2 + 4/2; env 1: 1 + 0, then anew 1
    torch.testing.assert_close(scaled, rewards / returns.std(correction=0))
    assert scaler.returns.tolist() == [4.0, 1.0]


def test_a_return_does_not_go_on_over_steps_that_are_missing() -> None:
    """Engines that spend steps on resetting leave some out between two rollouts."""
    scaler = RewardScaler(num_envs=3, gamma=0.5)
    env, ones = torch.arange(3).expand(2, 3), torch.ones(2, 3)
    scaler(ones, env, torch.tensor([[0, 0, 0], [1, 1, 1]]))
    assert scaler.returns.tolist() == [1.5, 1.5, 1.5]
    scaler(ones, env, torch.tensor([[2, 5, 0], [3, 6, 1]]))  # goes on, steps missing, new episode
    assert scaler.returns.tolist() == [1.875, 1.5, 1.5]


def test_a_flat_optimizer_makes_the_same_steps_and_goes_on_from_a_state() -> None:
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)) for _ in range(3)]
    for other in nets[1:]:
        other.load_state_dict(nets[0].state_dict())
    plain = torch.optim.Adam(nets[0].parameters(), 0.01, eps=1e-5)
    flat, resumed = FlatAdam(nets[1], 0.01), FlatAdam(nets[2], 0.01)
    obs = torch.randn(5, 16, 4)
    for index, rows in enumerate(obs):
        plain.zero_grad()
        nets[0](rows).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(nets[0].parameters(), 0.1)
        plain.step()
        if index == 3:
            nets[2].load_state_dict(nets[1].state_dict())
            resumed.load_state_dict(copy.deepcopy(flat.state_dict()))
        for net, optimizer in ((nets[1], flat), (nets[2], resumed))[: 2 if index > 2 else 1]:
            optimizer.descend(net(rows).square().mean(), 0.1)
    for net in nets[1:]:
        for ours, theirs in zip(net.parameters(), nets[0].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("actions", [gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,))])
def test_the_judgement_of_rows_is_that_of_the_distribution(actions: gym.Space) -> None:
    agent = ActorCritic(BOX, actions)
    with torch.no_grad():
        agent.actor[-1].weight.mul_(100)
        if agent.head.log_std is not None:
            agent.head.log_std.copy_(torch.tensor([-1.0, 0.5]))
    obs = torch.randn(16, 3)
    distribution = agent.distribution(obs)
    action = distribution.sample()
    found = agent.judge(agent.normalize(obs), action)
    expected = distribution.log_prob(action), distribution.entropy(), agent.value(obs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
