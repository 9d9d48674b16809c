"""Convolutions over images, and which observations are images."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from clusterenv.errors import ConfigError

__all__ = ["SMALLEST", "is_image", "nature_cnn", "residual_cnn", "stack_of"]


SMALLEST = 16
"""Pixels of the shorter side of an image that a residual network takes."""


class _Scale(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image.float() / 255


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


class _Residual(nn.Module):
    """Two convolutions whose output is added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)),
            *(nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)),
        )

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = image + self.body(image)
        return out


def residual_cnn(
    shape: tuple[int, ...], features: int = 256, channels: tuple[int, ...] = (16, 32, 32)
) -> nn.Sequential:
    """Return a small residual network from images to features.

    That of Espeholt et al. (2018) with one block per section instead of two, and a first
    convolution of stride 2: a fifth of the work, for learners without an accelerator.

    Examples
    --------
    >>> residual_cnn((4, 84, 84))(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape
    torch.Size([2, 256])
    """
    if min(shape[1:]) < SMALLEST:
        raise ConfigError(
            f"images of shape {shape} are too small for the convolutions, which need the channels "
            f"first and at least {SMALLEST} × {SMALLEST} pixels"
        )
    layers: list[nn.Module] = [_Scale()]
    for section, (inputs, outputs) in enumerate(itertools.pairwise((shape[0], *channels))):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=1 if section else 2, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
            _Residual(outputs),
        ]
    layers += [nn.ReLU(), nn.Flatten()]
    body = nn.Sequential(*layers)
    with torch.no_grad():
        inputs = body(torch.zeros(1, *shape)).shape[1]
    return body.extend([nn.Linear(inputs, features), nn.ReLU()])


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
