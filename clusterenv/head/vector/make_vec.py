"""``make_vec``: places environments on a cluster, and returns a ``ClusterEnv`` of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from clusterenv.cluster.connect import ClusterLike
from clusterenv.data.observation_mode import ObservationMode
from clusterenv.head.fleet.launch import check_counts, make_recipe, open_fleet
from clusterenv.head.fleet.restarts import Restarts, restart_rule
from clusterenv.head.vector.cluster_env import ClusterEnv

__all__ = ["make_vec"]


def make_vec(
    env: str | EnvSpec | Callable[..., gym.Env[Any, Any]] | Sequence[Callable[..., Any]],
    num_envs: int,
    *,
    shards: int | None = None,
    cluster: ClusterLike = None,
    engine: str = "auto",
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = (),
    restarts: Restarts | None = None,
    observation_mode: ObservationMode = "same",
    **env_kwargs: Any,
) -> ClusterEnv:
    """Make a vector environment whose environments live on a Dask cluster.

    Parameters
    ----------
    env
        A Gymnasium id or spec, a callable that makes one environment, or a sequence of
        ``num_envs`` such callables, as ``SyncVectorEnv`` takes them.
    num_envs
        Number of environments.
    shards
        Number of groups they are split into, each on a worker process of its own.
        By default one per worker that the cluster has now.
    cluster
        Whatever :func:`clusterenv.connect` takes; by default a ``LocalCluster`` that
        is stopped again by ``close()``.
    engine
        ``"auto"`` and ``"gymnasium"``: any environment, equal to ``SyncVectorEnv``.
        ``"native"``: the environment's own ``vector_entry_point``. ``"envpool"``:
        EnvPool's task of this name. See ``docs/engines.md`` for what the last two change.
    autoreset_mode
        ``NEXT_STEP``, ``SAME_STEP`` or ``DISABLED``.
    wrappers
        Applied to each environment on the worker, first to last.
    restarts
        How often a lost shard is restarted: 5 times in 10 minutes by default, ``Restarts(0)``
        for never. Its environments come back truncated, with the observation of a reset and the
        reason in ``info["lost"]``.
    observation_mode
        As in Gymnasium: ``"same"`` if all observation spaces are equal; ``"different"`` if they
        agree in shape and dtype only; or a tuple of the batched space and that of one environment.
    **env_kwargs
        Passed to the environment.

    Raises
    ------
    ConfigError, SpaceMismatch, UnknownEnv, NoWorkers, EnvError
        At once, and with nothing left running.

    Examples
    --------
    >>> import clusterenv
    >>> envs = clusterenv.make_vec("CartPole-v1", 4, shards=2)
    >>> obs, info = envs.reset(seed=1)
    >>> obs.shape
    (4, 4)
    >>> obs, reward, terminated, truncated, info = envs.step([0, 1, 0, 1])
    >>> envs.close()
    """
    rule = restart_rule(restarts)
    check_counts(num_envs, shards)
    recipe = make_recipe(
        env, num_envs, engine, autoreset_mode, wrappers, env_kwargs, observation_mode
    )
    return ClusterEnv(*open_fleet(recipe, num_envs, shards, cluster), rule)
