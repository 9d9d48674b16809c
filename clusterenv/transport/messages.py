"""The vocabulary of the connections: kinds of frames, and how a failure travels."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from clusterenv.data.codec import Parts
from clusterenv.data.fragment import Cut
from clusterenv.data.spaces import Column

__all__ = [
    "ON_SHELF",
    "ActRequest",
    "CallRequest",
    "Failure",
    "FragmentMeta",
    "MessageKind",
    "ResetRequest",
    "StepRequest",
]


class MessageKind(enum.IntEnum):
    """Kinds of frames on a connection."""

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


class ResetRequest(NamedTuple):
    """Blob of a ``RESET`` frame."""

    seeds: list[int | None]
    options: dict[str, Any] | None
    mask: npt.NDArray[np.bool_] | None


class CallRequest(NamedTuple):
    """Blob of a ``CALL`` frame: a method of the engine and its arguments."""

    method: str
    args: tuple[Any, ...]


class StepRequest(NamedTuple):
    """Blob of a ``STEP`` frame; the array columns of the actions are its body.

    An empty blob stands for all environments and the dtypes of the action space.
    """

    rows: slice | npt.NDArray[np.intp] | None
    dtypes: list[np.dtype[Any]] | None
    objects: list[Column]


class FragmentMeta(NamedTuple):
    """Blob of a ``FRAGMENT`` frame."""

    version: int
    """Of the first time row, where tracks differ the oldest: no row's is older."""
    newest: int
    """The newest version the shard had heard of when the fragment began."""
    divergence: float | None
    parts: Parts
    returns: list[float]
    lengths: list[int]
    dropped: int
    checks: int
    pulls: int
    cuts: list[Cut]


class ActRequest(NamedTuple):
    """Blob of an ``ACT`` frame; its body is the weights of ``version``, or nothing."""

    policy: bytes | None
    """The pickled policy, the first time."""
    version: int
    state_rows: int = 0
    """How many environments the answer shall bring the policy's recurrent state of."""


ON_SHELF = "shelf"
"""Where weights are that another shard of the same process has got."""
