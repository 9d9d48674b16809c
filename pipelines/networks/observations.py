"""Which observations an actor takes, and how their parts become one tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from gymnasium import spaces
from torch import Tensor, nn

from clusterenv.errors import ConfigError
from pipelines.networks.images import SMALLEST, is_image, planes_of

__all__ = ["Observations", "Seen"]


class Seen(NamedTuple):
    """Observations as networks take them; at least one of the two is there."""

    image: Tensor | None
    numbers: Tensor | None
    """``[n, …]``, of a Box as it is; of several parts side by side."""


class _Part(NamedTuple):
    """A leaf of a Dict or Tuple space."""

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    is_image: bool
    choices: int | None = None
    """Of a Discrete space, which becomes one-hot."""
    start: int = 0

    @property
    def numbers(self) -> int:
        return math.prod(self.shape) if self.choices is None else self.choices

    def flatten(self, values: Tensor) -> Tensor:
        """Return values as ``[…, numbers]``."""
        if self.choices is not None:
            return nn.functional.one_hot(values.long() - self.start, self.choices).float()
        return values.float().reshape(*values.shape[: values.ndim - len(self.shape)], -1)


class Observations:
    """Turns observations into one tensor, which can be split into minibatches, and back.

    A Box is that tensor. Of a Dict or Tuple, the flat parts are concatenated: Box and MultiBinary
    as numbers, Discrete as one-hot. If there is an image too, the tensor holds its bytes and those
    of the numbers.

    Parameters
    ----------
    space
        A Box, or a Dict or Tuple of such parts with at most one image: uint8 of at least 16 × 16
        pixels, see :mod:`pipelines.networks.images`.

    Raises
    ------
    ConfigError
        If the space is another; the message says what would fit.

    Examples
    --------
    >>> space = spaces.Dict(position=spaces.Box(-1, 1, (2,)), door=spaces.Discrete(3))
    >>> observations = Observations(space)
    >>> nested = {"position": torch.tensor([[0.5, -0.5]]), "door": torch.tensor([2])}
    >>> observations.gather(nested).tolist()
    [[0.5, -0.5, 0.0, 0.0, 1.0]]
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self._parts: list[_Part] = []
        if isinstance(space, spaces.Box):
            only = _Part((), space.shape, _is_large_image(space))
            parts = [only]
        elif isinstance(space, (spaces.Dict, spaces.Tuple)):
            _check_mask(space)
            parts = self._parts = list(_parts(space, space, ()))
        else:
            raise ConfigError(
                f"an actor-critic needs observations in a Box, or a Dict of such parts, got {space}"
                "; wrap the environment: gymnasium.wrappers.FlattenObservation(env)"
            )
        images = [part for part in parts if part.is_image]
        if len(images) > 1:
            names = ", ".join(_name(part.path) for part in images)
            raise ConfigError(
                f"an actor-critic takes one image, and observations have {names}; put their "
                "channels together with gymnasium.wrappers.TransformObservation, or leave some "
                f"out: gymnasium.wrappers.FilterObservation(env, [{images[0].path[0]!r}, …])"
            )
        self.image = images[0].shape if images else None
        """Shape of the image, if there is one."""
        flat = [part for part in parts if not part.is_image]
        self.numbers = sum(part.numbers for part in flat)
        """How many there are besides the image."""
        self.shape = (self.numbers,) if self._parts else space.shape or ()
        """Of the numbers of one observation."""
        self._packed = bool(images and flat)

    def gather(self, obs: Any) -> Tensor:
        """Return the tensor of nested observations, as a policy gets them."""
        if not self._parts or isinstance(obs, Tensor):
            tensor: Tensor = obs
            return tensor
        return self._side_by_side([_at(obs, part.path) for part in self._parts])

    def of_columns(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor of a rollout's columns or tail: ``obs``, or ``obs.<key>`` of parts."""
        if not self._parts:
            return columns["obs"]
        return self._side_by_side([columns[_name(part.path)] for part in self._parts])

    def split(self, tensor: Tensor) -> Seen:
        """Return image and numbers of observations ``[n, …]`` as they were gathered or joined."""
        if self.image is None:
            return Seen(None, tensor)
        if not self._packed:
            return Seen(tensor, None)
        pixels = math.prod(self.image)
        # Aligned by a copy: the bytes of an image need not be a multiple of 4.
        numbers = tensor[:, pixels:].contiguous().view(torch.float32)
        return Seen(tensor[:, :pixels].reshape(-1, *self.image), numbers)

    def join(self, seen: Seen) -> Tensor:
        """Undo :meth:`split`."""
        image, numbers = seen
        if image is None or numbers is None:
            tensor = numbers if image is None else image
            assert tensor is not None
            return tensor
        return torch.cat([image.flatten(1), numbers.contiguous().view(torch.uint8)], -1)

    def _side_by_side(self, values: list[Tensor]) -> Tensor:
        pairs = list(zip(self._parts, values, strict=True))
        flat = [part.flatten(value) for part, value in pairs if not part.is_image]
        numbers = torch.cat(flat, -1) if flat else None
        if self.image is None:
            assert numbers is not None
            return numbers
        (image,) = (value for part, value in pairs if part.is_image)
        if numbers is None:
            return image
        pixels = image.reshape(*image.shape[:-3], -1)
        return torch.cat([pixels, numbers.view(torch.uint8)], -1)


def _check_mask(space: gym.Space[Any]) -> None:
    if isinstance(space, spaces.Dict) and "action_mask" in space.spaces:
        raise ConfigError(
            "observations have an 'action_mask', which these learners do not heed; a policy that "
            "does is clusterenv.policies.Categorical(module), in a learner of your own"
        )


def _parts(
    whole: gym.Space[Any], space: gym.Space[Any], path: tuple[str | int, ...]
) -> Iterator[_Part]:
    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items():
            yield from _parts(whole, child, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from _parts(whole, child, (*path, index))
    elif isinstance(space, (spaces.Box, spaces.MultiBinary)):
        yield _Part(path, tuple(space.shape), _is_large_image(space))
    elif isinstance(space, spaces.Discrete):
        yield _Part(path, (), False, int(space.n), int(space.start))
    else:
        right = "gymnasium.wrappers.FlattenObservation(env)"
        if isinstance(whole, spaces.Dict):
            fits = [key for key, child in whole.spaces.items() if _fits(child)]
            right = f"gymnasium.wrappers.FilterObservation(env, {fits})"
        raise ConfigError(
            f"an actor-critic cannot take {_name(path)} in {space}, only parts in Box, MultiBinary "
            f"and Discrete; leave it out, or turn it into numbers with a wrapper: {right}"
        )


def _fits(space: gym.Space[Any]) -> bool:
    if isinstance(space, spaces.Dict):
        return all(map(_fits, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(_fits, space.spaces))
    return isinstance(space, (spaces.Box, spaces.MultiBinary, spaces.Discrete))


def _is_large_image(space: gym.Space[Any]) -> bool:
    """Whether a part is seen by convolutions; smaller images are flattened."""
    return is_image(space) and min(planes_of(space.shape or ())[1:]) >= SMALLEST


def _name(path: tuple[str | int, ...]) -> str:
    return ".".join(["obs", *map(str, path)])


def _at(obs: Any, path: tuple[str | int, ...]) -> Tensor:
    for key in path:
        obs = obs[key]
    tensor: Tensor = obs
    return tensor
