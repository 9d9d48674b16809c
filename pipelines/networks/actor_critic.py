"""Actor and critic for flat observations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from clusterenv.errors import ConfigError
from clusterenv.policies import Context, Decision, Policy
from pipelines.networks.running import RunningStats

__all__ = ["PPOAgent"]


class PPOAgent(Policy):
    """Separate tanh networks for actor and critic, over normalised observations.

    Parameters
    ----------
    observation_space
        A ``Box``; it is flattened.
    action_space
        A ``Discrete`` that starts at 0, or a ``Box`` of one axis of floats.
    hidden
        Sizes of the hidden layers.
    normalize_obs
        Whether observations are normalised by ``stats``, which the learner updates.

    Raises
    ------
    ConfigError
        If the spaces are others.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        hidden: tuple[int, ...] = (64, 64),
        normalize_obs: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(observation_space, gym.spaces.Box):
            raise ConfigError(
                f"PPOAgent needs observations in a Box, got {observation_space}; wrap the "
                "environment: gymnasium.wrappers.FlattenObservation(env)"
            )
        self.stats = RunningStats(observation_space.shape) if normalize_obs else None
        if isinstance(action_space, gym.spaces.Discrete) and action_space.start == 0:
            outputs = int(action_space.n)
            self.log_std = None
        elif (
            isinstance(action_space, gym.spaces.Box)
            and len(action_space.shape) == 1
            and np.issubdtype(action_space.dtype, np.floating)
        ):
            outputs = action_space.shape[0]
            self.log_std = nn.Parameter(torch.zeros(outputs))
            self.register_buffer("low", torch.as_tensor(action_space.low))
            self.register_buffer("high", torch.as_tensor(action_space.high))
        else:
            raise ConfigError(
                "PPOAgent needs actions in Discrete(n) or in a Box of one axis of floats, "
                f"got {action_space}; wrap the environment with an ActionWrapper"
            )
        inputs = math.prod(observation_space.shape)
        self.actor = network((inputs, *hidden, outputs), last_gain=0.01)
        self.critic = network((inputs, *hidden, 1), last_gain=1.0)

    def normalize(self, obs: Tensor) -> Tensor:
        """Return observations as the networks take them, ``[n, inputs]``."""
        obs = obs.float()
        return (obs if self.stats is None else self.stats(obs)).flatten(1)

    def distribution(self, obs: Tensor, context: Context | None = None) -> Distribution:
        out = self.actor(self.normalize(obs))
        if self.log_std is None:
            return Categorical(logits=out, validate_args=False)
        spread = self.log_std.exp().expand_as(out)
        return Independent(Normal(out, spread, validate_args=False), 1, validate_args=False)

    def value(self, obs: Tensor) -> Tensor:
        """Return the critic's estimate, ``[n]``."""
        return self.critic(self.normalize(obs)).squeeze(-1)  # type: ignore[no-any-return]

    def judge(self, inputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return an action's log-probability, the entropy and the value of each row.

        The same as by :meth:`distribution` and :meth:`value`, in fewer calls.

        Parameters
        ----------
        inputs
            Observations as :meth:`normalize` returns them.
        action
            As it was sampled.
        """
        out, value = self.actor(inputs), self.critic(inputs).squeeze(-1)
        if self.log_std is None:
            log_probs = out.log_softmax(-1)
            log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            return log_prob, -(log_probs.exp() * log_probs).sum(-1), value
        distances = (action - out) * torch.exp(-self.log_std)
        width = self.log_std + 0.5 * math.log(2 * math.pi)
        log_prob = -(0.5 * distances.square() + width).sum(-1)
        return log_prob, (width + 0.5).sum().expand_as(log_prob), value

    def act(self, obs: Tensor, context: Context) -> Decision:
        # No values: the head computes them with its newest critic, of which a worker that
        # lags behind has only an old copy.
        distribution = self.distribution(obs)
        # The mode is the most probable action, or the mean.
        action = distribution.mode if context.deterministic else distribution.sample()
        extras = {"log_prob": distribution.log_prob(action)}
        if self.log_std is not None:
            extras["raw_action"] = action
            action = action.clamp(self.low, self.high)
        return Decision(action, extras)


def network(sizes: tuple[int, ...], last_gain: float) -> nn.Sequential:
    """Return a tanh network with orthogonal weights."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        linear = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(linear.weight, math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    with torch.no_grad():
        linear.weight *= last_gain / math.sqrt(2)
    return nn.Sequential(*layers[:-1])
