"""``env_spaces``: the spaces of an environment without a cluster."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import clusterenv
from clusterenv import errors


class Small(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)
    closed = 0

    def __init__(self, fault: str | None = None) -> None:
        if fault is not None:
            raise KeyError(fault)

    def close(self) -> None:
        Small.closed += 1


def test_the_environment_is_made_once_and_closed() -> None:
    before = Small.closed
    assert clusterenv.env_spaces(Small) == (Small.observation_space, Small.action_space)
    assert Small.closed == before + 1


@pytest.mark.parametrize("engine", ["auto", "native"])
def test_every_engine_has_spaces(engine: str) -> None:
    observations, actions = clusterenv.env_spaces("CartPole-v1", engine=engine)
    assert (observations.shape, actions) == ((4,), gym.spaces.Discrete(2))


def test_wrappers_and_arguments_count() -> None:
    observations, _ = clusterenv.env_spaces("FrozenLake-v1", map_name="8x8")
    assert observations == gym.spaces.Discrete(64)
    flat = (gym.wrappers.FlattenObservation,)
    observations, _ = clusterenv.env_spaces("FrozenLake-v1", wrappers=flat, map_name="8x8")
    assert observations.shape == (64,)


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(errors.UnknownEnv):
        clusterenv.env_spaces("CartPool-v1")
    with pytest.raises(errors.ConfigError, match="engine="):
        clusterenv.env_spaces("CartPole-v1", engine="fast")
    with pytest.raises(errors.EnvError, match=r"making .* raised: KeyError") as raised:
        clusterenv.env_spaces(Small, fault="level")
    assert isinstance(raised.value, KeyError)
