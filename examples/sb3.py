"""Stable-Baselines3 learns on environments that live on a cluster.

``SB3VecEnv`` gives a ``ClusterEnv`` the face that Stable-Baselines3 knows; the algorithm is used
as it is. Seeds, observations, rewards and terminal observations are those of SB3's own
``DummyVecEnv``, to the last bit.

    pip install stable-baselines3
    python examples/sb3.py --env CartPole-v1 --total-steps 50000
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env.base_vec_env import (
    VecEnv,
    VecEnvIndices,
    VecEnvObs,
    VecEnvStepReturn,
)

import clusterenv


class SB3VecEnv(VecEnv):
    """A ``ClusterEnv`` made with ``autoreset_mode=SAME_STEP``, for Stable-Baselines3."""

    def __init__(self, envs: clusterenv.ClusterEnv) -> None:
        if envs.metadata["autoreset_mode"] is not gym.vector.AutoresetMode.SAME_STEP:
            raise ValueError("SB3 resets in the same step: make_vec(…, autoreset_mode='SameStep')")
        self.envs = envs
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> VecEnvObs:
        if any(options != self._options[0] for options in self._options):
            raise ValueError("all environments of a ClusterEnv are reset with the same options")
        obs, info = self.envs.reset(seed=self._seeds, options=self._options[0] or None)
        self.reset_infos = one_each(info, self.num_envs)
        self._reset_seeds()
        self._reset_options()
        return obs  # type: ignore[no-any-return]

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        self.actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        obs, reward, terminated, truncated, info = self.envs.step(self.actions)
        infos = one_each(info, self.num_envs)
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
        except clusterenv.errors.EnvError as error:  # has_attr() waits for this one
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
            raise NotImplementedError("a ClusterEnv calls methods of all its environments")
        return list(self.envs.call(method_name, *args, **kwargs))

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        names = self.envs.call("__str__")  # "<Monitor<TimeLimit<…": the environments are elsewhere
        return [f"<{wrapper_class.__name__}<" in names[env] for env in self._get_indices(indices)]

    def get_images(self) -> Sequence[npt.NDArray[Any] | None]:
        return self.envs.render()


def one_each(info: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """Take Gymnasium's info of a vector apart: one dictionary for each environment."""
    infos: list[dict[str, Any]] = [{} for _ in range(n)]
    for key, values in info.items():
        if f"_{key}" not in info:  # itself a mask
            continue
        parts = one_each(values, n) if isinstance(values, dict) else values
        for env in np.flatnonzero(info[f"_{key}"]):
            infos[env][key] = parts[env]
    return infos


def main() -> None:
    """Train PPO and print how it learns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--cluster", default="local", help="whatever clusterenv.connect takes")
    args = parser.parse_args()
    torch.set_num_threads(1)

    envs = SB3VecEnv(
        clusterenv.make_vec(
            args.env,
            args.num_envs,
            cluster=args.cluster,
            autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
            wrappers=[gym.wrappers.RecordEpisodeStatistics],  # the workers need no SB3
        )
    )
    model = PPO("MlpPolicy", envs, n_steps=128, batch_size=256, learning_rate=1e-3, seed=1)
    print("   steps  mean return of the last 100 episodes")
    while model.num_timesteps < args.total_steps:
        model.learn(max(1, args.total_steps // 10), reset_num_timesteps=False)
        returns = [episode["r"] for episode in model.ep_info_buffer or ()]
        print(f"{model.num_timesteps:>8,}  {np.mean(returns):.1f}")
    envs.close()


if __name__ == "__main__":
    main()
