"""Groups of environments that step in turn, without a cluster and without a head."""

from __future__ import annotations

import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor
from worlds import Raises

from clusterenv.policies.policy import Context, Decision
from clusterenv.simulation.engines.base import EnvRaised, Recipe
from clusterenv.simulation.groups import EnvGroups, GroupedLoop
from clusterenv.simulation.head_policy import Choice, HeadPolicy
from clusterenv.simulation.policy_runner import Acting

NOW = Acting(0, {})


class Alone(gym.Env[Any, Any]):
    """Fails if another environment of the process is stepped, or made, at the same time."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    busy = False

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.work()

    def work(self) -> None:
        assert not Alone.busy
        assert self.thread == threading.get_ident()
        Alone.busy = True
        time.sleep(0.001)  # others may run meanwhile
        Alone.busy = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.work()
        return np.full(1, seed or 0, np.float32), {}

    def step(self, action: Any) -> Any:
        self.work()
        return np.full(1, action, np.float32), 1.0, False, False, {}

    def close(self) -> None:
        self.work()


def loop_of(env: Any, count: int, choose: Any) -> tuple[EnvGroups, GroupedLoop]:
    groups = EnvGroups(Recipe(env, autoreset_mode=AutoresetMode.SAME_STEP), 10, count, 2)
    seeds = list(range(count))
    policy, choosers = HeadPolicy({}), [choose] * len(groups.spans)
    return groups, GroupedLoop(groups, policy, 8, seeds, choosers)


def test_two_groups_never_step_at_the_same_time_and_each_stays_in_its_thread() -> None:
    asked = []

    def choose(obs: list[Tensor], context: Context) -> Choice:
        asked.append(context.envs.tolist())
        time.sleep(0.001)
        return Choice(len(asked), Decision(torch.ones(len(obs[0]), dtype=torch.int64)))

    groups, loop = loop_of(Alone, 5, choose)
    fragments = [loop.fragment(NOW) for _ in range(2)]
    groups.close()
    assert sorted(asked) == 16 * [[10, 11, 12]] + 16 * [[13, 14]]
    first, second = (fragment.columns for fragment in fragments)
    assert first["obs"].reshape(8, 5)[0].tolist() == [0, 1, 2, 3, 4]
    assert first["env"].reshape(8, 5)[3].tolist() == [10, 11, 12, 13, 14]
    assert second["step"].reshape(8, 5)[:, 4].tolist() == list(range(8, 16))
    versions = np.concatenate([first["version"], second["version"]]).reshape(16, 5)
    assert (np.diff(versions, axis=0) > 0).all()
    assert loop.steps == 16


def test_the_environment_that_raised_is_named_by_its_row_in_the_shard() -> None:
    def choose(obs: list[Tensor], context: Context) -> Choice:
        return Choice(0, Decision(torch.full((len(obs[0]),), 2)))

    groups, loop = loop_of(tuple([RaisesIf] * 16), 6, choose)
    with pytest.raises(EnvRaised) as raised:
        loop.fragment(NOW)
    assert raised.value.env == 4
    groups.close()


class RaisesIf(Raises):
    """Raises in a step if it was seeded with 4."""

    def __init__(self) -> None:
        super().__init__("step", KeyError, "level")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeded = seed
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self.seeded == 4:
            return super().step(action)
        return self.observation_space.sample(), 0.0, False, False, {}
