"""Evaluation on several distributions of an environment's tasks, its splits, at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

import clusterenv
from clusterenv import Evaluation
from clusterenv.errors import ConfigError, EnvError
from pipelines.experiment.metrics import Metrics

__all__ = ["check_splits", "environments", "judge"]

Factory = Callable[[], gym.Env[Any, Any]]


def environments(env: str, splits: Sequence[str], count: int) -> list[Factory]:
    """Return ``count`` environments of each split; one of each, then another of each, and so on.

    Examples
    --------
    >>> import pipelines.envs
    >>> envs = environments("clusterenv/ZipfGridworld-v0", ("uniform", "rare"), 10)
    >>> len(envs), envs[0]().unwrapped.observation_space.shape
    (20, (63, 63, 3))
    """
    spec = gym.spec(env.rpartition(":")[2])
    each: list[Factory] = [functools.partial(gym.make, spec, split=split) for split in splits]
    return each * count


def judge(played: Evaluation, splits: Sequence[str], count: int) -> dict[str, Evaluation]:
    """Return the episodes of each split, of an evaluation in :func:`environments`.

    Examples
    --------
    >>> played = Evaluation(1, np.arange(6.0), np.ones(6, np.int64))
    >>> {split: part.mean for split, part in judge(played, ("a", "b"), 3).items()}
    {'a': 2.0, 'b': 3.0}
    """
    fewest, more = divmod(len(played.returns), len(splits) * count)  # of an environment
    envs = np.arange(len(splits) * count)
    of = np.repeat(envs % len(splits), fewest + (envs < more))
    return {
        split: Evaluation(played.version, played.returns[of == place], played.lengths[of == place])
        for place, split in enumerate(splits)
    }


def check_splits(env: str, splits: Sequence[str], engine: str) -> None:
    """Raise unless an environment can be evaluated by its splits.

    Raises
    ------
    ConfigError
        With what is wrong, and options that would do.
    """
    said = f"--evaluate-splits {' '.join(splits)}"
    known = {field.name for field in dataclasses.fields(Metrics)}
    for split in splits:
        if f"eval_{split}" in known or splits.count(split) > 1:
            why = "twice" if splits.count(split) > 1 else "which is the name of another metric"
            raise ConfigError(f"{said} has {split!r}, {why}; leave it out")
    if splits and engine not in ("auto", "gymnasium", "native"):
        raise ConfigError(
            f"{said} makes environments by Gymnasium, and not by --engine {engine}: --engine auto"
        )
    for split in splits:
        try:
            clusterenv.env_spaces(env, engine="gymnasium", split=split)
        except (ConfigError, EnvError) as error:
            raise ConfigError(
                f"{said}: {env} cannot be made with split={split!r}: {error}; without splits: "
                "leave --evaluate-splits out"
            ) from error
