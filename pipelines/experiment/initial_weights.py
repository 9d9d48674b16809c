"""``--init-from``: the weights of another run's last checkpoint, for a run of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clusterenv.errors import ConfigError
from pipelines.experiment.algorithm import Algorithm
from pipelines.experiment.args import FREE
from pipelines.experiment.checks import flag
from pipelines.experiment.directories import note_of
from pipelines.experiment.run_directory import arguments

__all__ = ["take_weights"]

OF_NO_NETWORK = ("env", "seed", "init_from")


def take_weights(learner: Algorithm[Any, Any], run: Path) -> None:
    """Give a learner the weights of a run: networks and their statistics, no optimizer or counters.

    Parameters
    ----------
    learner
        Which has not learned yet.
    run
        Directory of a run of the same learner.

    Raises
    ------
    ConfigError
        If there is no checkpoint, or it is of another learner, network or environment; the message
        says which call would be right.
    """
    note = note_of(run) if run.is_dir() else None
    if note is None or "learner" not in note or "kind" not in note:
        raise ConfigError(
            f"--init-from {run} holds no checkpoint of a run; name the directory of one: "
            f"--init-from runs/{learner.name}-{learner.args.env.replace('/', '-')}-seed1"
        )
    if note["kind"] != learner.name:
        raise ConfigError(
            f"--init-from {run} is a run of {note['kind']}, and {learner.name} has other networks: "
            f"clusterenv train {note['kind']} --env {note['args']['env']} --init-from {run}"
        )
    path = run / str(note["learner"])
    try:
        saved = dict(torch.load(path, weights_only=True))["learner"]
    except Exception as error:  # of torch.load there are many kinds
        raise ConfigError(
            f"--init-from {run}: {path} cannot be read: {' '.join(str(error).split())}; restore "
            "it, or name another run: --init-from runs/mine"
        ) from error
    try:
        learner.load_weights(saved)
    except (KeyError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the weights of --init-from {run} do not fit: {_why(learner, saved, note['args'])}"
        ) from error


def _why(learner: Algorithm[Any, Any], saved: Mapping[str, Any], begun: Mapping[str, Any]) -> str:
    """Return what differs, and what would fit: options of the network, or the environment."""
    given = arguments(learner.args)
    differ = {name: value for name, value in begun.items() if given.get(name, value) != value}
    fits = {name: value for name, value in differ.items() if name not in (*FREE, *OF_NO_NETWORK)}
    if _takes(learner, fits, saved):
        for name in [*fits]:  # which of them are needed
            fewer = {other: value for other, value in fits.items() if other != name}
            fits = fewer if _takes(learner, fewer, saved) else fits
        flags = " ".join(flag(name, value) for name, value in fits.items())
        return f"its network has other options: {flags}"
    env = learner.args.env
    if begun["env"] == env:
        return f"this version of {learner.name} has another network; begin without --init-from"
    return (
        f"it was trained on {begun['env']}, whose spaces {env} does not have: --env {begun['env']}"
    )


def _takes(
    learner: Algorithm[Any, Any], changes: Mapping[str, Any], saved: Mapping[str, Any]
) -> bool:
    """Whether a learner with some options changed could take weights."""
    with torch.random.fork_rng(devices=[]):
        try:
            args = dataclasses.replace(learner.args, **changes)
            made = type(learner)(args, learner.observation_space, learner.action_space)
            made.load_weights(saved)
        except (KeyError, ValueError, RuntimeError):  # ConfigError too: it needs another option
            return False
    return True
