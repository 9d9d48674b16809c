"""How fast the environments of the experiments are, in steps per second of CPU time.

    python -m benchmarks.environments
    python -m benchmarks.environments clusterenv/ZipfGridworld-v0 --num-envs 1 16
    python -m benchmarks.environments --pictures docs/images

Native vector environments in this process, without a cluster, under random actions. CPU time
of all threads is counted and not the clock, so that other processes on the machine disturb less.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import pipelines.envs  # noqa: F401 - registers them

ENVS = ("clusterenv/ZipfGridworld-v0", "clusterenv/FootballEmptyGoalClose-v0")
ACTIONS = 64  # drawn beforehand


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("env", nargs="*", default=ENVS)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--pictures", type=Path, help="draw each there, and measure nothing")
    args = parser.parse_args()
    if args.pictures is not None:
        for env_id in args.env:
            draw(env_id, args.pictures)
        return
    print("| environment | num_envs | steps per CPU second | bytes of an observation |")
    print("|---|---|---|---|")
    for env_id, num_envs in itertools.product(args.env, args.num_envs):
        envs = gym.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point")
        envs.reset(seed=1)
        envs.action_space.seed(1)
        actions = [envs.action_space.sample() for _ in range(ACTIONS)]
        rates = [rate(envs, actions, args.seconds) for _ in range(args.rounds)]
        size = math.prod(envs.single_observation_space.shape or ())
        print(f"| {env_id} | {num_envs} | {statistics.median(rates):,.0f} | {size:,} |")
        envs.close()


def rate(envs: gym.vector.VectorEnv[Any, Any, Any], actions: list[Any], seconds: float) -> float:
    """Return the steps of all environments per second of CPU time."""
    steps, began = 0, time.process_time()
    for action in itertools.cycle(actions):
        envs.step(action)
        steps += envs.num_envs
        spent = time.process_time() - began
        if spent >= seconds:
            return steps / spent
    raise AssertionError("cycle() does not end")


def draw(env_id: str, directory: Path) -> None:
    """Write a picture of the environment after a few steps."""
    import matplotlib.image

    env = gym.make(env_id, render_mode="rgb_array")
    env.reset(seed=3)
    for _ in range(4):
        env.step(5)
    name = env_id.split("/")[-1].lower()
    matplotlib.image.imsave(directory / f"{name}.png", np.asarray(env.render()))
    env.close()


if __name__ == "__main__":
    main()
