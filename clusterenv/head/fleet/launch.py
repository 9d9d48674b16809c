"""From what users pass to a fleet: the environments, the cluster and the number of shards."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import gymnasium as gym
from distributed import Client
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from clusterenv import config
from clusterenv.cluster.connect import ClusterLike, connect, starts_cluster, starts_empty
from clusterenv.data.checks import check_choice, check_whole
from clusterenv.data.observation_mode import ObservationMode, check_observation_mode
from clusterenv.errors import ClusterEnvError, ConfigError, EnvError, UnknownEnv, shown
from clusterenv.head.fleet.env_errors import raised_by_env
from clusterenv.head.fleet.fleet import Fleet
from clusterenv.head.fleet.placement import split
from clusterenv.simulation.engines import ENGINES, build
from clusterenv.simulation.engines.base import Recipe
from clusterenv.worker.evaluation import EvaluationActor, EvaluationSpec
from clusterenv.worker.specs import StreamSpec

__all__ = [
    "EvaluationActor",
    "EvaluationSpec",
    "StreamSpec",
    "check_counts",
    "check_shards",
    "env_spaces",
    "make_recipe",
    "open_fleet",
    "pickled_recipe",
]

_MOST_ENVS = 2**20
_EXTRAS = {"ale_py": "atari", "Box2D": "box2d", "MuJoCo": "mujoco", "EnvPool": "envpool"}
_MOST_SHARDS = 2**16


def check_counts(num_envs: Any, shards: Any) -> None:
    """Raise ``ConfigError`` unless so many environments can be split into so many shards."""
    check_whole("num_envs", num_envs, "make_vec(env, num_envs=8)", least=1, most=_MOST_ENVS)
    if shards is None:
        return
    check_shards("shards", shards, "make_vec(env, 8, shards=2)")
    if num_envs < shards:
        raise ConfigError(
            f"num_envs={num_envs} is less than shards={shards}: every shard needs an environment; "
            f"make_vec(…, num_envs={shards}, shards={shards}) or shards={num_envs}"
        )


def check_shards(name: str, shards: Any, right: str) -> None:
    """Raise ``ConfigError`` unless this is a number of shards."""
    check_whole(name, shards, right, least=1, most=_MOST_SHARDS)


def open_fleet(
    recipe: Recipe,
    num_envs: int,
    shards: int | None,
    cluster: ClusterLike,
    stream: bytes | None = None,
) -> tuple[Fleet, Client | None]:
    """Connect and place the shards; also return the client if the caller must close it."""
    config.check()
    pickled = pickled_recipe(recipe)
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


def pickled_recipe(recipe: Recipe) -> bytes:
    """Pickle how the environments are made, or raise ``ConfigError``."""
    try:
        return cloudpickle.dumps(recipe)  # type: ignore[no-any-return]
    except Exception as error:
        raise ConfigError(
            f"the environment cannot be sent to a worker: {error}. Pass an id, or a function "
            "that makes everything it needs itself: make_vec(lambda: MyEnv(size=5), 8)"
        ) from error


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
    check_choice("engine", engine, ("auto", *ENGINES), "engine='auto'")
    engine = "gymnasium" if engine == "auto" else engine
    try:
        mode = None if autoreset_mode is None else AutoresetMode(autoreset_mode)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"autoreset_mode={shown(autoreset_mode)} is unknown; "
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
            f"env={shown(env)} is a {type(env).__name__}; pass an id ('CartPole-v1'), a spec, "
            "or a function that makes an environment"
        )
    if not isinstance(wrappers, Sequence) or not all(callable(each) for each in wrappers):
        raise ConfigError(
            f"wrappers={shown(wrappers)} must be a sequence of callables: wrappers=(TimeLimit,)"
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
        if name.startswith("ALE/") and not module:
            there = importlib.util.find_spec("ale_py") is not None
            first = "" if there else f", after {_install('ale_py')}"
            raise UnknownEnv(
                f"{name!r} is registered by ale_py; name that module too{first}: "
                f"env='ale_py:{name}'"
            ) from error
        said = re.sub(r"`([^`]*)`", r"\1", str(error))
        raise UnknownEnv(
            f"{said} If another package registers it, name its module too: 'package:{name}'; if "
            "it is of EnvPool: engine='envpool'"
        ) from error
    except (ModuleNotFoundError, TypeError, ValueError) as error:  # or no name of a module
        if getattr(error, "name", None) == module and module in _EXTRAS:
            raise UnknownEnv(f"{name!r} needs {module}: {_install(module)}") from error
        raise UnknownEnv(
            f"cannot import {module!r}, the module of {name!r}: {error}. A module of this "
            "directory is found with PYTHONPATH=."
        ) from error


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
        raise _missing_package(env, error) from error
    except Exception as error:
        if isinstance(error, ImportError) and engine == "envpool":
            raise _missing_package(env, error) from error
        raise raised_by_env(EnvError, f"making {shown(env)} raised: {error!r}", error) from error


def _missing_package(env: Any, error: Exception) -> ConfigError:
    """Return the error for an environment that lacks a package at the head."""
    said = str(error)
    lacking = next((name for name in _EXTRAS if name.lower() in said.lower()), None)
    if lacking is None:
        return ConfigError(f"{shown(env)} needs a package that is not installed: {said}")
    return ConfigError(f"{shown(env)} needs {lacking}, not installed here: {_install(lacking)}")


def _install(package: str) -> str:
    return f"pip install 'clusterenv[{_EXTRAS[package]}]'"
