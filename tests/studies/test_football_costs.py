"""What football costs, computed beforehand: it follows from the options of the presets."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from benchmarks.football import EASIEST, FRAME, STACK, Costs, memory_of
from pipelines import learners


def test_the_bytes_are_those_of_the_environment() -> None:
    space = gym.make(EASIEST[0]).observation_space
    assert space.dtype == np.uint8
    assert np.prod(space.shape or ()) == STACK == 4 * FRAME


@pytest.mark.parametrize("name", ["ppo", "impala", "apex"])
def test_memory_follows_from_the_options(name: str) -> None:
    kind = learners.load(name)
    sizes = memory_of(kind.preset(EASIEST[0], shards=2))
    twice = memory_of(kind.preset(EASIEST[0], shards=2, num_envs=32))
    assert twice["fragment"] == 2 * sizes["fragment"]
    assert sizes["shard"] == 6 * sizes["fragment"]
    assert twice["head"] == (sizes["head"] if name == "apex" else 2 * sizes["head"])


def test_the_slower_of_cores_and_learner_limits_a_run() -> None:
    assert Costs(simulate=0.0015, act=0.0001, learn=0.0004).rate(cores=2) == pytest.approx(1_000)
    assert Costs(simulate=0.0015, act=0.0001, learn=0.004).rate(cores=2) == pytest.approx(250)
    assert Costs(simulate=0.0015, act=0.0001, learn=0.0004).rate(cores=8) == pytest.approx(2_500)
