"""Networks for continuous actions: an actor, and two critics at once."""

from __future__ import annotations

import itertools
import math
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from clusterenv.errors import ConfigError
from pipelines.networks.images import is_image

__all__ = ["Actor", "TwinQ"]


class Actor(nn.Module):
    """Means and log-deviations of continuous actions, ``[n, 2 * size]``, by ReLU layers.

    Parameters
    ----------
    observation_space
        A ``Box``; observations are flattened.
    action_space
        A ``Box``.
    hidden
        Sizes of the hidden layers.

    Raises
    ------
    ConfigError
        If observations are images, or in no Box.

    Examples
    --------
    >>> box = gym.spaces.Box(-1, 1, (3,))
    >>> Actor(box, gym.spaces.Box(-2, 2, (1,)), hidden=(32,))(torch.zeros(8, 3)).shape
    torch.Size([8, 2])
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.spaces.Box,
        hidden: tuple[int, ...] = (256, 256),
    ) -> None:
        super().__init__()
        sizes = (_inputs(observation_space), *hidden, 2 * math.prod(action_space.shape))
        layers = [(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(sizes)]
        self.layers = nn.Sequential(*itertools.chain.from_iterable(layers))[:-1]

    def forward(self, obs: Tensor) -> Tensor:
        out: Tensor = self.layers(obs.float().flatten(1))
        return out


class TwinQ(nn.Module):
    """Two critics with weights of their own, computed together: one product per layer.

    Parameters
    ----------
    observation_space, action_space, hidden
        As for :class:`Actor`.

    Examples
    --------
    >>> box = gym.spaces.Box(-1, 1, (3,))
    >>> TwinQ(box, box, hidden=(32,))(torch.zeros(8, 3), torch.zeros(8, 3)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.spaces.Box,
        hidden: tuple[int, ...] = (256, 256),
    ) -> None:
        super().__init__()
        sizes = (_inputs(observation_space) + math.prod(action_space.shape), *hidden, 1)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for inputs, outputs in itertools.pairwise(sizes):
            bound = 1 / math.sqrt(inputs)  # as nn.Linear begins
            self.weights.append(torch.empty(2, inputs, outputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(2, 1, outputs).uniform_(-bound, bound))

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the values of both, ``[2, n]``."""
        features = torch.cat([obs.float().flatten(1), action.flatten(1)], -1).expand(2, -1, -1)
        *layers, last = zip(self.weights, self.biases, strict=True)
        for weight, bias in layers:
            features = torch.baddbmm(bias, features, weight).relu()
        return torch.baddbmm(last[1], features, last[0]).squeeze(-1)


def _inputs(space: gym.Space[Any]) -> int:
    if not isinstance(space, gym.spaces.Box):
        raise ConfigError(
            f"these networks need observations in a Box, got {space}; wrap the environment: "
            "gymnasium.wrappers.FlattenObservation(env)"
        )
    if is_image(space):
        raise ConfigError(
            f"these networks have no convolutions for images, got {space}: clusterenv train ppo"
        )
    return math.prod(space.shape)
