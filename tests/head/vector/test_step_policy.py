"""``ClusterEnv.step(policy)``: the policy acts beside the environments."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from agents import Bad, Counter, Cycle, Earner, Recalls, cartpole_policy
from compare import assert_same
from distributed import Client
from gymnasium.vector import SyncVectorEnv
from torch import nn
from worlds import Masked, Slow, World

import clusterenv
from clusterenv import Divergence, Never, errors
from clusterenv.policies.policy import Context, Decision, Policy

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def nudge(policy: Any, by: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(by * torch.randn_like(parameter))


def log_probs(policy: Any, obs: Any, info: Any) -> Any:
    """Return what a categorical policy gives to the actions that were chosen."""
    with torch.no_grad():
        net = torch.distributions.Categorical(logits=policy.module(torch.from_numpy(obs)))
        return net.log_prob(torch.from_numpy(info["action"])).numpy()


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_the_five_values_are_those_of_the_chosen_actions(client: Client, shards: int) -> None:
    ours = clusterenv.make_vec(World, 7, shards=shards, cluster=client)
    theirs = SyncVectorEnv([World] * 7)
    with ours:
        assert_same(ours.reset(seed=2), theirs.reset(seed=2))
        for step in range(20):
            obs, reward, terminated, truncated, info = ours.step(Cycle(5, start=2))
            expected = theirs.step(2 + np.arange(7) % 5 if step == 0 else info["action"])
            assert_same((obs, reward, terminated, truncated), expected[:4])
            assert_same(info["weight"], expected[4]["weight"])
            assert_same(info["twice"], 2 * info["action"].astype(np.float32))
            # Aligned with the environments, whatever order the shards answer in.
            assert_same(info["action"], 2 + (np.arange(7) + step) % 5)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_choices_are_aligned_whichever_shard_answers_last(client: Client, slow: int) -> None:
    factories = [functools.partial(Slow, 0.02 if env // 2 == slow else 0.0) for env in range(6)]
    with clusterenv.make_vec(factories, 6, shards=3, cluster=client) as envs:
        envs.reset(seed=2)
        for step in range(3):
            *_, info = envs.step(Cycle(2))
            assert_same(info["action"], (np.arange(6) + step) % 2)
            assert_same(info["twice"], 2 * info["action"].astype(np.float32))


def test_log_probabilities_are_of_the_version_that_acted(client: Client) -> None:
    policy = cartpole_policy()
    with clusterenv.make_vec("CartPole-v1", 5, shards=2, cluster=client) as envs:
        obs, _ = envs.reset(seed=1)
        for version in range(4):
            following, *_, info = envs.step(policy)
            assert info["policy_version"].tolist() == [version] * 5
            assert np.allclose(info["log_prob"], log_probs(policy, obs, info), atol=1e-5)
            nudge(policy, 0.3)
            obs = following


def test_an_unchanged_policy_moves_no_weights(client: Client) -> None:
    policy = cartpole_policy()
    with clusterenv.make_vec("CartPole-v1", 4, shards=2, cluster=client) as envs:
        envs.reset(seed=1)
        for _ in range(10):
            envs.step(policy)
        assert envs._requests._remote is not None
        assert (envs._requests._remote.pulls, envs._requests._remote.weight_bytes) == (0, 0)
        nudge(policy, 0.1)
        envs.step(policy)
        assert envs._requests._remote.pulls == 2


def test_weights_travel_only_on_divergence(client: Client) -> None:
    torch.manual_seed(0)
    policy = cartpole_policy()
    with clusterenv.make_vec("CartPole-v1", 4, shards=2, cluster=client) as envs:
        envs.sync = Divergence(0.05)
        envs.reset(seed=1)
        envs.step(policy)
        nudge(policy, 1e-4)
        assert envs.step(policy)[4]["policy_version"].tolist() == [0] * 4
        nudge(policy, 1.0)
        assert envs.step(policy)[4]["policy_version"].tolist() == [2] * 4
    with clusterenv.make_vec("CartPole-v1", 4, shards=2, cluster=client) as envs:
        envs.sync = Never()
        envs.reset(seed=1)
        envs.step(policy)
        nudge(policy, 1.0)
        assert envs.step(policy)[4]["policy_version"].tolist() == [0] * 4


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("mode", list(gym.vector.AutoresetMode)[:2])
def test_a_recurrent_policy_has_diverged_where_it_acts_not_where_it_begins(
    client: Client, mode: Any, shards: int
) -> None:
    """At the initial state all versions of this policy are alike."""
    torch.manual_seed(0)
    policy = Recalls()
    with clusterenv.make_vec(
        "CartPole-v1", 4, shards=shards, cluster=client, autoreset_mode=mode
    ) as envs:
        envs.sync = Divergence(0.05)
        envs.reset(seed=1)
        for _ in range(3):
            assert envs.step(policy)[4]["policy_version"].tolist() == [0] * 4
        with torch.no_grad():
            policy.read.weight.add_(1e-4)
        assert envs.step(policy)[4]["policy_version"].tolist() == [0] * 4
        with torch.no_grad():
            policy.read.weight.mul_(-5)
        assert envs.step(policy)[4]["policy_version"].tolist() == [2] * 4


@pytest.mark.parametrize("mode", list(gym.vector.AutoresetMode)[:2])
def test_recurrent_state_begins_with_the_episode(client: Client, mode: Any) -> None:
    with clusterenv.make_vec(
        "CartPole-v1", 3, shards=2, cluster=client, autoreset_mode=mode
    ) as envs:
        envs.reset(seed=1)
        count = np.zeros(3)
        same = mode is gym.vector.AutoresetMode.SAME_STEP
        over = np.zeros(3, bool)
        for _ in range(40):
            _, _, terminated, truncated, info = envs.step(Counter())
            live = ~over
            assert info["value"][live].tolist() == count[live].tolist()
            ended = terminated | truncated
            count = np.where(ended if same else over, 0, count + 1)
            over = np.zeros(3, bool) if same else ended


def test_what_is_no_policy_is_refused_with_the_right_call(client: Client) -> None:
    with clusterenv.make_vec("CartPole-v1", 2, shards=1, cluster=client) as envs:
        with pytest.raises(errors.ResetNeeded):
            envs.step(cartpole_policy())
        envs.reset(seed=1)
        with pytest.raises(errors.ActionError, match=r"step\(\) got a Linear; wrap it"):
            envs.step(nn.Linear(4, 2))
        envs.step([0, 1])
        with pytest.raises(errors.PolicyError, match="chose 7 for environment 1"):
            envs.step(Bad("range", after=0))


class Forgetful(Policy):
    """Looks for what is not there."""

    def act(self, obs: torch.Tensor, context: Context) -> Decision:
        return Decision(context.state["missing"])


def test_a_policy_that_raises_is_shown_with_its_traceback(client: Client) -> None:
    with clusterenv.make_vec("CartPole-v1", 2, shards=1, cluster=client) as envs:
        envs.reset(seed=1)
        with pytest.raises(errors.PolicyError) as caught:
            envs.step(Forgetful())
    said = str(caught.value)
    assert (
        "raised KeyError on environments 0–1 at step 0 of the shard: 'missing'"
        in said.splitlines()[0]
    )
    assert 'context.state["missing"]' in said


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", "log_prob is nan for environment 1 at step 0 of the shard"),
        ("column", r"'value' on environments 0–1 at step 0 of the shard has shape \(3,\)"),
        ("tensor", r"Bad.act\(\) returned a Tensor on environments 0–1"),
    ],
)
def test_what_a_policy_returns_is_checked_as_in_a_collector(
    client: Client, fault: str, message: str
) -> None:
    with clusterenv.make_vec("CartPole-v1", 2, shards=1, cluster=client) as envs:
        envs.reset(seed=1)
        with pytest.raises(errors.PolicyError, match=message):
            envs.step(Bad(fault, after=0))


def test_a_policy_that_cannot_be_pickled_or_a_rule_that_is_none_leave_it_usable(
    client: Client,
) -> None:
    with clusterenv.make_vec("CartPole-v1", 2, shards=1, cluster=client) as envs:
        envs.reset(seed=1)
        locked = cartpole_policy()
        locked.lock = threading.Lock()  # type: ignore[assignment]
        with pytest.raises(errors.ConfigError, match="the policy cannot be sent to a worker"):
            envs.step(locked)
        envs.sync = 0.05  # type: ignore[assignment]
        with pytest.raises(errors.ConfigError, match=r"sync=0\.05 is no rule"):
            envs.step(cartpole_policy())
        envs.sync = clusterenv.Divergence(0.1)
        with pytest.raises(errors.ConfigError, match="Cycle has none: define distribution"):
            envs.step(Cycle())
        envs.sync = clusterenv.EveryVersion()
        envs.step(cartpole_policy())
        with pytest.raises(errors.ConfigError, match="got a Cycle, and a Categorical before"):
            envs.step(Cycle())
        envs.step([0, 1])


def test_tensors_in_new_memory_are_a_new_version(client: Client) -> None:
    policy = cartpole_policy()
    with clusterenv.make_vec("CartPole-v1", 2, shards=1, cluster=client) as envs:
        envs.reset(seed=1)
        envs.step(policy)
        values = nn.utils.parameters_to_vector(policy.parameters())
        nn.utils.vector_to_parameters(values + 1, policy.parameters())
        assert envs.step(policy)[4]["policy_version"].tolist() == [1, 1]


def test_a_copy_is_a_new_version_once_its_numbers_are_others(client: Client) -> None:
    policy = cartpole_policy()
    with clusterenv.make_vec("CartPole-v1", 2, shards=1, cluster=client) as envs:
        envs.reset(seed=1)
        envs.step(policy)
        policy = copy.deepcopy(policy)
        assert envs.step(policy)[4]["policy_version"].tolist() == [0, 0]
        nudge(policy, 0.1)
        assert envs.step(policy)[4]["policy_version"].tolist() == [1, 1]


@pytest.mark.parametrize("way", ["fused", "foreach", "data"])
def test_whatever_changes_the_numbers_is_noticed(client: Client, way: str) -> None:
    """Torch does not count what fused optimisers do, nor what goes through .data."""
    policy = cartpole_policy()
    with clusterenv.make_vec("CartPole-v1", 2, shards=1, cluster=client) as envs:
        obs, _ = envs.reset(seed=1)
        for version in range(3):
            following, *_, info = envs.step(policy)
            assert np.allclose(info["log_prob"], log_probs(policy, obs, info), atol=1e-5)
            assert info["policy_version"].tolist() == [version] * 2
            if way == "data":
                for parameter in policy.parameters():
                    parameter.data.add_(0.5 * torch.randn_like(parameter))
            else:
                optimizer = torch.optim.Adam(policy.parameters(), 0.5, **{way: True})
                policy.module(torch.from_numpy(following)).square().sum().backward()
                optimizer.step()
            obs = following


def test_a_policy_that_has_become_nan_is_refused_every_time(client: Client) -> None:
    policy = cartpole_policy()
    with clusterenv.make_vec("CartPole-v1", 2, shards=1, cluster=client) as envs:
        envs.reset(seed=1)
        envs.step(policy)
        with torch.no_grad():
            next(policy.parameters())[0] = torch.nan
        for _ in range(2):
            with pytest.raises(errors.ConfigError, match="holds NaN"):
                envs.step(policy)


def test_what_a_policy_draws_repeats_with_the_seed_and_differs_between_shards(
    client: Client,
) -> None:
    policy = clusterenv.policies.Categorical(AnyAction())
    policy.module.logits.requires_grad_(False)
    drawn = []
    with clusterenv.make_vec("LunarLander-v3", 8, shards=2, cluster=client) as envs:
        for seed in (2**70, 2**70, 2):
            envs.reset(seed=seed)
            drawn.append(np.stack([envs.step(policy)[4]["action"] for _ in range(20)]))
    assert_same(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()
    assert (drawn[0][:, :4] != drawn[0][:, 4:]).any()


@pytest.mark.parametrize("mode", list(gym.vector.AutoresetMode)[:2])
@pytest.mark.parametrize("other", ["step", "send"])
def test_recurrent_state_begins_with_an_episode_that_others_steps_began(
    client: Client, mode: Any, other: str
) -> None:
    with clusterenv.make_vec(
        "CartPole-v1", 4, shards=2, cluster=client, autoreset_mode=mode
    ) as envs:
        envs.reset(seed=1)
        same = mode is gym.vector.AutoresetMode.SAME_STEP
        over, count = np.zeros(4, bool), np.zeros(4)
        for k in range(60):
            if k % 3:
                _, _, terminated, truncated, info = envs.step(Counter())
                assert info["value"][~over].tolist() == count[~over].tolist()
                count += 1
            elif other == "step":
                _, _, terminated, truncated, _ = envs.step([0] * 4)
            else:
                envs.send(np.zeros(4, int), np.arange(4))
                terminated, truncated = np.zeros(4, bool), np.zeros(4, bool)
                for _ in range(2):
                    _, _, *flags, info = envs.recv()
                    terminated[info["env_id"]], truncated[info["env_id"]] = flags
            ended = terminated | truncated
            count[ended if same else over] = 0
            over = np.zeros(4, bool) if same else ended & ~over


class AnyAction(nn.Module):
    """The same logits for every observation."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(4))

    def forward(self, obs: Any) -> torch.Tensor:
        return self.logits.expand(len(obs["x"] if isinstance(obs, dict) else obs), 4)


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("way", ["info", "dict"])
@pytest.mark.parametrize("mode", list(gym.vector.AutoresetMode)[:2])
def test_masks_are_never_violated(client: Client, mode: Any, way: str, final: bool) -> None:
    """The environment raises at a forbidden action; masks come with resets and steps alike.

    Without ``final``, the last observation of an episode allows nothing, and nobody minds: the
    step after it only resets.
    """
    policy = clusterenv.policies.Categorical(AnyAction())
    with clusterenv.make_vec(
        Masked, 3, shards=2, cluster=client, autoreset_mode=mode, way=way, final=final
    ) as envs:
        envs.sync = Divergence(10.0)
        _, info = envs.reset(seed=1)
        envs.step(1 + np.arange(3))  # masks given with other steps count too
        for _ in range(80):  # until nothing is left of the probe's first observations
            nudge(policy, 0.1)
            info = envs.step(policy)[4]
            assert info["policy_version"].tolist() == [0] * 3
            # One action is allowed, so nothing can diverge.
            assert set(envs._requests._remote._divergences.values()) <= {0.0}  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["info", "dict"])
def test_a_forbidden_action_is_reported(client: Client, way: str) -> None:
    with clusterenv.make_vec(Masked, 3, shards=1, cluster=client, way=way) as envs:
        envs.reset(seed=[0, 4, 1])  # the policy chooses 0
        with pytest.raises(
            errors.PolicyError, match=r"action 0 for environment 2 at step 0 .* which its mask"
        ):
            envs.step(Bad("none"))


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_a_policy_can_find_the_reward_of_the_step_before(client: Client, mode: str) -> None:
    options = {"shards": 2, "cluster": client, "autoreset_mode": gym.vector.AutoresetMode[mode]}
    with clusterenv.make_vec(World, 4, **options) as envs:
        envs.reset(seed=2)
        reward, over, ends = np.zeros(4), np.zeros(4, bool), 0
        for _ in range(40):
            _, now, terminated, truncated, info = envs.step(Earner(5, start=2))
            if mode == "NEXT_STEP":  # what a policy says in a step that only resets is dropped
                began, live = over, ~over
                assert_same(info["earned"][live], reward[live].astype(np.float32))
                reward = np.where(began, 0.0, now)
            else:
                assert_same(info["earned"], reward.astype(np.float32))
                reward = np.where(terminated | truncated, 0.0, now)
            over = terminated | truncated
            ends += int(over.sum())
        assert ends > 2
