"""The engine for EnvPool's C++ environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from clusterenv.data.infos import VectorInfo
from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError
from clusterenv.simulation.engines.base import EnvDescription, EnvRaised, Infos, Recipe, Slot
from clusterenv.simulation.engines.native import vector_spec, write_batch

__all__ = ["EnvPoolEngine"]


class EnvPoolEngine:
    """A pool of EnvPool environments.

    EnvPool takes seeds only when a pool is made, so ``reset(seed=…)`` makes a new pool. The
    environment with global index ``i`` gets ``seed + i``, for any number of shards. The step
    after the end of an episode resets it and ignores the action.
    """

    def __init__(self, recipe: Recipe, first: int, count: int) -> None:
        self._envpool = _import()
        self.num_envs = count
        if isinstance(recipe.env, str):
            self._task = recipe.env
        else:
            self._task = vector_spec(recipe, "envpool").id
        if recipe.autoreset_mode not in (AutoresetMode.NEXT_STEP, None):
            raise ConfigError(
                f"engine='envpool' resets by NEXT_STEP only, got {recipe.autoreset_mode}; "
                "pass autoreset_mode=AutoresetMode.NEXT_STEP"
            )
        self._kwargs = {"num_threads": 1, **recipe.kwargs}
        self._pool = self._make(None)
        self._space = self._pool.observation_space
        if isinstance(self._pool.action_space, (spaces.Dict, spaces.Tuple)):
            self._pool.close()
            _unsupported(f"take actions of {self._pool.action_space}")
        self.description = EnvDescription(
            observation_space=self._space,
            action_space=self._pool.action_space,
            metadata={"autoreset_mode": AutoresetMode.NEXT_STEP},
            render_mode=None,
            spec=None,
            autoreset_mode=AutoresetMode.NEXT_STEP,
            partial=False,
            maskable=False,
            observation_mode=recipe.observation_mode,
            observation_spaces=(self._space,) * count,
        )

    def _make(self, seeds: Sequence[int] | None) -> Any:
        kwargs = dict(self._kwargs)
        if seeds is not None:
            kwargs["seed"] = list(seeds)
        return self._envpool.make(
            self._task, env_type="gymnasium", num_envs=self.num_envs, **kwargs
        )

    def skip_action_checks(self) -> None:
        pass  # EnvPool does not check actions

    def reset(
        self,
        slot: Slot,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None,
        mask: npt.NDArray[np.bool_] | None,
    ) -> Infos:
        if mask is not None or options:
            _unsupported("reset with options or a reset_mask")
        known = [seed for seed in seeds if seed is not None]
        if known:
            if len(known) != len(seeds):
                raise ConfigError("engine='envpool' needs a seed for every environment or none")
            self._pool.close()
            self._pool = self._make(known)
        try:
            obs, info = self._pool.reset()
        except Exception as error:
            raise EnvRaised(0, "reset") from error
        write_batch(slot.obs, self._space, obs)
        slot.reward[:] = 0.0
        slot.terminated[:] = slot.truncated[:] = False
        return _plain(info)

    def step(self, actions: Sequence[Column], slot: Slot, rows: Sequence[int] | None) -> Infos:
        try:
            obs, reward, terminated, truncated, info = self._pool.step(actions[0])
        except Exception as error:
            raise EnvRaised(0, "step") from error
        write_batch(slot.obs, self._space, obs)
        slot.reward[:] = reward
        slot.terminated[:] = terminated
        slot.truncated[:] = truncated
        return _plain(info)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        value = getattr(self._pool, name)
        return [value(*args, **kwargs) if callable(value) else value] * self.num_envs

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        _unsupported(f"set the attribute {name!r} of its environments")

    def render(self) -> list[Any]:
        _unsupported("render")

    def close(self) -> None:
        self._pool.close()


def _import() -> Any:
    try:
        import envpool
    except ImportError as error:
        raise ImportError(
            "engine='envpool' needs EnvPool on the workers: pip install 'clusterenv[envpool]'"
        ) from error
    return envpool


def _plain(info: dict[str, Any]) -> VectorInfo:
    info.pop("env_id", None)  # local to this pool; ClusterEnv reports global ones
    return VectorInfo(info)


def _unsupported(what: str) -> NoReturn:
    raise ConfigError(f"engine='envpool' cannot {what}; use engine='gymnasium'")
