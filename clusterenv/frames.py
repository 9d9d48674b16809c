"""The vocabulary of the channels: kinds of frames, and how a failure travels."""

from __future__ import annotations

import enum
import traceback
from typing import Any, NamedTuple

from clusterenv.channel import dumps, loads
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
    text = "".join(traceback.format_exception(error))
    return Failure(env, doing, _pickled(error), text, note)


class _WithoutInit:
    """Pickles an exception whose ``__init__`` takes other arguments than its ``args``."""

    def __init__(self, error: BaseException, attributes: dict[str, Any]) -> None:
        self._parts = type(error), error.args, attributes

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, self._parts


def _restore(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def _pickled(error: BaseException) -> bytes | None:
    """Return an exception so that the head can unpickle it; ``None`` if that is not possible."""
    for form in (error, _WithoutInit(error, vars(error)), _WithoutInit(error, {})):
        try:
            pickled = dumps(form)
            loads(pickled)
            return pickled
        except Exception:
            continue
    return None
