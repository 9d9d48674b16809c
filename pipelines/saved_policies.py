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
from pipelines.agents import PPOAgent
from pipelines.directories import note_of
from pipelines.evaluation import BEST
from pipelines.q_networks import QNetwork

__all__ = ["SavedPolicy", "Version", "load_policy", "load_run"]

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


def load_run(run: Path, version: Version | None = None, command: str = "evaluate") -> SavedPolicy:
    """Return the policy of a run of ppo, dqn or apex.

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
    path = _saved(run, version, command)
    try:
        saved = dict(torch.load(path, weights_only=True))
        args = saved["args"] if "args" in saved else (note_of(run / "replay") or {})["args"]
        env, engine = str(args["env"]), str(args["engine"])
        steps = int(saved["steps"] if "steps" in saved else saved["metrics"]["steps"])
    except Exception as error:  # of torch.load there are many kinds
        raise ConfigError(f"{path} is no checkpoint of ppo, dqn or apex: {error}") from error
    observations, actions = clusterenv.env_spaces(env, engine=engine)
    policy = _rebuilt(saved, path, observations, actions, 0.0)
    return SavedPolicy(policy, env, engine, path, steps, observations)


def load_policy(
    name: str, observations: gym.Space[Any], actions: gym.Space[Any], epsilon: float = 0.0
) -> Policy:
    """Return the policy of a checkpoint, or a random one.

    Parameters
    ----------
    name
        ``"random"``, a file ``learner-….pt``, ``checkpoint.pt`` or ``best.pt``, or a run's
        directory.
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
    path = Path(name)
    path = _last(path) if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"--policy {path} does not exist; it is random, or what a learner wrote: "
            "--policy runs/dqn-CartPole-v1-seed1"
        )
    try:
        saved = dict(torch.load(path, weights_only=True))
    except Exception as error:  # of torch.load there are many kinds
        raise ConfigError(
            f"--policy {path} is no checkpoint for this environment: {error}"
        ) from error
    return _rebuilt(saved, path, observations, actions, epsilon)


def _last(run: Path) -> Path:
    """Return the last checkpoint of a run, which may not exist."""
    note = note_of(run / "replay")
    return run / (str(note["learner"]) if note else "checkpoint.pt")


def _saved(run: Path, version: Version | None, command: str) -> Path:
    """Return the file of a version."""
    best, last = run / BEST, _last(run)
    if version == "best" and not best.is_file():
        raise ConfigError(
            f"{run} has no {BEST}: a run that is evaluated keeps its best version, clusterenv "
            f"train ppo --evaluate-every 10000; the last one: clusterenv {command} {run} "
            "--version last"
        )
    if version != "last" and best.is_file():
        return best
    if not last.is_file():
        raise ConfigError(
            f"{run} holds no checkpoint of ppo, dqn or apex; clusterenv train ppo --out {run} "
            f"writes one, and then: clusterenv {command} {run}"
        )
    return last


def _rebuilt(
    saved: Mapping[str, Any],
    path: Path,
    observations: gym.Space[Any],
    actions: gym.Space[Any],
    epsilon: float,
) -> Policy:
    try:
        if "learner" in saved or saved.get("kind") in ("dqn", "apex"):
            network = saved["network"] if "network" in saved else saved["args"]
            q = QNetwork(observations, actions, tuple(network["hidden"]), network["duelling"])
            greedy = EpsilonGreedy(q, epsilon)
            if "learner" in saved:
                q.load_state_dict(saved["learner"]["q"])
            else:
                greedy.load_state_dict(saved["policy"])
            return greedy
        weights = saved["agent"] if "agent" in saved else saved["policy"]
        agent = PPOAgent(observations, actions, *_shape_of(weights))
        agent.load_state_dict(weights)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{path} is no checkpoint for this environment: {error}") from error
    return agent


def _shape_of(agent: Mapping[str, torch.Tensor]) -> tuple[tuple[int, ...], bool]:
    """Return the hidden layers of a PPO agent, and whether it normalises observations."""
    sizes = [len(agent[name]) for name in agent if name.startswith("actor.") and "bias" in name]
    return tuple(sizes[:-1]), "stats.count" in agent
