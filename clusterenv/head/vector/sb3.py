"""A ``ClusterEnv`` as Stable-Baselines3 knows vector environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from clusterenv.errors import ConfigError, EnvError
from clusterenv.head.vector.cluster_env import ClusterEnv

try:
    from stable_baselines3.common.vec_env.base_vec_env import (
        VecEnv,
        VecEnvIndices,
        VecEnvObs,
        VecEnvStepReturn,
    )
except ImportError as error:
    raise ImportError(
        "clusterenv.SB3VecEnv needs Stable-Baselines3: pip install stable-baselines3"
    ) from error

__all__ = ["SB3VecEnv"]


class SB3VecEnv(VecEnv):
    """Gives a ``ClusterEnv`` to an algorithm of Stable-Baselines3.

    Seeds, observations, rewards, infos and terminal observations are those of SB3's own
    ``DummyVecEnv``, to the last bit. Closing it closes the ``ClusterEnv``.

    Parameters
    ----------
    envs
        Made with ``autoreset_mode="SameStep"``, as SB3 resets. SB3 logs the returns of episodes
        if the environments are wrapped to record them, with its own ``Monitor`` or with
        ``gymnasium.wrappers.RecordEpisodeStatistics``, for which the workers need no SB3.

    Raises
    ------
    ConfigError
        If the environments reset in another way.

    Examples
    --------
    ::

        envs = clusterenv.make_vec("CartPole-v1", 8, autoreset_mode="SameStep")
        model = stable_baselines3.PPO("MlpPolicy", SB3VecEnv(envs))
        model.learn(50_000)
    """

    def __init__(self, envs: ClusterEnv) -> None:
        mode = envs.metadata["autoreset_mode"]
        if mode is not AutoresetMode.SAME_STEP:
            raise ConfigError(
                f"Stable-Baselines3 resets in the same step, and autoreset_mode is {mode}: "
                "make_vec(…, autoreset_mode='SameStep')"
            )
        self.envs = envs
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> VecEnvObs:
        if any(options != self._options[0] for options in self._options):
            raise ConfigError(
                "a ClusterEnv resets all environments with the same options, got "
                f"{self._options}: set_options({{…}})"
            )
        obs, info = self.envs.reset(seed=self._seeds, options=self._options[0] or None)
        self.reset_infos = _one_each(info, self.num_envs)
        self._reset_seeds()
        self._reset_options()
        return obs  # type: ignore[no-any-return]

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        self.actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        obs, reward, terminated, truncated, info = self.envs.step(self.actions)
        infos = _one_each(info, self.num_envs)
        done = terminated | truncated
        for env in np.flatnonzero(done):  # obs and info are the next episode's already
            self.reset_infos[env] = infos[env]
            final = self.reset_infos[env].pop("final_obs")
            infos[env] = {**infos[env].pop("final_info"), "terminal_observation": final}
        for one, cut in zip(infos, truncated & ~terminated, strict=True):
            one["TimeLimit.truncated"] = bool(cut)
        return obs, reward.astype(np.float32), done, infos

    def close(self) -> None:
        self.envs.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        try:
            values = self.envs.get_attr(attr_name)
        except EnvError as error:  # has_attr() waits for this one
            raise AttributeError(str(error)) from error
        return [values[env] for env in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        values = [value] * self.num_envs
        if indices is not None:
            values = self.get_attr(attr_name)
            for env in self._get_indices(indices):
                values[env] = value
        self.envs.set_attr(attr_name, values)

    def env_method(
        self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any
    ) -> list[Any]:
        if indices is not None:
            raise NotImplementedError(
                f"a ClusterEnv calls methods of all its environments, not of {indices!r} alone: "
                f"env_method({method_name!r})"
            )
        return list(self.envs.call(method_name, *args, **kwargs))

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        names = self.envs.call("__str__")  # "<Monitor<TimeLimit<…": the environments are elsewhere
        return [f"<{wrapper_class.__name__}<" in names[env] for env in self._get_indices(indices)]

    def get_images(self) -> Sequence[npt.NDArray[Any] | None]:
        return self.envs.render()


def _one_each(info: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """Take Gymnasium's info of a vector apart: one dictionary for each environment."""
    infos: list[dict[str, Any]] = [{} for _ in range(n)]
    for key, values in info.items():
        if f"_{key}" not in info:  # itself a mask
            continue
        parts = _one_each(values, n) if isinstance(values, dict) else values
        for env in np.flatnonzero(info[f"_{key}"]):
            infos[env][key] = parts[env]
    return infos
