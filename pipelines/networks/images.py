"""Convolutions over images, and which observations are images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from clusterenv.errors import ConfigError

__all__ = [
    "SMALLEST",
    "image_network",
    "is_image",
    "nature_cnn",
    "planes_of",
    "pooled_cnn",
    "refuse_cnn",
    "residual_cnn",
    "stack_of",
    "tile_cnn",
]

SMALLEST = 16
"""Pixels of the shorter side of an image that a residual network takes."""
IMAGES_AT_ONCE = 64
"""That are floats at one time."""
COLOURS = (1, 3)
"""Channels that may also lie on the last axis."""


class _Planes(nn.Module):
    """Scales images to 0 … 1, with all frames and channels on one axis, before the pixels.

    If ``halved``, a pixel of the result is the brightest of 2 × 2; the last row and column are
    left out where their number is odd.
    """

    def __init__(self, shape: tuple[int, ...], halved: bool = False) -> None:
        super().__init__()
        self.last, self.halved = _channels_last(shape), halved

    def forward(self, image: Tensor) -> Tensor:
        image = image.movedim(-1, 1) if self.last else image.flatten(1, -3)
        if self.halved:  # as bytes: ten times as fast as max_pool2d
            image = image[..., : image.shape[-2] // 2 * 2, : image.shape[-1] // 2 * 2]
            image = torch.maximum(image[..., ::2, :], image[..., 1::2, :])
            image = torch.maximum(image[..., ::2], image[..., 1::2])
        # In the copy, as a second array of this size costs more than the convolutions may.
        return image.to(torch.float32, copy=True).div_(255)


def _channels_last(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[-1] in COLOURS and shape[0] > shape[-1]


def planes_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the planes, height and width of an observation that is an image, or a stack of them.

    Examples
    --------
    >>> planes_of((4, 84, 84)), planes_of((4, 3, 72, 96)), planes_of((63, 63, 3))
    ((4, 84, 84), (12, 72, 96), (3, 63, 63))
    """
    if _channels_last(shape):
        return shape[2], shape[0], shape[1]
    *planes, height, width = shape
    return math.prod(planes), height, width


def nature_cnn(shape: tuple[int, ...]) -> nn.Sequential:
    """Return the convolutions of Mnih et al. (2015) for images of this shape."""
    planes, *sides = planes_of(shape)
    if min(sides) < 36:
        raise ConfigError(
            f"images of shape {shape} are too small for the convolutions, which need the channels "
            "first and at least 36 × 36 pixels"
        )
    return nn.Sequential(
        _Planes(shape),
        *(nn.Conv2d(planes, 32, 8, stride=4), nn.ReLU()),
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
    planes = _planes_for(shape)
    layers: list[nn.Module] = [_Planes(shape)]
    for section, (inputs, outputs) in enumerate(itertools.pairwise((planes, *channels))):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=1 if section else 2, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
            _Residual(outputs),
        ]
    body = nn.Sequential(*layers, nn.ReLU(), nn.Flatten())
    return body.extend([nn.Linear(_outputs(body, shape), features), nn.ReLU()])


def pooled_cnn(
    shape: tuple[int, ...], features: int = 256, channels: tuple[int, ...] = (16, 32, 32)
) -> nn.Sequential:
    """Return a network for large images of few bright points, such as players on a pitch.

    The brightest of 2 × 2 pixels is kept, so that no point is lost, and every convolution halves
    the image again. On four stacked frames of 4 × 72 × 96 it takes a fifth of the time of
    :func:`residual_cnn`.

    Examples
    --------
    >>> pooled_cnn((4, 4, 72, 96))(torch.zeros(2, 4, 4, 72, 96, dtype=torch.uint8)).shape
    torch.Size([2, 256])
    """
    layers: list[nn.Module] = [_Planes(shape, halved=True)]
    for section, (inputs, outputs) in enumerate(
        itertools.pairwise((_planes_for(shape), *channels))
    ):
        layers += [nn.Conv2d(inputs, outputs, 3 if section else 4, stride=2, padding=1), nn.ReLU()]
    body = nn.Sequential(*layers, nn.Flatten())
    return body.extend([nn.Linear(_outputs(body, shape), features), nn.ReLU()])


def image_network(name: str, shape: tuple[int, ...]) -> tuple[nn.Sequential, int]:
    """Return convolutions for images of this shape, and how many numbers they make of one.

    Parameters
    ----------
    name
        Of the convolutions: ``residual``, ``nature``, ``pooled``, or ``tiles:9`` for images of
        grids whose cells have sides of 9 pixels.
    shape
        Of an image, or of a stack of them.

    Raises
    ------
    ConfigError
        If there are none of that name, or images of this shape do not fit them.

    Examples
    --------
    >>> image_network("nature", (4, 84, 84))[1], image_network("tiles:9", (63, 63, 3))[1]
    (3136, 128)
    """
    makers: dict[str, Callable[[tuple[int, ...]], nn.Sequential]] = {
        "residual": residual_cnn,
        "nature": nature_cnn,
        "pooled": pooled_cnn,
    }
    kind, _, side = name.partition(":")
    if kind == "tiles" and side.isdecimal() and int(side):
        network = tile_cnn(shape, int(side))
    elif name in makers:
        network = makers[name](shape)
    else:
        known = ", ".join([*makers, "tiles:9"])
        raise ConfigError(f"--cnn {name} is unknown, one of {known}: --cnn residual")
    return network, _outputs(network, shape)


def refuse_cnn(name: str | None, space: gym.Space[Any]) -> None:
    """Raise if convolutions are asked for where observations are no images."""
    if name is not None:
        raise ConfigError(
            f"--cnn {name} is for images, and observations are {space}: leave --cnn out"
        )


def _planes_for(shape: tuple[int, ...]) -> int:
    """Return the planes of images that are large enough for the smaller networks."""
    planes, *sides = planes_of(shape)
    if min(sides) < SMALLEST:
        raise ConfigError(
            f"images of shape {shape} are too small for the convolutions, which need the channels "
            f"first and at least {SMALLEST} × {SMALLEST} pixels"
        )
    return planes


@torch.no_grad()
def _outputs(network: nn.Module, shape: tuple[int, ...]) -> int:
    """Return how many numbers a network makes of an image."""
    return int(network(torch.zeros(1, *shape)).shape[1])


class _CellConv(torch.autograd.Function):
    """Convolves images of uint8 by whole cells, without keeping them as floats.

    The floats of a fragment would be written and read in memory several times, and that takes
    five times as long as the convolution. Those of some images at a time stay in the cache; the
    backward pass makes them again.
    """

    @staticmethod
    def forward(ctx: Any, planes: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(planes, weight)
        stride = weight.shape[-1]
        parts = torch.split(planes, IMAGES_AT_ONCE)
        return torch.cat([nn.functional.conv2d(p.float(), weight, bias, stride) for p in parts])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        (given,), (planes, weight) = gradients, ctx.saved_tensors
        stride, size = weight.shape[-1], weight.shape
        total = torch.zeros_like(weight)
        parts = (torch.split(each, IMAGES_AT_ONCE) for each in (planes, given))
        for part, slope in zip(*parts, strict=True):
            total += conv2d_weight(part.float(), size, slope, stride)  # type: ignore[no-untyped-call]
        return None, total, given.sum((0, 2, 3))


class _Cells(nn.Module):
    """One convolution of images, scaled to 0 … 1, whose kernel is a cell."""

    def __init__(self, shape: tuple[int, ...], tile: int, channels: int) -> None:
        super().__init__()
        self.last = _channels_last(shape)
        self.conv = nn.Conv2d(planes_of(shape)[0], channels, tile, stride=tile)

    def forward(self, image: Tensor) -> Tensor:
        planes = image.movedim(-1, 1) if self.last else image.flatten(1, -3)
        bias = self.conv.bias
        assert bias is not None
        weight = self.conv.weight / 255  # the same as scaling the image, and less work
        if not torch.is_grad_enabled():  # acting: few images, and torch.export follows this
            return nn.functional.conv2d(planes.float(), weight, bias, weight.shape[-1])
        out: Tensor = _CellConv.apply(planes, weight, bias)  # type: ignore[no-untyped-call]
        return out


def tile_cnn(
    shape: tuple[int, ...], tile: int, features: int = 128, channels: int = 16
) -> nn.Sequential:
    """Return a small network for images of grids, whose one convolution sees each cell whole.

    Examples
    --------
    >>> tile_cnn((63, 63, 3), tile=9)(torch.zeros(2, 63, 63, 3, dtype=torch.uint8)).shape
    torch.Size([2, 128])
    """
    _, height, width = planes_of(shape)
    if height % tile or width % tile:
        common = math.gcd(height, width)
        raise ConfigError(
            f"--cnn tiles:{tile} does not divide images of {height} × {width} pixels into cells: "
            + (f"--cnn tiles:{common}" if common > 1 else "--cnn residual")
        )
    cells = (height // tile) * (width // tile)
    return nn.Sequential(
        *(_Cells(shape, tile, channels), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(cells * channels, features), nn.ReLU()),
    )


def is_image(space: gym.Space[Any]) -> bool:
    """Whether observations are images, or stacks of images with channels: 3 or 4 axes of uint8."""
    return len(space.shape or ()) in (3, 4) and space.dtype == np.uint8


def stack_of(space: gym.Space[Any]) -> int | None:
    """Return how many frames are stacked in an observation; ``None`` if it is no stack.

    The frames lie along the first axis. With 4 axes that is all; with 3 it must be the shortest,
    and three of them are colours.

    Examples
    --------
    >>> stack_of(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8))
    4
    >>> stack_of(gym.spaces.Box(0, 255, (4, 3, 72, 96), np.uint8))
    4
    """
    if not is_image(space):
        return None
    frames, *image = space.shape or (0,)
    if len(image) == 3:
        return frames if frames > 1 else None
    return frames if frames not in COLOURS and frames < min(image) else None
