"""Train a Stable-Baselines3 algorithm with environments on a cluster.

The algorithm is unchanged: ``SB3VecEnv`` gives a ``ClusterEnv`` the interface of a
Stable-Baselines3 ``VecEnv``.

    pip install stable-baselines3
    python examples/sb3.py --env CartPole-v1 --total-steps 50000
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO

import clusterenv


def main() -> None:
    """Train PPO and print its progress."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--cluster", default="local", help="anything that clusterenv.connect takes")
    args = parser.parse_args()
    torch.set_num_threads(1)

    envs = clusterenv.SB3VecEnv(
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
