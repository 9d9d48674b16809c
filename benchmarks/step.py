"""Steps per second with a policy at the head: Gymnasium's vector environments and ClusterEnv.

All ways run in turn, several times, in this one process and on this one machine; the table
shows the median of each and its ratio to ``AsyncVectorEnv``. A second table shows what one
call costs: an actor method through Dask, and the same question over a shard's connection.

    python benchmarks/step.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import clusterenv

Act = Callable[[np.ndarray], np.ndarray]


def tanh_policy(env_id: str) -> Act:
    """Return a 64-64 tanh network that samples actions by the Gumbel trick."""
    env = gym.make(env_id)
    sizes = (env.observation_space.shape[0], 64, 64, int(env.action_space.n))
    env.close()
    net = nn.Sequential(
        nn.Linear(sizes[0], sizes[1]),
        nn.Tanh(),
        nn.Linear(sizes[1], sizes[2]),
        nn.Tanh(),
        nn.Linear(sizes[2], sizes[3]),
    )

    def act(obs: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            logits = net(torch.from_numpy(obs))
            noise = torch.empty_like(logits).exponential_().log_()
            return (logits - noise).argmax(-1).numpy()

    return act


def stepping(envs: gym.vector.VectorEnv, act: Act, seconds: float) -> float:
    """Return steps per second of ``step``."""
    obs, _ = envs.reset(seed=1)
    for _ in range(20):
        obs, *_ = envs.step(act(obs))
    steps, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        obs, *_ = envs.step(act(obs))
        steps += envs.num_envs
    return steps / spent


def streaming(envs: clusterenv.ClusterEnv, act: Act, seconds: float) -> float:
    """Return steps per second of ``send`` and ``recv``."""
    envs.async_reset(seed=1)
    steps, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        obs, *_, info = envs.recv()
        envs.send(act(obs), info["env_id"])
        steps += len(obs)
    return steps / spent


def measure(env_id: str, num_envs: int, workers: int, rounds: int, seconds: float) -> None:
    act = tanh_policy(env_id)
    factories = [lambda: gym.make(env_id)] * num_envs
    rates: dict[str, list[float]] = {
        "SyncVectorEnv, one process": [],
        "AsyncVectorEnv": [],
        "ClusterEnv.step": [],
        "ClusterEnv.send/recv": [],
    }
    for _ in range(rounds):
        for name, make in (
            ("SyncVectorEnv, one process", gym.vector.SyncVectorEnv),
            ("AsyncVectorEnv", gym.vector.AsyncVectorEnv),
        ):
            envs = make(factories)
            rates[name].append(stepping(envs, act, seconds))
            envs.close()
        with clusterenv.make_vec(env_id, num_envs, shards=workers) as cluster_envs:
            rates["ClusterEnv.step"].append(stepping(cluster_envs, act, seconds))
            rates["ClusterEnv.send/recv"].append(streaming(cluster_envs, act, seconds))
    base = rates["AsyncVectorEnv"]
    print(
        f"\n| {env_id}, {num_envs} environments, {workers} workers | steps/s | × AsyncVectorEnv |"
    )
    print("|---|---:|---:|")
    for name, values in rates.items():
        ratio = statistics.median(value / b for value, b in zip(values, base, strict=True))
        print(f"| {name} | {statistics.median(values):,.0f} | {ratio:.2f} |")


class Echo:
    """An actor that answers with an observation-sized array."""

    def __init__(self) -> None:
        self.obs = np.zeros((16, 8), np.float32)

    async def step(self, actions: np.ndarray) -> np.ndarray:
        return self.obs


class Still(gym.Env):
    """An environment that does nothing, so that only the way there and back is measured."""

    observation_space = gym.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.obs = np.zeros(8, np.float32)
        return self.obs, {}

    def step(self, action: int) -> tuple:
        return self.obs, 0.0, False, False, {}


def round_trips(calls: int = 1000) -> None:
    client = clusterenv.connect("local", n_workers=2)
    actions = np.zeros(16, np.int64)
    actors = [
        client.submit(Echo, actor=True, workers=[worker], pure=False)
        for worker in client.nthreads()
    ]
    handles = [actor.result() for actor in actors]
    envs = clusterenv.make_vec(Still, 32, cluster=client)
    envs.reset(seed=1)
    both = np.zeros(32, np.int64)

    def ask_actors() -> None:
        for answer in [handle.step(actions) for handle in handles]:
            answer.result()

    print("\n| asking two shards and waiting for both | wall, ms | CPU of the head, ms |")
    print("|---|---:|---:|")
    for name, ask in (
        ("Dask actor calls", ask_actors),
        ("connections (and 16 Python calls per shard)", lambda: envs.step(both)),
    ):
        for _ in range(50):
            ask()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            ask()
        wall = (time.perf_counter() - began) / calls
        print(f"| {name} | {1e3 * wall:.2f} | {1e3 * (time.process_time() - cpu) / calls:.2f} |")
    envs.close()
    client.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for env_id in ("LunarLander-v3", "CartPole-v1"):
        measure(env_id, args.num_envs, args.workers, args.rounds, args.seconds)
    round_trips()


if __name__ == "__main__":
    main()
