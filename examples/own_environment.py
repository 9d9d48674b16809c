"""Run your own environment and wrapper on the workers.

Pass the class, or any function that creates one environment; ``wrappers`` are applied to each
environment on its worker. Code that is defined in the script you run, as here, is sent to the
workers. Your modules must be importable there: install them, or see "No module named …" in
docs/hpc.md.

    python examples/own_environment.py --length 12
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

import clusterenv

Position = npt.NDArray[np.float32]


class Corridor(gym.Env[Position, np.int64]):
    """Walk from the middle of a corridor to its right end; the wind blows to the left.

    Parameters
    ----------
    length
        Steps from one end to the other.
    wind
        Probability that a step goes left, regardless of the action.
    """

    def __init__(self, length: int = 8, wind: float = 0.4) -> None:
        self.length = length
        self.wind = wind
        self.observation_space = gym.spaces.Box(0, length, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Position, dict[str, Any]]:
        super().reset(seed=seed)  # seeds self.np_random; use no other source of randomness
        self.position = self.length // 2
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Position, float, bool, bool, dict[str, Any]]:
        blown = self.np_random.random() < self.wind
        self.position += 1 if action == 1 and not blown else -1
        terminated = self.position in (0, self.length)
        return self._observe(), float(self.position == self.length), terminated, False, {}

    def _observe(self) -> Position:
        return np.array([self.position], np.float32)

    def process(self) -> int:
        """Return the id of the process that runs this environment."""
        return os.getpid()


class Scaled(gym.ObservationWrapper[Position, np.int64, Position]):
    """Scales observations to -1 (left end) … 1 (right end)."""

    def __init__(self, env: gym.Env[Position, np.int64]) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def observation(self, observation: Position) -> Position:
        length: int = self.get_wrapper_attr("length")
        return 2 * observation / np.float32(length) - 1


def walk(envs: clusterenv.ClusterEnv, right: float, steps: int) -> list[float]:
    """Go right with this probability; return the returns of all finished episodes."""
    rng = np.random.default_rng(1)
    returns: list[float] = []
    envs.reset(seed=1)
    for _ in range(steps):
        actions = (rng.random(envs.num_envs) < right).astype(np.int64)
        _, reward, terminated, truncated, _ = envs.step(actions)
        returns += reward[
            terminated | truncated
        ].tolist()  # only the last step of an episode has a reward
    return returns


def main() -> None:
    """Walk with several policies and print how often they arrive."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--cluster", default="local", help="anything that clusterenv.connect takes")
    args = parser.parse_args()

    envs = clusterenv.make_vec(
        Corridor,
        args.num_envs,
        cluster=args.cluster,
        wrappers=[Scaled, functools.partial(gym.wrappers.TimeLimit, max_episode_steps=50)],
        length=args.length,  # further arguments are passed to the environment
    )
    with envs:
        print(f"{args.num_envs} environments in {len(set(envs.call('process')))} processes")
        print(f"observations: {envs.single_observation_space}")
        print("goes right  episodes  arrives")
        for right in (0.5, 0.7, 1.0):
            returns = walk(envs, right, args.steps)
            print(f"{right:>10.0%}{len(returns):>10,}{np.mean(returns):>9.0%}")
        envs.set_attr("wind", 0.0)
        print(f"without wind: {np.mean(walk(envs, 1.0, args.steps)):.0%}")


if __name__ == "__main__":
    main()
