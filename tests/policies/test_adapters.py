"""Adapters: what people have becomes a policy, and its distribution is the one that acts."""

from __future__ import annotations

import copy
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Normal

from clusterenv.errors import ConfigError
from clusterenv.policies import (
    Categorical,
    CleanRL,
    Context,
    EpsilonGreedy,
    Gaussian,
    PaperAgent,
    Random,
)
from clusterenv.sync.divergence import mean_divergence

N = 2000
CONTEXT = Context(torch.arange(N))
OBS = torch.randn(1, 3).expand(N, 3)


def frequencies(action: Tensor, n: int) -> Tensor:
    return torch.bincount(action, minlength=n) / len(action)


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(3, 4)
        self.critic = nn.Linear(3, 1)

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> Any:
        policy = CategoricalDistribution(logits=self.actor(x))
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), policy.entropy(), self.critic(x)

    def forward(self, x: Tensor) -> Any:
        return self.get_action_and_value(x)


class Continuous(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor_mean = nn.Linear(3, 2)
        self.actor_logstd = nn.Parameter(torch.zeros(1, 2))

    def get_action_and_value(self, x: Tensor) -> Any:
        mean = self.actor_mean(x)
        policy = Normal(mean, self.actor_logstd.expand_as(mean).exp())
        action = policy.sample()
        return action, policy.log_prob(action).sum(1), policy.entropy().sum(1), mean[:, :1]


@pytest.mark.parametrize("make", [CleanRL, PaperAgent, lambda agent: Categorical(agent.actor)])
def test_discrete_agents_act_by_their_distribution(make: Any) -> None:
    torch.manual_seed(0)
    policy = make(Agent())
    with torch.no_grad():
        decision = policy.act(OBS, CONTEXT)
        expected = policy.distribution(OBS, CONTEXT)
    assert torch.allclose(decision.extras["log_prob"], expected.log_prob(decision.action))
    assert torch.allclose(frequencies(decision.action, 4), expected.probs[0], atol=0.05)
    for extra in decision.extras.values():
        assert extra.shape == (N,)


def test_a_continuous_cleanrl_agent_has_a_gaussian_distribution() -> None:
    torch.manual_seed(0)
    policy = CleanRL(Continuous())
    with torch.no_grad():
        decision = policy.act(OBS, CONTEXT)
        expected = policy.distribution(OBS, CONTEXT)
    assert torch.allclose(decision.extras["log_prob"], expected.log_prob(decision.action))


class MultiDiscreteAgent(nn.Module):
    """As CleanRL's ``ppo_multidiscrete`` has it."""

    def __init__(self, nvec: Any) -> None:
        super().__init__()
        self.parts = [2, 3]
        if nvec is not None:
            self.nvec = nvec
        self.actor = nn.Linear(3, 5)
        self.critic = nn.Linear(3, 1)

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> Any:
        split = torch.split(self.actor(x), self.parts, dim=1)
        chosen = [CategoricalDistribution(logits=logits) for logits in split]
        if action is None:
            action = torch.stack([each.sample() for each in chosen])
        pairs = list(zip(action, chosen, strict=True))
        log_prob = torch.stack([each.log_prob(a) for a, each in pairs])
        entropy = torch.stack([each.entropy() for each in chosen])
        return action.T, log_prob.sum(0), entropy.sum(0), self.critic(x)


@pytest.mark.parametrize("nvec", [np.array([2, 3]), torch.tensor([2, 3])])
def test_cleanrl_agents_with_several_choices(nvec: Any) -> None:
    policy = CleanRL(MultiDiscreteAgent(nvec))
    with torch.no_grad():
        decision = policy.act(OBS, CONTEXT)
        made = policy.distribution(OBS, CONTEXT)
    assert made.sample().shape == decision.action.shape
    assert torch.allclose(made.log_prob(decision.action), decision.extras["log_prob"])
    # The first choice of an agent that only shifts its logits is the same.
    other = copy.deepcopy(policy)
    with torch.no_grad():
        other.agent.actor.bias[:2] += 3.0
        assert mean_divergence(made, other.distribution(OBS, CONTEXT)) == pytest.approx(0, abs=1e-6)


def test_a_cleanrl_agent_whose_logits_are_no_single_choice_is_refused() -> None:
    policy = CleanRL(MultiDiscreteAgent(None))
    before = torch.get_rng_state()
    with pytest.raises(
        ConfigError, match=r"actions of shape \(\d+, 2\) by logits of shape \(\d+, 5\)"
    ):
        policy.distribution(OBS, CONTEXT)
    assert torch.equal(torch.get_rng_state(), before)


def test_gaussian_clips_to_the_box_and_keeps_what_was_sampled() -> None:
    torch.manual_seed(0)
    space = gym.spaces.Box(np.float32([-0.1, -1]), np.float32([0.1, 1]))
    policy = Gaussian(nn.Linear(3, 2), space, log_std=0.5)
    with torch.no_grad():
        decision = policy.act(OBS, CONTEXT)
        expected = policy.distribution(OBS, CONTEXT)
    raw = decision.extras["raw_action"]
    assert decision.action[:, 0].abs().max() <= 0.1
    assert raw[:, 0].abs().max() > 1
    assert torch.allclose(decision.extras["log_prob"], expected.log_prob(raw))


def test_multi_discrete_actions_are_independent_parts() -> None:
    torch.manual_seed(0)
    policy = Categorical(nn.Linear(3, 5), nvec=[2, 3])
    with torch.no_grad():
        decision = policy.act(OBS, CONTEXT)
    assert decision.action.shape == (N, 2)
    assert decision.action.max(0).values.tolist() == [1, 2]


def test_a_module_that_also_judges_gives_a_value_column() -> None:
    class Both(nn.Module):
        def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
            return obs, obs.sum(1, keepdim=True)

    decision = Categorical(Both()).act(OBS, CONTEXT)
    assert torch.allclose(decision.extras["value"], OBS.sum(1))


def test_epsilon_greedy_explores_as_often_as_it_says() -> None:
    torch.manual_seed(0)
    policy = EpsilonGreedy(nn.Linear(3, 4), epsilon=0.4)
    with torch.no_grad():
        best = int(policy.module(OBS)[0].argmax())
        often = frequencies(policy.act(OBS, CONTEXT).action, 4)
        none = policy.act(OBS, Context(torch.arange(N), {"epsilon": 0.0})).action
    assert abs(often[best] - (0.6 + 0.1)) < 0.05
    assert (none == best).all()


def test_epsilon_greedy_says_which_actions_were_drawn_at_random() -> None:
    torch.manual_seed(0)
    policy = EpsilonGreedy(nn.Linear(3, 4), epsilon=0.4)
    with torch.no_grad():
        best = int(policy.module(OBS)[0].argmax())
        action, extras, _ = policy.act(OBS, CONTEXT)
        sure = policy.act(OBS, Context(torch.arange(N), deterministic=True))
    drawn = extras["exploratory"]
    assert drawn.dtype == torch.bool
    assert (action[~drawn] == best).all()
    assert abs(drawn.float().mean() - 0.4) < 0.05
    assert 0.15 < (action[drawn] == best).float().mean() < 0.35  # one of four, by chance
    assert not sure.extras["exploratory"].any()
    assert sure.extras["exploratory"].shape == (N,)


def test_a_ladder_gives_each_environment_its_own_epsilon() -> None:
    torch.manual_seed(0)
    policy = EpsilonGreedy(nn.Linear(3, 4), epsilon=[0.0, 1.0])
    with torch.no_grad():
        best = policy.module(OBS)[0].argmax()
        action = policy.act(OBS, CONTEXT).action
        none = policy.act(OBS, Context(torch.arange(N), {"epsilon": 0.0})).action
    assert (action[::2] == best).all()
    assert (action[1::2] == best).float().mean() < 0.4
    assert (none == best).all()


def test_the_distribution_of_epsilon_greedy_is_the_softmax_at_a_temperature() -> None:
    policy = EpsilonGreedy(nn.Linear(3, 4), temperature=2.0)
    with torch.no_grad():
        expected = (policy.module(OBS) / 2).softmax(-1)
        assert torch.allclose(policy.distribution(OBS, CONTEXT).probs, expected)
        sharper = policy.distribution(OBS, Context(torch.arange(N), {"temperature": 0.5})).probs
    assert sharper.max() > expected.max()


def test_values_far_apart_have_not_diverged_without_limit() -> None:
    """A softmax of values 104 apart is 0 in float32, and 0 is infinitely far from anything."""

    def softmax(*values: float) -> Any:
        module = nn.Linear(3, len(values))
        with torch.no_grad():
            module.weight.zero_()
            module.bias.copy_(torch.tensor(values))
        with torch.no_grad():
            return EpsilonGreedy(module).distribution(OBS, CONTEXT)

    assert mean_divergence(softmax(0, 103), softmax(0, 104)) == pytest.approx(0, abs=1e-6)
    assert mean_divergence(softmax(0, 300), softmax(300, 0)) > 10
    masked = EpsilonGreedy(nn.Linear(3, 4)).distribution(
        OBS, Context(CONTEXT.envs, mask=torch.tensor([[True, False, True, True]]).expand(N, 4))
    )
    assert (masked.probs[:, 1] == 0).all()


def test_masks_are_kept_by_all() -> None:
    mask = torch.zeros(N, 4, dtype=torch.bool)
    mask[:, 2] = True
    context = Context(torch.arange(N), mask=mask)
    for policy in (
        Categorical(nn.Linear(3, 4)),
        EpsilonGreedy(nn.Linear(3, 4), epsilon=1.0),
        Random(gym.spaces.Discrete(4)),
    ):
        with torch.no_grad():
            assert (policy.act(OBS, context).action == 2).all()


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(-1, 1, (2,), np.float32),
        gym.spaces.Box(0, 255, (2, 2), np.uint8),
        gym.spaces.Discrete(3, start=-1),
        gym.spaces.MultiDiscrete([3, 4], start=[1, 2]),
        gym.spaces.MultiBinary(3),
    ],
)
def test_random_has_no_weights_and_draws_from_all_of_its_space(space: gym.Space[Any]) -> None:
    policy = Random(space, seed=1)
    actions = [policy.act(OBS, CONTEXT).action for _ in range(100)]
    assert all(space.contains(row) for action in actions for row in action.numpy())
    drawn = torch.cat(actions).double()
    assert (drawn.min(0).values < drawn.mean(0)).all()
    assert len(drawn.reshape(len(drawn), -1).unique(dim=0)) >= 3
    assert policy.act(OBS[:1], Context(CONTEXT.envs[:1])).action.shape[0] == 1
    assert not list(policy.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CleanRL(nn.Linear(2, 2)), r"Linear has no get_action_and_value\(obs\)"),
        (lambda: PaperAgent(nn.Linear(2, 2)), "Linear has no .actor module"),
        (lambda: EpsilonGreedy(nn.Linear(2, 2), epsilon=1.5), "epsilon must be from 0 to 1"),
        (
            lambda: EpsilonGreedy(nn.Linear(2, 2), temperature=0),
            "temperature must be a number, above 0",
        ),
        (lambda: EpsilonGreedy(nn.Linear(2, 2), epsilon=math.nan), "epsilon must be from 0 to 1"),
        (lambda: EpsilonGreedy(nn.Linear(2, 2), temperature=math.nan), "temperature .*got nan"),
        (lambda: EpsilonGreedy(nn.Linear(2, 2), epsilon="x"), "epsilon must be from 0.*got 'x'"),
        (lambda: EpsilonGreedy(nn.Linear(2, 2), epsilon=[]), r"epsilon must be from 0.*got \[\]"),
        (lambda: Categorical(len), r"module must be a Module, got .*: Categorical\(nn\."),
        (lambda: Categorical(nn.Linear(2, 2), nvec=5), "nvec must be a list of integers, got 5"),
        (lambda: Categorical(nn.Linear(2, 2), nvec=[0]), "nvec must be an integer, at least 1"),
        (lambda: Gaussian(nn.Linear(2, 2), log_std="x"), "log_std must be a number.*got 'x'"),
        (lambda: CleanRL("agent"), r"agent must be a Module, got 'agent': CleanRL\(agent\)"),
        (lambda: Random(5), r"action_space must be a space of one array, got 5: Random\("),
        (lambda: Random(gym.spaces.Text(4)), "action_space must be a space of one array, got Text"),
        (lambda: Random(gym.spaces.Discrete(2), seed=-1), "seed must be an integer, at least 0"),
    ],
)
def test_what_cannot_be_adapted_is_refused_with_the_right_call(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_gaussian_takes_a_whole_number_as_its_log_std() -> None:
    assert Gaussian(nn.Linear(3, 2), log_std=1).log_std.item() == 1.0


def test_a_gaussian_without_a_space_has_no_bounds() -> None:
    decision = Gaussian(nn.Linear(3, 2), log_std=3.0).act(OBS, CONTEXT)
    assert decision.action.shape == (N, 2)
    assert decision.action.abs().max() > 20
    assert decision.extras["log_prob"].shape == (N,)
    with pytest.raises(ConfigError, match=r"acts in a Box, got Discrete\(2\)"):
        Gaussian(nn.Linear(3, 2), gym.spaces.Discrete(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_a_gaussian_has_one_log_probability_for_an_action_of_any_shape(
    shape: tuple[int, ...],
) -> None:
    class Net(nn.Module):
        def forward(self, obs: Tensor) -> Tensor:
            return torch.zeros(len(obs), *shape)

    policy = Gaussian(Net(), gym.spaces.Box(-1, 1, shape))
    decision = policy.act(OBS, CONTEXT)
    assert decision.action.shape == (N, *shape)
    each = Normal(0.0, 1.0).log_prob(decision.extras["raw_action"])
    assert torch.allclose(decision.extras["log_prob"], each.reshape(N, -1).sum(1))


def test_a_shared_network_gets_what_the_agent_gives_it() -> None:
    class Shared(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.network = nn.Linear(3, 3)
            self.actor = nn.Linear(3, 4)
            self.scale = scale

        def get_action_and_value(self, x: Tensor) -> Any:
            policy = CategoricalDistribution(logits=self.actor(self.network(x / self.scale)))
            action = policy.sample()
            return action, policy.log_prob(action), policy.entropy(), x[:, :1]

    frames = torch.randint(0, 256, (N, 3), dtype=torch.uint8)
    for agent, obs in ((Shared(1.0), OBS), (Shared(255.0), frames)):
        policy = CleanRL(agent)
        decision = policy.act(obs, CONTEXT)
        log_prob = policy.distribution(obs, CONTEXT).log_prob(decision.action)
        assert torch.allclose(log_prob, decision.extras["log_prob"], atol=1e-6)


def test_epsilon_may_be_any_number_and_values_must_be_numbers() -> None:
    policy = EpsilonGreedy(nn.Linear(3, 4), epsilon=np.float32(0.25))
    assert (policy.ladder, float(policy.epsilon)) == (False, 0.25)
    with pytest.raises(ValueError, match="the Q network returned NaN"):
        policy.act(torch.full((N, 3), float("nan")), CONTEXT)


def test_another_epsilon_leaves_the_network_and_the_temperature_as_they_are() -> None:
    module = nn.Linear(3, 4)
    policy = EpsilonGreedy(module, [0.5, 0.1], temperature=2.0)
    other = policy.with_epsilon(0.0)
    assert other.module is module
    assert other.temperature == 2.0
    assert torch.equal(other.act(OBS, CONTEXT).action, module(OBS).argmax(-1))
    assert policy.epsilon.tolist() == pytest.approx([0.5, 0.1])
    with pytest.raises(ConfigError, match="epsilon must be from 0 to 1"):
        policy.with_epsilon(2.0)
