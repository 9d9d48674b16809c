"""Step CartPole and LunarLander on a local cluster and print the rates.

Run it with ``make quickstart``, or ``python examples/quickstart.py --cluster tcp://host:8786``.
"""

from __future__ import annotations

import argparse
import time

import gymnasium as gym
import numpy as np

import clusterenv


def collect(envs: clusterenv.ClusterEnv, seconds: float) -> tuple[int, list[float]]:
    """Act randomly for some seconds; return the number of steps and the episodes' returns."""
    steps, returns = 0, []
    running = np.zeros(envs.num_envs)
    envs.action_space.seed(1)
    deadline = time.monotonic() + seconds
    envs.reset(seed=1)
    while time.monotonic() < deadline:
        _, reward, terminated, truncated, _ = envs.step(envs.action_space.sample())
        steps += envs.num_envs
        running += reward
        ended = terminated | truncated
        returns += running[ended].tolist()
        running[ended] = 0
    return steps, returns


def main() -> None:
    """Step both environments and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cluster", default="local", help="anything that clusterenv.connect takes")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0, help="per environment")
    args = parser.parse_args()

    client = clusterenv.connect(args.cluster)
    print(f"cluster {client.scheduler.address} with {len(client.nthreads())} workers")
    print("environment       envs     steps   steps/s  episodes  mean return")
    try:
        for env_id in ("CartPole-v1", "LunarLander-v3"):
            with clusterenv.make_vec(env_id, args.num_envs, cluster=client) as envs:
                steps, returns = collect(envs, args.seconds)
            mean = f"{np.mean(returns):.1f}" if returns else "–"
            rate = steps / args.seconds
            print(
                f"{env_id:<16}{args.num_envs:>6}{steps:>10,}{rate:>10,.0f}{len(returns):>10}{mean:>13}"
            )
    finally:
        client.close()


if __name__ == "__main__":
    gym.logger.min_level = gym.logger.ERROR
    main()
