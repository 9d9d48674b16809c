"""The engine for environments with a vector entry point of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from clusterenv.data.infos import VectorInfo
from clusterenv.data.spaces import Column, Layout
from clusterenv.errors import ConfigError
from clusterenv.simulation.engines.base import (
    EnvDescription,
    EnvRaised,
    Infos,
    PrecheckedActions,
    Recipe,
    Slot,
    skip_action_checks,
)

__all__ = ["NativeEngine", "batch_parts", "vector_spec", "write_batch"]


class NativeEngine:
    """Gymnasium's ``vector_entry_point`` of a registered environment.

    One random number generator usually serves all environments of such a group, so
    a stream depends on how environments are sharded: each shard is seeded with the
    seed of its first environment.
    """

    def __init__(self, recipe: Recipe, first: int, count: int) -> None:
        spec = vector_spec(recipe, "native")
        if spec.vector_entry_point is None:
            raise ConfigError(
                f"engine='native': {spec.id} has no vector entry point; use engine='gymnasium'"
            )
        env = gym.make_vec(
            spec, num_envs=count, vectorization_mode="vector_entry_point", **recipe.kwargs
        )
        self.num_envs = count
        self._env: VectorEnv[Any, Any, Any] = env
        mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if recipe.autoreset_mode not in (mode, None):
            env.close()
            raise ConfigError(
                f"engine='native': {spec.id} resets by {mode}, not by {recipe.autoreset_mode}; "
                f"pass autoreset_mode={mode}"
            )
        self.description = EnvDescription(
            observation_space=env.single_observation_space,
            action_space=env.single_action_space,
            metadata=dict(env.metadata),
            render_mode=env.render_mode,
            spec=spec,
            autoreset_mode=mode,
            partial=False,
            maskable=mode is AutoresetMode.DISABLED,
            observation_mode=recipe.observation_mode,
            observation_spaces=(env.single_observation_space,) * count,
        )
        self._space = env.single_observation_space
        self._prechecked: PrecheckedActions | None = None
        self._nest_action = Layout(env.single_action_space).nest

    def skip_action_checks(self) -> None:
        self._prechecked = self._prechecked or skip_action_checks(self._env)

    def reset(
        self,
        slot: Slot,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None,
        mask: npt.NDArray[np.bool_] | None,
    ) -> Infos:
        if mask is not None:
            options = {**(options or {}), "reset_mask": mask}
        try:
            obs, info = self._env.reset(seed=seeds[0], options=options)
        except Exception as error:
            raise EnvRaised(0, "reset") from error
        write_batch(slot.obs, self._space, obs)
        where = slice(None) if mask is None else mask
        slot.reward[where] = 0.0
        slot.terminated[where] = slot.truncated[where] = False
        return VectorInfo(info) if info else None

    def step(self, actions: Sequence[Column], slot: Slot, rows: Sequence[int] | None) -> Infos:
        nested = self._nest_action(actions)
        if self._prechecked is not None:
            self._prechecked.checked = nested
        try:
            obs, reward, terminated, truncated, info = self._env.step(nested)
        except Exception as error:
            raise EnvRaised(0, "step") from error
        write_batch(slot.obs, self._space, obs)
        slot.reward[:] = reward
        slot.terminated[:] = terminated
        slot.truncated[:] = truncated
        return VectorInfo(info) if info else None

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        value = getattr(self._env, name)
        result = value(*args, **kwargs) if callable(value) else value
        if isinstance(result, (list, tuple)) and len(result) == self.num_envs:
            return list(result)
        return [result] * self.num_envs

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        if any(value is not values[0] and value != values[0] for value in values):
            raise ConfigError(
                f"engine='native' keeps one {name!r} for all environments of a shard; "
                f"pass one value: set_attr({name!r}, value)"
            )
        setattr(self._env, name, values[0])

    def render(self) -> list[Any]:
        return list(self._env.render() or [None] * self.num_envs)

    def close(self) -> None:
        self._env.close()


def vector_spec(recipe: Recipe, engine: str) -> EnvSpec:
    """Return the spec of a recipe for an engine that makes its environments itself."""
    if not isinstance(recipe.env, EnvSpec):
        raise ConfigError(
            f"engine={engine!r} needs an id or a spec, got {recipe.env!r}: "
            f"make_vec('CartPole-v1', 8, engine={engine!r})"
        )
    if recipe.wrappers:
        raise ConfigError(
            f"engine={engine!r} steps all environments at once and takes no wrappers; "
            "wrap the vector environment instead: gymnasium.wrappers.vector"
        )
    return recipe.env


def write_batch(columns: Sequence[Column], space: gym.Space[Any], batch: Any) -> None:
    """Copy a batched observation into columns."""
    if isinstance(batch, np.ndarray):
        if batch.dtype is columns[0].dtype and batch.shape == columns[0].shape:
            columns[0][...] = batch  # faster than copyto, which checks the cast
            return
        np.copyto(columns[0], batch, casting="same_kind")
        return
    for column, part in zip(columns, batch_parts(space, batch), strict=True):
        np.copyto(column, part, casting="same_kind")


def batch_parts(space: gym.Space[Any], batch: Any) -> Iterator[Any]:
    """Yield the arrays of a batched observation, in the order of its columns."""
    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items():
            yield from batch_parts(child, batch[key])
    elif isinstance(space, spaces.Tuple):
        for position, child in enumerate(space.spaces):
            yield from batch_parts(child, batch[position])
    else:
        yield batch
