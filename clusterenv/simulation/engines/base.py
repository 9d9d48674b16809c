"""The interface of an engine: a group of environments that step into given columns."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from clusterenv.data.infos import Packed, Rows, VectorInfo
from clusterenv.data.observation_mode import ObservationMode
from clusterenv.data.spaces import Column, Layout

__all__ = [
    "Engine",
    "EnvDescription",
    "EnvRaised",
    "Infos",
    "PrecheckedActions",
    "Recipe",
    "Slot",
    "skip_action_checks",
]

EnvFactory = Callable[..., gym.Env[Any, Any]]

Infos = Packed | VectorInfo | None
"""Packed infos from the Gymnasium engine, a vector info from the others."""


@dataclass(frozen=True)
class Recipe:
    """How to make the environments; the same for every shard."""

    env: str | EnvSpec | EnvFactory | tuple[EnvFactory, ...]
    """The name of a task is for EnvPool alone; of several factories, each makes the environment of
    its position."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]], ...] = ()
    """Applied to each environment, first to last."""
    engine: str = "gymnasium"
    autoreset_mode: AutoresetMode | None = AutoresetMode.NEXT_STEP
    """``None`` for what suits the engine best."""
    observation_mode: ObservationMode = "same"


@dataclass(frozen=True)
class EnvDescription:
    """Spaces and capabilities of a shard's environments, as the head needs them."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    metadata: Mapping[str, Any]
    render_mode: str | None
    spec: EnvSpec | None
    autoreset_mode: AutoresetMode
    partial: bool
    """Whether some of the environments can be stepped while the others wait."""
    maskable: bool
    """Whether some of the environments can be reset, with options, while the others wait."""
    observation_mode: ObservationMode
    observation_spaces: tuple[gym.Space[Any], ...]
    """One per environment; all the same object unless they may differ."""


class Slot(NamedTuple):
    """The columns that one step fills: a row per environment."""

    obs: list[Column]
    reward: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]

    @classmethod
    def empty(cls, layout: Layout, n: int) -> Slot:
        """Allocate a slot for ``n`` environments."""
        return cls(layout.empty(n), np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_))

    def buffers(self, layout: Layout, rows: slice | npt.NDArray[np.intp]) -> list[Column]:
        """Return the array columns of some rows, in the order in which they travel."""
        columns = [self.obs[k][rows] for k in layout.arrays]
        return [*columns, self.reward[rows], self.terminated[rows], self.truncated[rows]]


class EnvRaised(Exception):
    """An environment raised; ``__cause__`` is what it raised."""

    def __init__(self, env: int, doing: str, note: str = "") -> None:
        super().__init__(env, doing)
        self.env = env
        """Its row in the shard."""
        self.doing = doing
        self.note = note
        """Why the environment must not be rebuilt again; empty if it may be."""
        self.infos: Rows = []
        """Infos of the environments that were stepped before it."""
        self.left: list[int] = []
        """Rows that were still to be stepped."""


class Engine(Protocol):
    """A group of environments that are stepped together."""

    num_envs: int
    description: EnvDescription

    def skip_action_checks(self) -> None:
        """Let the environments skip their own check of actions: the caller has checked them."""

    def reset(
        self,
        slot: Slot,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None,
        mask: npt.NDArray[np.bool_] | None,
    ) -> Infos:
        """Reset all environments, or those of ``mask``, into ``slot``."""

    def step(self, actions: Sequence[Column], slot: Slot, rows: Sequence[int] | None) -> Infos:
        """Step all environments, or those of ``rows``, into ``slot``.

        The infos are numbered by the position of an environment in ``rows``.
        """

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method, or read an attribute, of every environment."""

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of every environment."""

    def render(self) -> list[Any]:
        """Return an image of every environment."""

    def close(self) -> None:
        """Close every environment."""


class PrecheckedActions:
    """Replaces ``action_space.contains`` and accepts an action that was checked before.

    Most environments check every action, which takes a tenth of a CartPole step. The very object
    in :attr:`checked` passes at once; anything else is checked by the space.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self._space = space
        self.checked: Any = None
        """The next action, already checked."""

    def __call__(self, x: Any) -> bool:
        """Return whether the space contains ``x``."""
        return x is self.checked or self._space.contains(x)


def skip_action_checks(env: Any) -> PrecheckedActions:
    """Give an environment a copy of its action space with :class:`PrecheckedActions`.

    The environment keeps its own check if a wrapper has another action space, or if its space
    cannot be replaced.
    """
    contains = PrecheckedActions(env.action_space)
    inner = env.unwrapped
    if getattr(inner, "action_space", None) == env.action_space:
        space = copy.copy(inner.action_space)
        space.contains = contains
        with contextlib.suppress(AttributeError):  # a property
            inner.action_space = space
    return contains
