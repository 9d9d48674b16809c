"""A collector of an environment whose rows show whether any is missing, doubled or misplaced."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from distributed import Client

import clusterenv
from clusterenv import Batch


class Counts(gym.Env[Any, Any]):
    """Observations count steps; a file makes it hang, raise or hold the GIL.

    They also hold a mark of the episode: two numbers, as one float32 is drawn twice in a few
    thousand episodes.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, orders: str = "") -> None:
        self.orders = orders

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.now, self.mark = 0, self.np_random.random(2)
        self.length = int(self.np_random.integers(5, 40))
        return self._observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.now += 1
        if self.now % 8 == 0 and self.orders and (orders := Path(self.orders)).exists():
            try:
                order = orders.read_text()
                orders.rename(f"{orders}.done")
            except FileNotFoundError:  # another environment was faster
                order = ""
            if order == "raise":
                raise RuntimeError("told to raise")
            if order == "hang":
                time.sleep(600)
            if order == "hold":
                sum(range(10**11))  # in C, Python's lock held
        return self._observe(), float(self.now), self.now == self.length, False, {}

    def _observe(self) -> Any:
        return np.array([self.now, *self.mark], np.float32)


def policy() -> clusterenv.policies.Policy:
    return clusterenv.policies.Categorical(torch.nn.Linear(3, 2))


def collecting(client: Client, **options: Any) -> clusterenv.Collector:
    kwargs = {"num_envs": 4, "shards": 2, "horizon": 16, "seed": 1, "cluster": client, **options}
    return clusterenv.Collector(Counts, policy(), **kwargs)


def check(batches: list[Batch]) -> None:
    """Raise unless each row is there once and episodes are contiguous within incarnations."""
    rows: dict[tuple[int, ...], list[tuple[int, tuple[float, ...], bool]]] = {}
    for batch in batches:
        names = ("env", "episode", "step", "obs", "terminated")
        env, episode, step, obs, terminated = (batch.flat(name) for name in names)
        for k in range(batch.num_rows):
            key = (batch.run, batch.shard, batch.incarnation, int(env[k]), int(episode[k]))
            count, *mark = obs[k].tolist()
            assert count == step[k]
            rows.setdefault(key, []).append((int(step[k]), tuple(mark), bool(terminated[k])))
    marks: dict[tuple[float, ...], tuple[int, ...]] = {}
    for key, found in rows.items():
        found.sort()
        assert [step for step, _, _ in found] == list(range(len(found))), key
        assert len({mark for _, mark, _ in found}) == 1
        assert not any(ended for _, _, ended in found[:-1])
        assert marks.setdefault(found[0][1], key) == key  # no stream is repeated
