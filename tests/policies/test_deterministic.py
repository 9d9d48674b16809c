"""The deterministic mode: every policy that explores also knows its best action."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Beta, Independent
from torch.distributions import Categorical as CategoricalDistribution

from clusterenv.errors import ConfigError
from clusterenv.policies import (
    Categorical,
    CleanRL,
    Context,
    EpsilonGreedy,
    Gaussian,
    PaperAgent,
    Policy,
)
from pipelines.networks.actor_critic import ActorCritic

OBS = torch.randn(64, 3)
BEST = Context(torch.arange(64), deterministic=True)
BOX = gym.spaces.Box(-0.1, 0.1, (2,), np.float32)
OBSERVED = gym.spaces.Box(-1, 1, (3,), np.float32)


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(3, 4)

    def get_action_and_value(self, x: Tensor) -> Any:
        policy = CategoricalDistribution(logits=self.actor(x))
        action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), torch.zeros(len(x), 1)

    forward = get_action_and_value


def act(policy: Policy, context: Context = BEST) -> Tensor:
    with torch.inference_mode():
        return policy.act(OBS, context).action


@pytest.mark.parametrize("wrap", [CleanRL, PaperAgent, lambda agent: Categorical(agent.actor)])
def test_the_most_probable_action(wrap: Any) -> None:
    agent = Agent()
    assert torch.equal(act(wrap(agent)), agent.actor(OBS).argmax(-1))


def test_each_part_of_several_choices() -> None:
    net = nn.Linear(3, 5)
    logits = net(OBS)
    parts = torch.stack([logits[:, :3].argmax(-1), logits[:, 3:].argmax(-1)], -1)
    assert torch.equal(act(Categorical(net, nvec=[3, 2])), parts)


def test_the_mean_clipped_to_the_box() -> None:
    net = nn.Linear(3, 2)
    action = act(Gaussian(net, BOX))
    assert torch.equal(action, net(OBS).clamp(-0.1, 0.1))
    assert (action.abs() == 0.1).any()


@pytest.mark.parametrize("epsilon", [1.0, [1.0, 0.5]])
def test_epsilon_is_0_whatever_was_published(epsilon: Any) -> None:
    net = nn.Linear(3, 4)
    context = Context(torch.arange(64), {"epsilon": 1.0}, deterministic=True)
    assert torch.equal(act(EpsilonGreedy(net, epsilon), context), net(OBS).argmax(-1))


def test_masks_hold() -> None:
    mask = torch.zeros(64, 4, dtype=torch.bool)
    mask[:, 1] = True
    context = Context(torch.arange(64), mask=mask, deterministic=True)
    for policy in (Categorical(nn.Linear(3, 4)), EpsilonGreedy(nn.Linear(3, 4))):
        assert (act(policy, context) == 1).all()


@pytest.mark.parametrize("space", [gym.spaces.Discrete(4), BOX])
def test_the_agent_of_ppo(space: gym.Space[Any]) -> None:
    agent = ActorCritic(OBSERVED, space)
    out = agent.actor(agent.normalize(OBS))
    wanted = out.argmax(-1) if agent.head.log_std is None else out.clamp(-0.1, 0.1)
    assert torch.equal(act(agent), wanted)


def test_a_distribution_without_a_mode_says_so() -> None:
    class Squashed(Independent):
        @property
        def mode(self) -> Tensor:
            raise NotImplementedError

    def distribution(agent: nn.Module, obs: Tensor) -> Squashed:
        return Squashed(Beta(torch.ones(len(obs), 2), torch.ones(len(obs), 2)), 1)

    with pytest.raises(ConfigError, match=r"Squashed has no mode.*deterministic=False"):
        act(CleanRL(Agent(), distribution))
