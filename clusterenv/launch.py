"""From what a user names to a running fleet: the environments, the cluster, the shards."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from distributed import Client
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from clusterenv.cluster import ClusterLike, connect, starts_cluster, starts_empty
from clusterenv.envs import ENGINES, Recipe
from clusterenv.errors import ConfigError, UnknownEnv
from clusterenv.fleet import Fleet, split
from clusterenv.observation_mode import ObservationMode, check_observation_mode

__all__ = ["make_recipe", "open_fleet"]


def open_fleet(
    recipe: Recipe,
    num_envs: int,
    shards: int | None,
    cluster: ClusterLike,
    stream: bytes | None = None,
) -> tuple[Fleet, Client | None]:
    """Connect, and place the shards; also return the client if it is ours to close."""
    _check_counts(num_envs, shards)
    try:
        pickled = cloudpickle.dumps(recipe)
    except Exception as error:
        raise ConfigError(
            f"the environment cannot be sent to a worker: {error}. Pass an id, or a function "
            "that makes everything it needs itself: make_vec(lambda: MyEnv(size=5), 8)"
        ) from error
    # A cluster that is started for these shards gets a process for each.
    options: dict[str, Any] = {}
    if starts_cluster(cluster):
        if shards:
            options["n_workers"] = shards
        elif starts_empty(cluster):
            raise ConfigError(
                f"cluster={cluster!r} has no workers yet, so say how many: "
                f"make_vec(…, cluster={cluster!r}, shards=4)"
            )
    client = connect(cluster, set_as_default=False, **options)
    owned = client if client is not cluster else None
    try:
        # Workers that the cluster has asked for and that are still to come count too.
        planned = len(getattr(client.cluster, "plan", ()))
        count = shards or min(num_envs, max(1, len(client.nthreads()), planned))
        return Fleet(client, pickled, split(num_envs, count), stream), owned
    except BaseException:
        if owned is not None:
            owned.close()
        raise


def _check_counts(num_envs: int, shards: int | None) -> None:
    for name, value in (("num_envs", num_envs), ("shards", shards)):
        if value is not None and (not isinstance(value, (int, np.integer)) or value < 1):
            raise ConfigError(f"{name} must be a positive integer, got {value!r}")
    if shards is not None and num_envs < shards:
        raise ConfigError(
            f"num_envs={num_envs} is less than shards={shards}: every shard needs an environment; "
            f"make_vec(…, num_envs={shards}, shards={shards}) or shards={num_envs}"
        )


def make_recipe(
    env: Any,
    num_envs: int,
    engine: str,
    autoreset_mode: AutoresetMode | str | None,
    wrappers: Sequence[Callable[..., Any]],
    kwargs: dict[str, Any],
    observation_mode: ObservationMode = "same",
) -> Recipe:
    """Check what names the environments, and return how to make them."""
    if engine != "auto" and engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} is unknown; one of 'auto', {list(ENGINES)}")
    engine = "gymnasium" if engine == "auto" else engine
    try:
        mode = None if autoreset_mode is None else AutoresetMode(autoreset_mode)
    except ValueError as error:
        raise ConfigError(
            f"autoreset_mode={autoreset_mode!r} is unknown; "
            f"one of {', '.join(f'AutoresetMode.{m.name}' for m in AutoresetMode)}"
        ) from error
    if isinstance(env, str):
        source: Any = env if engine == "envpool" else _spec(env)
    elif isinstance(env, EnvSpec) or callable(env):
        source = env
    elif isinstance(env, Sequence) and all(callable(factory) for factory in env):
        if len(env) != num_envs:
            raise ConfigError(f"{len(env)} factories were passed for num_envs={num_envs}")
        source = tuple(env)
    else:
        raise ConfigError(
            f"env={env!r} is a {type(env).__name__}; pass an id ('CartPole-v1'), a spec, "
            "or a function that makes an environment"
        )
    if not isinstance(wrappers, Sequence) or not all(callable(each) for each in wrappers):
        raise ConfigError(
            f"wrappers={wrappers!r} must be a sequence of callables: wrappers=(TimeLimit,)"
        )
    check_observation_mode(observation_mode)
    return Recipe(source, dict(kwargs), tuple(wrappers), engine, mode, observation_mode)


def _spec(name: str) -> EnvSpec:
    module, _, name = name.rpartition(":")
    try:
        if module:  # which registers it
            importlib.import_module(module)
        return gym.spec(name)
    except gym.error.Error as error:
        raise UnknownEnv(
            f"{error} If another package registers it, name its module too: 'package:{name}'"
        ) from error
    except ModuleNotFoundError as error:
        raise UnknownEnv(
            f"cannot import {module!r}, the module of {name!r}: {error}. A module of this "
            "directory is found with PYTHONPATH=."
        ) from error
