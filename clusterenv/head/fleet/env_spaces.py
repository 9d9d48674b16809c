"""The spaces of an environment, without a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from clusterenv.errors import ClusterEnvError, ConfigError, EnvError, shown
from clusterenv.head.fleet.env_errors import raised_by_env
from clusterenv.head.fleet.launch import make_recipe
from clusterenv.simulation.engines import build

__all__ = ["env_spaces"]


def env_spaces(
    env: str | EnvSpec | Callable[..., gym.Env[Any, Any]],
    *,
    engine: str = "auto",
    wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = (),
    **env_kwargs: Any,
) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """Return the observation space and the action space of an environment.

    Makes one environment in this process and closes it, so that a policy can be built before
    :func:`clusterenv.make_vec` or :class:`clusterenv.Collector` start any worker.

    Parameters
    ----------
    env, engine, wrappers, **env_kwargs
        As for :func:`clusterenv.make_vec`.

    Raises
    ------
    UnknownEnv
        If no environment is registered under this id.
    ConfigError
        If the engine cannot make it, or a package that it needs is not installed here.
    EnvError
        If making it raises.

    Examples
    --------
    >>> import clusterenv
    >>> observations, actions = clusterenv.env_spaces("CartPole-v1")
    >>> observations.shape, actions.n
    ((4,), np.int64(2))
    """
    recipe = make_recipe(env, 1, engine, None, wrappers, env_kwargs)
    try:
        with contextlib.closing(build(recipe, 0, 1)) as made:
            return made.description.observation_space, made.description.action_space
    except ClusterEnvError:
        raise
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"{shown(env)} needs a package that is not installed: {error}") from error
    except Exception as error:
        raise raised_by_env(EnvError, f"making {shown(env)} raised: {error!r}", error) from error
