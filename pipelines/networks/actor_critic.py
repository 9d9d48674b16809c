"""Actors and critics without memory."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from clusterenv.errors import ConfigError
from clusterenv.policies import Context, Decision, Policy
from clusterenv.returns import next_values
from clusterenv.store import Rollout
from pipelines.networks.action_head import ActionHead
from pipelines.networks.images import SMALLEST, is_image, planes_of, residual_cnn
from pipelines.networks.running import RunningStats

__all__ = ["ActorCritic", "Unrolled", "body_of", "flat", "network"]


class Unrolled(NamedTuple):
    """What an agent says of a rollout; all are ``[time, env]``, but the first."""

    out: Tensor
    """The actor's outputs, ``[time, env, outputs]``."""
    log_prob: Tensor
    """Of the actions that were taken."""
    entropy: Tensor
    value: Tensor
    next_value: Tensor
    """Of the true next observations, without a gradient."""


class ActorCritic(Policy):
    """Separate tanh networks over normalised observations, or one residual network over images.

    Parameters
    ----------
    observation_space
        A ``Box``. Images are uint8 of at least 16 × 16 pixels, with the channels, or stacked
        frames, on the first axis, stacked frames with channels on the first two, or colours on the
        last; everything else is flattened.
    action_space
        See :class:`ActionHead`.
    hidden
        Sizes of the hidden layers; not for images, whose network has its own.
    normalize_obs
        Whether flat observations are normalised by ``stats``, which the learner updates.

    Raises
    ------
    ConfigError
        If the spaces are others.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        hidden: tuple[int, ...] = (64, 64),
        normalize_obs: bool = True,
    ) -> None:
        super().__init__()
        self.head = ActionHead(action_space)
        self.eyes, self.stats, inputs = body_of(observation_space, normalize_obs)
        layers = () if self.eyes is not None else hidden
        self.actor = network((inputs, *layers, self.head.outputs), last_gain=0.01)
        self.critic = network((inputs, *layers, 1), last_gain=1.0)

    def normalize(self, obs: Tensor) -> Tensor:
        """Return observations as :meth:`forward` takes them: images as they are, others flat."""
        return obs if self.eyes is not None else flat(obs, self.stats)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actor's outputs, ``[n, outputs]``, and the values, ``[n]``."""
        features = self.see(inputs)
        return self.actor(features), self.critic(features).squeeze(-1)

    def see(self, inputs: Tensor) -> Tensor:
        """Return the features of observations as :meth:`normalize` returns them."""
        features: Tensor = inputs if self.eyes is None else self.eyes(inputs)
        return features

    def distribution(self, obs: Tensor, context: Context | None = None) -> Distribution:
        return self.head.distribution(self._out(obs))

    def _out(self, obs: Tensor) -> Tensor:
        out: Tensor = self.actor(self.see(self.normalize(obs)))
        return out

    def value(self, obs: Tensor) -> Tensor:
        """Return the critic's estimate, ``[n]``."""
        value: Tensor = self.critic(self.see(self.normalize(obs)))
        return value.squeeze(-1)

    def judge(self, inputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return an action's log-probability, the entropy and the value of each row.

        Parameters
        ----------
        inputs
            Observations as :meth:`normalize` returns them.
        action
            As it was sampled.
        """
        out, value = self(inputs)
        return *self.head.judge(out, action), value

    def unroll(self, rows: Rollout) -> Unrolled:
        """Judge all rows of a rollout."""
        shape = rows["reward"].shape
        out, value = self(self.normalize(rows["obs"].flatten(0, 1)))
        out, value = out.view(*shape, -1), value.view(shape)
        log_prob, entropy = self.head.judge(out, rows[self.head.column])
        with torch.no_grad():
            following = next_values(value, rows.tail_rows, self.value(rows.tail["obs"]))
        return Unrolled(out, log_prob, entropy, value, following)

    def act(self, obs: Tensor, context: Context) -> Decision:
        # No values: the head computes them with its newest critic, of which a worker that
        # lags behind has only an old copy.
        return self.head.decide(self._out(obs), context)


def body_of(
    space: gym.Space[Any], normalize_obs: bool
) -> tuple[nn.Module | None, RunningStats | None, int]:
    """Return convolutions for images, or statistics for flat observations, and their outputs.

    Raises
    ------
    ConfigError
        If observations are neither.
    """
    if not isinstance(space, gym.spaces.Box):
        raise ConfigError(
            f"an actor-critic needs observations in a Box, got {space}; wrap the environment: "
            "gymnasium.wrappers.FlattenObservation(env)"
        )
    if is_image(space) and min(planes_of(space.shape)[1:]) >= SMALLEST:  # else flattened
        features = 256
        return residual_cnn(space.shape, features), None, features
    return None, RunningStats(space.shape) if normalize_obs else None, math.prod(space.shape)


def flat(obs: Tensor, stats: RunningStats | None) -> Tensor:
    """Return observations that are no images as ``[n, inputs]``."""
    obs = obs.float()
    return (obs if stats is None else stats(obs)).flatten(1)


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
