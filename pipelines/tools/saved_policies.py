"""The policies that runs have saved: of the last checkpoint, or of the best evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import torch

import clusterenv
from clusterenv.errors import ConfigError
from clusterenv.policies import EpsilonGreedy, Policy, Random
from pipelines import learners
from pipelines.experiment.directories import note_of
from pipelines.experiment.evaluation import BEST

__all__ = ["SavedPolicy", "Version", "collecting_policy", "load_run"]

Version = Literal["best", "last"]
"""The best evaluated version of a run, or its last checkpoint."""


class SavedPolicy(NamedTuple):
    """A policy of a run, and where it is from."""

    policy: Policy
    env: str
    engine: str
    path: Path
    steps: int
    """Of the run, when it was saved."""
    observation_space: gym.Space[Any]
    evaluated_with: tuple[str, ...]
    """Arguments of the environment that the run was evaluated in."""


def load_run(run: Path, version: Version | None = None, command: str = "evaluate") -> SavedPolicy:
    """Return the policy of a run.

    Parameters
    ----------
    run
        Its directory.
    version
        By default the best if the run was evaluated, and otherwise the last.
    command
        For the messages.

    Raises
    ------
    ConfigError
        If there is no such version, or it cannot be read.
    """
    best, last = run / BEST, _last(run)
    if version == "best" and not best.is_file():
        raise ConfigError(
            f"{run} has no {BEST}: a run that is evaluated keeps its best version, clusterenv "
            f"train ppo --evaluate-every 10000; the last one: clusterenv {command} {run} "
            "--version last"
        )
    path = best if version != "last" and best.is_file() else last
    if not path.is_file():
        raise ConfigError(
            f"{run} holds no checkpoint of a learner; clusterenv train ppo --out {run} "
            f"writes one, and then: clusterenv {command} {run}"
        )
    saved = _read(path)
    env, engine = str(saved["args"]["env"]), str(saved["args"]["engine"])
    observations, actions = clusterenv.env_spaces(env, engine=engine)
    policy = _rebuilt(path, saved, observations, actions, 0.0)
    evaluated_with = tuple(saved["args"].get("evaluate_env_args", ()))  # older runs have none
    return SavedPolicy(policy, env, engine, path, int(saved["steps"]), observations, evaluated_with)


def collecting_policy(
    name: str, observations: gym.Space[Any], actions: gym.Space[Any], epsilon: float = 0.0
) -> Policy:
    """Return the policy of a checkpoint, or a random one.

    Parameters
    ----------
    name
        ``"random"``, a run's directory, or a file ``learner-….pt`` or ``best.pt`` in one.
    observations, actions
        The environment's spaces.
    epsilon
        Probability of a random action, for policies that are otherwise greedy.

    Raises
    ------
    ConfigError
        If there is no such checkpoint, or it is of another environment.
    """
    if name == "random":
        return Random(actions)
    path = _last(Path(name)) if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise ConfigError(
            f"--policy {name} does not exist; it is random, or what a learner wrote: "
            "--policy runs/dqn-CartPole-v1-seed1"
        )
    return _rebuilt(path, _read(path), observations, actions, epsilon)


def _last(run: Path) -> Path:
    """Return the last checkpoint of a run, which may not exist."""
    return run / str((note_of(run) or {}).get("learner", "learner-1.pt"))


def _read(path: Path) -> dict[str, Any]:
    """Return a checkpoint: ``kind`` and ``args`` of the run, and its weights."""
    try:
        saved = dict(torch.load(path, weights_only=True))
        if not {"kind", "args", "steps"} <= saved.keys():
            raise KeyError("kind, args or steps")
    except Exception as error:  # of torch.load there are many kinds
        raise ConfigError(f"{path} is no checkpoint of a learner: {error}") from error
    return saved


def _rebuilt(
    path: Path,
    saved: Mapping[str, Any],
    observations: gym.Space[Any],
    actions: gym.Space[Any],
    epsilon: float,
) -> Policy:
    """Build the learner that a run was made with, and return its policy with the saved weights."""
    kind = learners.load(saved["kind"])
    try:
        learner = kind(kind.args_type(**saved["args"]), observations, actions)
        if "learner" in saved:
            learner.load_state_dict(saved["learner"])
        else:
            learner.policy.load_state_dict(saved["policy"])
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{path} is no checkpoint for this environment: {error}") from error
    policy = learner.policy
    return policy.with_epsilon(epsilon) if isinstance(policy, EpsilonGreedy) else policy
