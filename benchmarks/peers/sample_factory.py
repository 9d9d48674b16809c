"""Steps per second of Sample Factory's sampler, without its learner.

Two rollout workers and one policy worker, which acts for both with the 64-64 tanh policy; without
recurrence and without normalization of observations. Batched sampling, 128 steps a trajectory, each
worker with one vector of 16 environments stepped together. Of the settings tried, once each on a
busy machine, this took the least CPU time per step; the others were single environments, in one
group or in its default of two that take turns, and two vectors of 8 that take turns.
It needs Gymnasium before 1.0, where the environment is LunarLander-v2; v3 resets otherwise.

    python -m benchmarks.peers.sample_factory --seconds 5
"""

from __future__ import annotations

import tempfile
from typing import Any

import gymnasium as gym
import numpy as np
from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI
from sample_factory.algo.utils.env_info import obtain_env_info_in_a_separate_process
from sample_factory.algo.utils.rl_utils import samples_per_trajectory
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env

from benchmarks.peers import common

ENV = "LunarLander-v2"


class Vector(gym.Env):
    """A worker's environments, in the form that Sample Factory has for many agents."""

    is_multiagent = True

    def __init__(self, env: str, num_agents: int) -> None:
        self.num_agents = num_agents
        self.envs = gym.vector.SyncVectorEnv([lambda: gym.make(env)] * num_agents)
        self.observation_space = self.envs.single_observation_space
        self.action_space = self.envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        obs, _ = self.envs.reset(seed=seed)
        return obs, {}

    def step(self, action: Any) -> tuple:
        obs, reward, terminated, truncated, _ = self.envs.step(np.asarray(action))
        return obs, reward.astype(np.float32), terminated, truncated, {}

    def close(self) -> None:
        self.envs.close()


def make_envs(*_: Any, **__: Any) -> Vector:
    return Vector(ENV, common.ENVS_PER_WORKER)


def main() -> None:
    seconds = common.seconds(__doc__)
    register_env(ENV, make_envs)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            f"--env={ENV}",
            "--device=cpu",
            f"--train_dir={folder}",
            f"--num_workers={common.WORKERS}",
            "--num_envs_per_worker=1",
            "--worker_num_splits=1",
            "--batched_sampling=True",
            f"--rollout={common.HORIZON}",
            "--use_rnn=False",
            "--normalize_input=False",
            "--nonlinearity=tanh",
            *("--encoder_mlp_layers", "64", "64"),
        ]
        parser, _ = parse_sf_args(arguments)
        settings = parse_full_cfg(parser, arguments)
        sampler = SyncSamplingAPI(settings, obtain_env_info_in_a_separate_process(settings))
        sampler.start()

        def trajectories() -> int:
            return int(samples_per_trajectory(sampler.get_trajectories_sync()))

        common.measure("Sample Factory sampler", "sample-factory", trajectories, seconds)
        sampler.stop()


if __name__ == "__main__":
    main()
