"""Steps per second of Stable-Baselines3's ``SubprocVecEnv``.

It has one process per environment, so 32 of them; they are forked, as its default start method
imports torch in each, which takes minutes on two cores and makes no step faster. The 64-64 tanh
policy acts at the head, on all observations at once, and nothing is kept of the steps: the
algorithms' own policies and buffers, which cost more, are left out.

    python -m benchmarks.peers.sb3 --seconds 5
"""

from __future__ import annotations

import gymnasium as gym
import torch
from stable_baselines3.common.vec_env import SubprocVecEnv

from benchmarks.peers import common


def main() -> None:
    seconds = common.seconds(__doc__)
    torch.set_num_threads(1)
    count = common.WORKERS * common.ENVS_PER_WORKER
    envs = SubprocVecEnv([lambda: gym.make(common.ENV)] * count, start_method="fork")
    act = common.sampler()
    envs.seed(1)
    obs = envs.reset()

    def step() -> int:
        nonlocal obs
        obs, _, _, _ = envs.step(act(obs))
        return count

    common.measure("Stable-Baselines3 SubprocVecEnv", "stable-baselines3", step, seconds)
    envs.close()


if __name__ == "__main__":
    main()
