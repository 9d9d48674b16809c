"""Networks that give the value of every action."""

from __future__ import annotations

import itertools
import math
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from clusterenv.errors import ConfigError
from pipelines.networks.images import is_image, nature_cnn

__all__ = ["QNetwork"]


class QNetwork(nn.Module):
    """Values of discrete actions: layers over flat observations, convolutions over images.

    Parameters
    ----------
    observation_space
        A ``Box``. Images are uint8 with the channels, or stacked frames, on the first axis,
        stacked frames with channels on the first two, or colours on the last; everything else is
        flattened.
    action_space
        A ``Discrete`` that starts at 0.
    hidden
        Sizes of the hidden layers.
    duelling
        Whether state value and advantages have heads of their own:
        ``Q = V + A - mean(A)`` (Wang et al., 2016).

    Raises
    ------
    ConfigError
        If the spaces are others.

    Examples
    --------
    >>> box = gym.spaces.Box(-1, 1, (4,))
    >>> QNetwork(box, gym.spaces.Discrete(2), hidden=(32,))(torch.zeros(8, 4)).shape
    torch.Size([8, 2])
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        hidden: tuple[int, ...] = (256, 256),
        duelling: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(observation_space, gym.spaces.Box):
            raise ConfigError(
                f"QNetwork needs observations in a Box, got {observation_space}; wrap the "
                "environment: gymnasium.wrappers.FlattenObservation(env)"
            )
        if not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
            raise ConfigError(
                f"QNetwork needs actions in Discrete(n), got {action_space}; for continuous "
                "actions: clusterenv train ppo"
            )
        shape, actions = observation_space.shape, int(action_space.n)
        if is_image(observation_space):
            self.eyes: nn.Module = nature_cnn(shape)
            with torch.no_grad():
                inputs = self.eyes(torch.zeros(1, *shape)).shape[1]
        else:
            self.eyes = nn.Flatten()
            inputs = math.prod(shape)
        sizes = (inputs, *hidden)
        layers = [(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(sizes)]
        self.body = nn.Sequential(*itertools.chain.from_iterable(layers))
        self.advantage = nn.Linear(sizes[-1], actions)
        self.value = nn.Linear(sizes[-1], 1) if duelling else None

    def forward(self, obs: Tensor) -> Tensor:
        """Return the values, ``[n, actions]``."""
        features = self.body(self.eyes(obs.float()))
        advantage: Tensor = self.advantage(features)
        if self.value is None:
            return advantage
        value: Tensor = self.value(features)
        return value + advantage - advantage.mean(-1, keepdim=True)
