"""Networks that give the value of every action."""

from __future__ import annotations

import itertools
import math
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from clusterenv.errors import ConfigError

__all__ = ["QNetwork", "is_image", "stack_of"]


class QNetwork(nn.Module):
    """Values of discrete actions: layers over flat observations, convolutions over images.

    Parameters
    ----------
    observation_space
        A ``Box``. Images are uint8 with the channels, or stacked frames, on the first axis;
        everything else is flattened.
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
    >>> box = gym.spaces.Box(-1, 1, (4,), np.float32)
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


class _Scale(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image / 255


def nature_cnn(shape: tuple[int, ...]) -> nn.Sequential:
    """Return the convolutions of Mnih et al. (2015) for images of this shape."""
    if min(shape[1:]) < 36:
        raise ConfigError(
            f"images of shape {shape} are too small for the convolutions, which need the channels "
            "first and at least 36 × 36 pixels"
        )
    return nn.Sequential(
        _Scale(),
        *(nn.Conv2d(shape[0], 32, 8, stride=4), nn.ReLU()),
        *(nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, stride=1), nn.ReLU()),
        nn.Flatten(),
    )


def is_image(space: gym.Space[Any]) -> bool:
    """Whether observations are images."""
    return len(space.shape or ()) == 3 and space.dtype == np.uint8


def stack_of(space: gym.Space[Any]) -> int | None:
    """Return how many frames are stacked in an observation; ``None`` if it is no stack.

    The frames lie along the first axis, which is the shortest. Three of them are colours.
    """
    if not is_image(space):
        return None
    frames, *image = space.shape or (0,)
    return frames if frames not in (1, 3) and frames < min(image) else None
