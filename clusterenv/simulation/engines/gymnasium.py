"""The default engine: steps any Gymnasium environments one by one, straight into columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from clusterenv.data.infos import Rows, pack
from clusterenv.data.observation_mode import check_same_spaces
from clusterenv.data.spaces import Column, Layout
from clusterenv.simulation.engines.base import (
    EnvDescription,
    EnvRaised,
    Infos,
    PrecheckedActions,
    Recipe,
    Slot,
    skip_action_checks,
)

__all__ = ["GymnasiumEngine"]


class GymnasiumEngine:
    """Steps ``count`` environments, beginning at global index ``first``.

    Returns the same values as ``SyncVectorEnv``, without its list of observations, stacking and
    copy of the result.
    """

    def __init__(self, recipe: Recipe, first: int, count: int) -> None:
        self.num_envs = count
        self.check_final: Callable[[Any], None] | None = None
        """Called with the final observation of an episode; raises if it is not in its space."""
        self._recipe, self._first = recipe, first
        self._envs: list[gym.Env[Any, Any]] = []
        try:
            for index in range(first, first + count):
                self._envs.append(_make(recipe, index))
            self._check_spaces()
        except BaseException:
            self.close()
            raise
        env = self._envs[0]
        # SAME_STEP by default, so that no step is spent on resetting.
        mode = recipe.autoreset_mode or AutoresetMode.SAME_STEP
        self.description = EnvDescription(
            observation_space=env.observation_space,
            action_space=env.action_space,
            metadata={**env.metadata, "autoreset_mode": mode},
            render_mode=env.render_mode,
            spec=env.spec,
            autoreset_mode=mode,
            partial=True,
            maskable=True,
            observation_mode=recipe.observation_mode,
            observation_spaces=(
                tuple(each.observation_space for each in self._envs)
                if recipe.observation_mode == "different"
                else (env.observation_space,) * count
            ),
        )
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._disabled = mode is AutoresetMode.DISABLED
        self._write = Layout(env.observation_space).write
        self._action_rows = Layout(env.action_space).rows
        self._prechecked: list[PrecheckedActions] = []
        self._ended = [False] * count

    def _check_spaces(self) -> None:
        check_same_spaces(
            self._recipe.observation_mode,
            [f"environment {self._first + row}" for row in range(len(self._envs))],
            [env.observation_space for env in self._envs],
            [env.action_space for env in self._envs],
        )

    def skip_action_checks(self) -> None:
        if not self._prechecked:
            self._prechecked = [skip_action_checks(env) for env in self._envs]

    def reset(
        self,
        slot: Slot,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None,
        mask: npt.NDArray[np.bool_] | None,
    ) -> Infos:
        rows = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        infos: Rows = []
        row = 0
        try:
            for row in rows:
                value, info = self._envs[row].reset(seed=seeds[row], options=options)
                self._write(slot.obs, row, value)
                slot.reward[row] = 0.0
                slot.terminated[row] = slot.truncated[row] = self._ended[row] = False
                if info:
                    infos.append((row, info))
        except BaseException as error:  # sys.exit() too
            raise EnvRaised(row, "reset") from error
        return pack(infos) if infos else None

    def step(self, actions: Sequence[Column], slot: Slot, rows: Sequence[int] | None) -> Infos:
        envs, ended, write, prechecked = self._envs, self._ended, self._write, self._prechecked
        obs, rewards, terminations, truncations = slot
        steps: Iterable[tuple[int, Any]] = (
            enumerate(self._action_rows(actions))
            if rows is None
            else zip(rows, self._action_rows(actions), strict=True)
        )
        infos: Rows = []
        row = 0
        doing = "step"
        try:
            for row, action in steps:
                env = envs[row]
                if prechecked:
                    prechecked[row].checked = action
                if ended[row]:
                    if self._disabled:
                        raise gym.error.ResetNeeded(
                            "the episode is over; autoreset_mode is DISABLED"
                        )
                    value, info = env.reset()
                    rewards[row] = 0.0
                    terminations[row] = truncations[row] = ended[row] = False
                else:
                    value, rewards[row], terminated, truncated, info = env.step(action)
                    terminations[row] = terminated
                    truncations[row] = truncated
                    if terminated or truncated:
                        if self._same_step:
                            if self.check_final is not None:
                                self.check_final(value)
                            # The reset may reuse the environment's own arrays.
                            final = {"final_obs": value, "final_info": info}
                            infos.append((row, _snapshot(final)))
                            doing = "reset"
                            value, info = env.reset()
                            write(obs, row, value)
                            doing = "step"
                            if info:
                                infos.append((row, info))
                            continue
                        ended[row] = True
                write(obs, row, value)
                if info:
                    infos.append((row, info))
        except BaseException as error:  # sys.exit() too
            fault = EnvRaised(row, doing)
            every = range(self.num_envs) if rows is None else rows
            fault.infos, fault.left = infos, list(every[list(every).index(row) + 1 :])
            raise fault from error
        if rows is not None and infos:
            position = {row: k for k, row in enumerate(rows)}
            infos = [(position[row], info) for row, info in infos]
        return pack(infos) if infos else None

    def rebuild(self, row: int, seed: int | None, obs: list[Column]) -> dict[str, Any]:
        """Replace an environment, reset it into its row of ``obs`` and return the info."""
        try:
            self._envs[row].close()
        except Exception:
            pass  # it has failed already
        self._envs[row] = env = _make(self._recipe, self._first + row)
        if self._prechecked:
            self._prechecked[row] = skip_action_checks(env)
        value, info = env.reset(seed=seed)
        self._write(obs, row, value)
        return info

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        results = []
        for row, env in enumerate(self._envs):
            try:
                value = env.get_wrapper_attr(name)
                results.append(value(*args, **kwargs) if callable(value) else value)
            except Exception as error:
                raise EnvRaised(row, f"call({name!r})") from error
        return results

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        for env, value in zip(self._envs, values, strict=True):
            env.set_wrapper_attr(name, value)

    def render(self) -> list[Any]:
        return self.call("render", (), {})

    def close(self) -> None:
        problem: Exception | None = None
        for env in self._envs:
            try:
                env.close()
            except Exception as error:
                problem = error  # after the others are closed
        if problem is not None:
            raise problem


def _snapshot(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _snapshot(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(map(_snapshot, value))
    return value.copy() if isinstance(value, np.ndarray) else value


def _make(recipe: Recipe, index: int) -> gym.Env[Any, Any]:
    source = recipe.env
    if isinstance(source, (str, EnvSpec)):
        env: gym.Env[Any, Any] = gym.make(source, **recipe.kwargs)
    else:
        factory = source[index] if isinstance(source, tuple) else source
        env = factory(**recipe.kwargs)
    if not isinstance(env, gym.Env):
        raise TypeError(
            f"the factory of environment {index} returned {type(env).__name__}, "
            "expected a gymnasium.Env: make_vec(lambda: gymnasium.make('CartPole-v1'), 8)"
        )
    for wrapper in recipe.wrappers:
        env = wrapper(env)
    return env
