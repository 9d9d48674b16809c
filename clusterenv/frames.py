"""The vocabulary of the channels: kinds of frames, and how a failure travels."""

from __future__ import annotations

import enum
import traceback
from typing import NamedTuple

from clusterenv.channel import dumps
from clusterenv.env_loop.faults import PolicyFault
from clusterenv.envs import EnvRaised

__all__ = ["Failure", "Frame", "failure_of"]


class Frame(enum.IntEnum):
    """Kinds of frames on a channel."""

    # The head asks, a shard answers (``ClusterEnv``).
    RESET = 1
    STEP = 2
    CALL = 3
    ACT = 4
    RESULT = 11
    VALUE = 12
    # The head lets a shard collect (``Collector``).
    TICKET = 21
    ANNOUNCE = 22
    WEIGHTS = 23
    PING = 24
    DRAIN = 25
    FRAGMENT = 31
    PULL = 32
    PONG = 33
    DRAINED = 34
    HELD = 35
    # Either: something was raised on the worker.
    FAILED = 41


class Failure(NamedTuple):
    """Something that was raised on a worker, as it travels to the head."""

    env: int | None
    """Global env index, if one environment is to blame."""
    doing: str
    """``make``, ``reset``, ``step``, ``act``, or what else was asked for."""
    error: bytes | None
    """The pickled exception, if it can be pickled."""
    traceback: str
    note: str = ""
    """Why the environment must not be tried again, if that is so."""


def failure_of(error: BaseException, first: int, doing: str) -> Failure:
    """Describe an exception raised by the environments that begin at index ``first``."""
    env, note = None, ""
    if isinstance(error, EnvRaised) and error.__cause__ is not None:
        env, doing, note = first + error.env, error.doing, error.note
        error = error.__cause__
    elif isinstance(error, PolicyFault):
        doing = "act"
    try:
        pickled = dumps(error)
    except Exception:
        pickled = None
    return Failure(env, doing, pickled, "".join(traceback.format_exception(error)), note)
