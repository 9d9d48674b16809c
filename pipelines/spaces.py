"""The spaces of an environment, before any worker has made one."""

from __future__ import annotations

import contextlib
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode

from clusterenv.errors import ConfigError
from clusterenv.head.fleet.launch import make_recipe
from clusterenv.simulation.engines import build

__all__ = ["spaces_of"]


def spaces_of(env: str, engine: str = "auto") -> tuple[gym.Space[Any], gym.Space[Any]]:
    """Return the spaces of observations and actions, by making one environment here.

    Raises
    ------
    UnknownEnv
        If there is no such environment.
    ConfigError
        If the engine cannot make it.

    Examples
    --------
    >>> spaces_of("CartPole-v1")[1]
    Discrete(2)
    """
    loop = engine in ("auto", "gymnasium")
    mode = AutoresetMode.SAME_STEP if loop else AutoresetMode.NEXT_STEP
    recipe = make_recipe(env, 1, engine, mode, (), {})
    try:
        with contextlib.closing(build(recipe, 0, 1)) as made:
            about = made.description
            return about.observation_space, about.action_space
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"{env} needs a package that is not here: {error}") from error
