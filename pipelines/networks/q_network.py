"""Networks that give the value of every action."""

from __future__ import annotations

import itertools
import math
from typing import Any

import gymnasium as gym
from torch import Tensor, nn

from clusterenv.errors import ConfigError
from pipelines.networks.images import image_network, is_image, refuse_cnn

__all__ = ["QNetwork", "actions_of", "layers_of"]

CNN = "nature"
"""Convolutions over images, unless others are asked for."""


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
    cnn
        Convolutions over images, see :func:`pipelines.networks.images.image_network`.

    Raises
    ------
    ConfigError
        If the spaces are others.

    Examples
    --------
    >>> box = gym.spaces.Box(-1, 1, (4,))
    >>> import torch
    >>> QNetwork(box, gym.spaces.Discrete(2), hidden=(32,))(torch.zeros(8, 4)).shape
    torch.Size([8, 2])
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        hidden: tuple[int, ...] = (256, 256),
        duelling: bool = False,
        cnn: str | None = None,
    ) -> None:
        super().__init__()
        actions = actions_of(action_space)
        self.eyes, self.body, features = layers_of(observation_space, hidden, cnn)
        self.advantage = nn.Linear(features, actions)
        self.value = nn.Linear(features, 1) if duelling else None

    def forward(self, obs: Tensor) -> Tensor:
        """Return the values, ``[n, actions]``."""
        features = self.body(self.eyes(obs))
        advantage: Tensor = self.advantage(features)
        if self.value is None:
            return advantage
        value: Tensor = self.value(features)
        return value + advantage - advantage.mean(-1, keepdim=True)


def actions_of(space: gym.Space[Any]) -> int:
    """Return the number of actions.

    Raises
    ------
    ConfigError
        If the space is no ``Discrete`` that starts at 0.
    """
    if not isinstance(space, gym.spaces.Discrete) or space.start != 0:
        raise ConfigError(
            f"QNetwork needs actions in Discrete(n), got {space}; for continuous "
            "actions: clusterenv train sac, or clusterenv train ppo"
        )
    return int(space.n)


class _Flat(nn.Flatten):
    """Observations that are no images, as floats."""

    def forward(self, obs: Tensor) -> Tensor:
        return super().forward(obs.float())


def layers_of(
    space: gym.Space[Any], hidden: tuple[int, ...], cnn: str | None = None
) -> tuple[nn.Module, nn.Sequential, int]:
    """Return convolutions for images, or what flattens; hidden layers; the size of the last.

    Raises
    ------
    ConfigError
        If observations are not in a ``Box``.
    """
    if not isinstance(space, gym.spaces.Box):
        raise ConfigError(
            f"QNetwork needs observations in a Box, got {space}; wrap the "
            "environment: gymnasium.wrappers.FlattenObservation(env)"
        )
    eyes: nn.Module
    if is_image(space):
        eyes, inputs = image_network(cnn or CNN, space.shape)
    else:
        refuse_cnn(cnn, space)
        eyes, inputs = _Flat(), math.prod(space.shape)
    sizes = (inputs, *hidden)
    layers = [(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(sizes)]
    return eyes, nn.Sequential(*itertools.chain.from_iterable(layers)), sizes[-1]
