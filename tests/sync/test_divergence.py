"""The divergence is the mean over identical observations, recomputed by hand."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from agents import Recalls, cartpole_policy, changed
from torch import nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from clusterenv.data.spaces import Layout
from clusterenv.errors import ConfigError
from clusterenv.policies import Categorical as CategoricalPolicy
from clusterenv.policies import Gaussian
from clusterenv.policies.policy import Context
from clusterenv.sync import Divergence, Never
from clusterenv.sync.divergence import Probe, mean_divergence
from clusterenv.sync.publisher import Publisher


def test_categorical_by_hand() -> None:
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    q = torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    by_hand = (0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)) / 2
    found = mean_divergence(Categorical(probs=p), Categorical(probs=q))
    assert found == pytest.approx(by_hand, rel=1e-6)


def test_gaussian_by_hand() -> None:
    """Dimensions of one action are summed; observations are averaged."""
    local = Independent(Normal(torch.tensor([[0.0, 1.0], [2.0, 2.0]]), torch.ones(2, 2)), 1)
    head = Independent(Normal(torch.tensor([[0.5, 1.0], [2.0, 2.0]]), 2 * torch.ones(2, 2)), 1)

    def kl(mu: float, nu: float) -> float:
        return math.log(2) + (1 + (mu - nu) ** 2) / 8 - 0.5

    by_hand = (kl(0, 0.5) + kl(1, 1) + 2 * kl(2, 2)) / 2
    assert mean_divergence(local, head) == pytest.approx(by_hand, rel=1e-6)


def test_what_cannot_be_compared_has_diverged_without_limit() -> None:
    fine, nan = Categorical(logits=torch.zeros(2, 3)), torch.full((2, 3), torch.nan)
    assert mean_divergence(fine, Categorical(logits=nan, validate_args=False)) == math.inf
    # An action that neither allows is no difference.
    masked = Categorical(logits=torch.tensor([[0.0, 0.0, -torch.inf]]))
    assert mean_divergence(masked, masked) == 0


def test_distributions_that_torch_cannot_compare_are_told_with_a_rule_that_can() -> None:
    parts = Normal(torch.zeros(3, 2), 1.0)
    mixture = MixtureSameFamily(Categorical(logits=torch.zeros(3, 2)), parts)
    with pytest.raises(ConfigError, match=r"MixtureSameFamily .*clusterenv\.Every\(4\)"):
        mean_divergence(mixture, mixture)


def test_scalars_keep_their_values_until_they_are_published_again() -> None:
    policy = cartpole_policy()
    publisher = Publisher(policy, Never(), Layout(gym.spaces.Box(-1, 1, (4,))), lambda: [0])
    assert publisher.publish(policy, {"epsilon": 0.5, "beta": 1.0}).scalars["epsilon"] == 0.5
    assert publisher.publish(policy, {}).scalars == {"epsilon": 0.5, "beta": 1.0}
    assert publisher.publish(policy, {"epsilon": 0.1}).scalars == {"epsilon": 0.1, "beta": 1.0}


def test_a_version_that_was_replaced_on_its_way_to_a_shard_stops_nothing() -> None:
    policy = cartpole_policy()
    layout = Layout(gym.spaces.Box(-1, 1, (4,)))
    in_use = [0, 0]
    publisher = Publisher(policy, Divergence(0.1), layout, lambda: in_use)
    publisher.observe([np.zeros((8, 4), np.float32)], np.arange(8))
    publisher.publish(policy, {})
    publisher.publish(policy, {})  # version 1 is in use nowhere, and is released
    in_use[1] = 1
    assert publisher.publish(policy, {}).divergences == {0: 0.0, 1: math.inf}


def test_the_direction_is_from_the_workers_policy_to_the_heads() -> None:
    p, q = (
        Categorical(probs=torch.tensor([[0.9, 0.1]])),
        Categorical(probs=torch.tensor([[0.5, 0.5]])),
    )
    assert mean_divergence(p, q) == pytest.approx(
        0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-5
    )
    assert mean_divergence(p, q) != pytest.approx(mean_divergence(q, p), rel=1e-3)


def test_multi_discrete_is_summed_over_its_parts() -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(3, 5), nn.Linear(3, 5)
    obs, context = torch.randn(7, 3), Context(torch.arange(7))
    with torch.no_grad():
        found = mean_divergence(
            CategoricalPolicy(a, nvec=[2, 3]).distribution(obs, context),
            CategoricalPolicy(b, nvec=[2, 3]).distribution(obs, context),
        )
        parts = [
            mean_divergence(Categorical(logits=a(obs)[:, s]), Categorical(logits=b(obs)[:, s]))
            for s in (slice(0, 2), slice(2, 5))
        ]
    assert found == pytest.approx(sum(parts), rel=1e-5)


def test_actions_that_both_forbid_do_not_count() -> None:
    mask = torch.tensor([[0.0, 0.0, -math.inf]])
    other = torch.tensor([[1.0, 0.0, -math.inf]])
    found = mean_divergence(Categorical(logits=mask), Categorical(logits=other))
    two = mean_divergence(Categorical(logits=mask[:, :2]), Categorical(logits=other[:, :2]))
    assert found == pytest.approx(two)


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_the_publisher_compares_versions_in_use_on_its_probe(kind: str) -> None:
    torch.manual_seed(1)
    space = gym.spaces.Box(-1, 1, (4,), np.float32)
    policy = (
        cartpole_policy()
        if kind == "categorical"
        else Gaussian(nn.Linear(4, 2), gym.spaces.Box(-1, 1, (2,), np.float32))
    )
    in_use = [0, 0, 0]
    publisher = Publisher(policy, Divergence(0.1), Layout(space), lambda: in_use)
    obs = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    publisher.observe([obs], np.arange(40), take=40)
    kept = torch.from_numpy(publisher.probe.rows()["obs"])
    context = Context(torch.arange(len(kept)))
    before = policy.distribution(kept, context)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        after = policy.distribution(kept, context)
        by_hand = mean_divergence(before, after)
    announcement = publisher.publish(policy, {"epsilon": 0.5})
    assert announcement.version == 1
    assert announcement.scalars == {"epsilon": 0.5}
    assert announcement.divergences == {0: pytest.approx(by_hand, rel=1e-4)}
    in_use[:] = [0, 1, 1]
    assert publisher.publish(policy, {}).divergences == {
        0: pytest.approx(by_hand, rel=1e-4),
        1: 0.0,
    }
    in_use[:] = [2, 2, 2]
    assert set(publisher.publish(policy, {}).divergences) == {2}


def test_versions_of_a_rollout_are_kept_and_compared_until_it_is_complete() -> None:
    policy, in_use = cartpole_policy(), [0]
    space = gym.spaces.Box(-1, 1, (4,), np.float32)
    publisher = Publisher(policy, Divergence(0.1), Layout(space), lambda: in_use)
    publisher.observe([np.ones((8, 4), np.float32)], np.arange(8))
    publisher.publish(changed(policy, 0.1, 1), {})
    publisher.request()  # of version 1, while a shard has version 0
    divergences = []
    for pulled in (0, 1):  # whether the shard's pull was answered before the next publish
        in_use[:] = [pulled]
        divergences.append(publisher.publish(changed(policy, 0.1, 2), {}).divergences)
    assert divergences[0] == divergences[1]
    assert set(divergences[0]) == {0, 1}
    assert publisher.requested is not None
    assert publisher.weights(publisher.requested.version).version == 1
    publisher.release()
    assert publisher.requested is None
    assert set(publisher.publish(policy, {}).divergences) == {1}
    in_use[:] = [4]
    publisher.publish(policy, {})
    with pytest.raises(KeyError):
        publisher.weights(1)


def test_nothing_is_evaluated_for_rules_that_do_not_ask() -> None:
    policy = cartpole_policy()
    publisher = Publisher(policy, Never(), Layout(gym.spaces.Box(-1, 1, (4,))), lambda: [0])
    publisher.observe([np.zeros((4, 4), np.float32)], np.arange(4))
    assert publisher.publish(policy, {}).divergences == {}
    assert publisher.evaluation_seconds == 0


@pytest.mark.parametrize("known", [True, False])
def test_recurrent_policies_are_compared_at_the_states_they_acted_in(known: bool) -> None:
    """What a policy makes of its memory shows only where it has one."""
    torch.manual_seed(2)
    policy = Recalls()
    publisher = Publisher(policy, Divergence(0.1), Layout(gym.spaces.Box(-1, 1, (4,))), lambda: [0])
    state = {"memory": np.random.default_rng(0).normal(size=(9, 1)).astype(np.float32)}
    obs = np.zeros((9, 4), np.float32)
    publisher.observe([obs], np.arange(9), state=state if known else None, take=9)
    kept = publisher.probe.rows().get("state.memory", np.zeros((9, 1), np.float32))
    with torch.no_grad():
        memory = torch.from_numpy(kept)
        before = Categorical(logits=policy.read(memory))
        policy.read.weight.mul_(-1)
        by_hand = mean_divergence(before, Categorical(logits=policy.read(memory)))
    assert publisher.publish(policy, {}).divergences == {0: pytest.approx(by_hand, rel=1e-4)}
    assert (by_hand > 0) == known


def test_the_probe_keeps_the_newest() -> None:
    probe = Probe(size=8)
    for value in range(10):
        probe.add({"obs": np.full((5, 1), value), "env": np.full(5, value)}, take=2)
    rows = probe.rows()
    assert len(probe) == 8
    assert sorted(set(rows["env"].tolist())) == [6, 7, 8, 9]
    assert (rows["obs"][:, 0] == rows["env"]).all()


def test_the_probe_begins_anew_with_other_columns() -> None:
    probe = Probe(size=8)
    probe.add({"obs": np.zeros((8, 1))}, take=8)
    probe.add({"obs": np.ones((5, 1)), "action_mask": np.ones((5, 2), np.bool_)}, take=3)
    assert len(probe) == 3
    assert probe.rows()["obs"].tolist() == [[1.0]] * 3
    assert probe.added == 11
