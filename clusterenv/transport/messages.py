"""The messages between head and workers: their kinds, and the types of their blobs.

A message has a kind, a blob and a body. The blob is pickled; where the description names a type,
it travels as a plain tuple of the type's fields: ``dumps(tuple(CallRequest(…)))``. The body is the
bytes of arrays, without a description: both sides derive shapes and dtypes from the spaces, the
policy or the blob. The messages that carry rows, ``SCHEMA`` and ``FRAGMENT``, are Arrow's.
Nothing in them, nor in ``OBSERVATIONS``, is pickled.
"""

from __future__ import annotations

import enum
import json
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from clusterenv.data.fragment import Cut
from clusterenv.data.pickling import loads
from clusterenv.data.spaces import Column

__all__ = [
    "FROM_CACHE",
    "ActRequest",
    "ActionField",
    "ActionsMeta",
    "CallRequest",
    "Credit",
    "Failure",
    "FragmentMeta",
    "MessageKind",
    "ObservationsMeta",
    "Pong",
    "ResetRequest",
    "ResultMeta",
    "StepRequest",
    "WeightsMeta",
    "decode_blob",
]


class MessageKind(enum.IntEnum):
    """What a message is."""

    # ClusterEnv: the head sends requests, and the shard answers each of them, in order.

    RESET = 1
    """Head to shard, to reset all environments or those of a mask. The blob is a
    :class:`ResetRequest`; no body. The answer is ``RESULT`` or ``FAILED``."""
    STEP = 2
    """Head to shard, to step environments with the user's actions. The blob is a
    :class:`StepRequest`, or empty for all environments and actions of the space's dtypes; the body
    is the array columns of the actions. The answer is ``RESULT`` or ``FAILED``."""
    CALL = 3
    """Head to shard, to call a method of the engine. The blob is a :class:`CallRequest`; no body.
    The answer is ``VALUE``."""
    ACT = 4
    """Head to shard, for ``step(policy)``: the shard's policy chooses the actions. The blob is an
    :class:`ActRequest`; the body is the weights of the request's version, or empty if the shard
    has them. The answer is ``RESULT`` or ``FAILED``."""
    RESULT = 11
    """Shard to head, the answer to ``RESET``, ``STEP`` and ``ACT``. The blob is a
    :class:`ResultMeta`, or empty if there are no infos, objects or choices; the body is the array
    columns of the observations, then reward, terminated and truncated. The head receives it into
    the arrays that the call returns."""
    VALUE = 12
    """Shard to head, the answer to ``CALL``. The blob is the pickled list of what the method
    returned for each environment, or a :class:`Failure`; no body."""

    # Collector: a shard collects by itself; either side sends when it has something to send.

    CREDIT = 21
    """Head to shard, to let it make one more fragment. The blob is a :class:`Credit`; no body."""
    WEIGHTS = 23
    """Head to shard, the answer to ``PULL``, and after a restart: the newest version, or in
    lock-step the one that the credit names. Also from a worker to another, the answer to its
    ``PULL``. The blob is a :class:`WeightsMeta`; the body is the weights, or
    empty if the shard gets them elsewhere."""
    PING = 24
    """Head to shard, every half second. Blob ``None``; no body. The answer is ``PONG``."""
    DRAIN = 25
    """Head to shard, before the shard moves or ends: the shard uses up its credits, then sends
    ``DRAINED``. Blob ``None``; no body."""
    ACTIONS = 26
    """Head to shard, the answer to ``OBSERVATIONS``. The blob is an :class:`ActionsMeta`; the body
    is the actions, the policy's extras and the recurrent state after the step, by its fields."""
    FRAGMENT = 31
    """Shard to head, one for each credit. The blob is :meth:`FragmentMeta.pack`; the body is one
    Arrow record-batch message (see :mod:`clusterenv.data.record_batch`)."""
    PULL = 32
    """Shard to head, when the sync rule asks for newer weights, or after those promised did not
    arrive. The blob is a boolean: whether the head must send the weights itself. From a worker to
    another worker, the blob is the version wanted. No body."""
    PONG = 33
    """Shard to head, the answer to ``PING``. The blob is a :class:`Pong`; no body."""
    DRAINED = 34
    """Shard to head, the answer to ``DRAIN``, after the last fragment. The blob is the number of
    rows of an unfinished fragment, which are lost; no body."""
    HELD = 35
    """Shard to head, when weights have arrived and the worker can pass them on to others. The blob
    is their version; no body."""
    SCHEMA = 36
    """Shard to head, before the first ``FRAGMENT``, and again if the columns change. The blob is
    the Arrow schema message of the fragments that follow; no body."""
    OBSERVATIONS = 37
    """Shard to head, if the policy acts there: what a group of environments shows. The blob is
    :meth:`ObservationsMeta.pack`; the body is the array columns of the observations, then the
    action mask if there is one, and the recurrent state. The answer is ``ACTIONS``."""

    # Both

    FAILED = 41
    """Shard to head, when an environment, the policy or the worker raised. The blob is a
    :class:`Failure`; no body. A step server goes on with the next request; a stream has ended."""


class ResetRequest(NamedTuple):
    """Blob of ``RESET``; all fields are about the shard's own environments."""

    seeds: list[int | None]
    options: dict[str, Any] | None
    mask: npt.NDArray[np.bool_] | None
    """Environments to reset; ``None`` for all."""


class StepRequest(NamedTuple):
    """Blob of ``STEP``."""

    rows: slice | npt.NDArray[np.intp] | None
    """Environments of the shard to step; ``None`` for all."""
    dtypes: list[np.dtype[Any]] | None
    """Of the body's columns; ``None`` for those of the action space."""
    objects: list[Column]
    """The columns of actions that are not arrays."""


class CallRequest(NamedTuple):
    """Blob of ``CALL``: a method of the engine, and its arguments."""

    method: str
    args: tuple[Any, ...]


class ActRequest(NamedTuple):
    """Blob of ``ACT``."""

    policy: bytes | None
    """The pickled policy, the first time."""
    version: int
    """The policy version that acts."""
    state_rows: int = 0
    """Number of environments whose recurrent state the answer includes."""


class ResultMeta(NamedTuple):
    """Blob of ``RESULT``."""

    infos: Any
    """The infos of the environments, packed (see :mod:`clusterenv.data.infos`)."""
    objects: list[Column]
    """The columns of observations that are not arrays."""
    chosen: dict[str, Column] | None
    """Answering ``ACT``: the actions, and the policy's own columns."""
    states: tuple[Any, dict[str, Column]] | None = None
    """Answering ``ACT``: some rows, and the recurrent state that the policy acted with there."""


class Credit(NamedTuple):
    """Blob of ``CREDIT``."""

    fresh: bool
    """Whether the sync rule must decide about this credit's announcement alone, and the shard wait
    for the version if it asks for it (lock-step); or whether the shard begins with the version that
    it has (streaming)."""
    newest: tuple[Any, ...]
    """The first fields of the newest ``Announcement`` (see :mod:`clusterenv.sync.announcement`), in
    lock-step of the newest when the rollout was requested; of the divergences, that of the shard's
    own version. So a shard depends on no other message to know of a version."""


class WeightsMeta(NamedTuple):
    """Blob of ``WEIGHTS``."""

    version: int
    digest: int
    """Checksum of the weights."""
    source: str | tuple[Any, ...] | None = None
    """Where the weights are: in the body (``None``), in the cache of the shard's process
    (:data:`FROM_CACHE`), or at another worker (the fields of its relay's ``Endpoint``)."""


FROM_CACHE = "cache"
"""``WeightsMeta.source``: another shard of the same process has got the weights, or is about to."""


class Pong(NamedTuple):
    """Blob of ``PONG``."""

    steps: int
    """Steps that the shard has taken so far."""
    busy: bool
    """Whether its environments are being stepped now."""


class ObservationsMeta(NamedTuple):
    """Blob of ``OBSERVATIONS``.

    Examples
    --------
    >>> meta = ObservationsMeta(1, 8, 4, 0)
    >>> ObservationsMeta.unpack(meta.pack()) == meta
    True
    """

    group: int
    """Of the shard."""
    first: int
    """Global index of the group's first environment."""
    num_envs: int
    """Of the group."""
    choices: int
    """Entries of an action mask; 0 without masks."""

    def pack(self) -> bytes:
        """Return the blob: four numbers of fixed size."""
        return _OBSERVATIONS.pack(*self)

    @classmethod
    def unpack(cls, raw: bytes) -> ObservationsMeta:
        """Undo :meth:`pack`; raise ``ValueError`` if the blob is malformed."""
        try:
            return cls(*_OBSERVATIONS.unpack(raw))
        except struct.error as error:
            raise ValueError(str(error)) from error


_OBSERVATIONS = struct.Struct("<IIII")


class ActionField(NamedTuple):
    """One array in the body of ``ACTIONS``."""

    part: str
    """``action``, ``extras`` or ``state``."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of one row."""


class ActionsMeta(NamedTuple):
    """Blob of ``ACTIONS``."""

    group: int
    version: int
    """Of the policy that chose."""
    fields: tuple[tuple[Any, ...], ...] | None
    """Of each :class:`ActionField` of the body; ``None`` if they are those of the message before
    it to this shard."""


class FragmentMeta(NamedTuple):
    """Blob of ``FRAGMENT``: what is to be known of a fragment besides its rows.

    Examples
    --------
    >>> meta = FragmentMeta(7, 8, 0.25, [200.0], [200], 0, 3, 1, [])
    >>> FragmentMeta.unpack(meta.pack()) == meta
    True
    """

    version: int
    """Policy version of the first time row; where environments differ, the oldest."""
    newest: int
    """The newest version that was announced to the shard when the fragment began."""
    divergence: float | None
    """Of the shard's version from the newest at that time, if known."""
    returns: list[float]
    lengths: list[int]
    dropped: int
    checks: int
    pulls: int
    cuts: list[Cut]

    def pack(self) -> bytes:
        """Return the blob: numbers of fixed size, then returns, lengths, and the cuts as JSON."""
        numbers = _NUMBERS.pack(
            *(self.version, self.newest, self.dropped, self.checks, self.pulls),
            *(self.divergence is not None, self.divergence or 0.0, len(self.returns)),
        )
        count = len(self.returns)
        episodes = struct.pack(f"<{count}d{count}q", *self.returns, *self.lengths)
        cuts = json.dumps(self.cuts).encode() if self.cuts else b""
        return numbers + episodes + cuts

    @classmethod
    def unpack(cls, raw: bytes) -> FragmentMeta:
        """Undo :meth:`pack`; raise ``ValueError`` if the blob is malformed."""
        try:
            *counts, known, divergence, episodes = _NUMBERS.unpack_from(raw)
        except struct.error as error:
            raise ValueError(str(error)) from error
        middle = _NUMBERS.size + 8 * episodes
        end = middle + 8 * episodes
        if len(raw) < end:
            raise ValueError(f"{episodes:,} episodes in {len(raw):,} bytes")
        returns = np.frombuffer(raw, "<f8", episodes, _NUMBERS.size)
        lengths = np.frombuffer(raw, "<i8", episodes, middle)
        if max(counts) > _MOST or (episodes and not 0 < lengths.min() <= lengths.max() <= _MOST):
            raise ValueError(f"{counts} and the lengths {lengths} of episodes are not counts")
        cuts = _cuts(json.loads(raw[end:])) if len(raw) > end else []
        version, newest, dropped, checks, pulls = counts
        measured = divergence if known else None
        ended = returns.tolist(), lengths.tolist()
        return cls(version, newest, measured, *ended, dropped, checks, pulls, cuts)


_NUMBERS = struct.Struct("<QQQQQ?dI")
_MOST = 2**62


def _cuts(found: Any) -> list[Cut]:
    for cut in found if isinstance(found, list) else [found]:
        if not isinstance(cut, list) or [type(part) for part in cut] != [int, int, str]:
            raise ValueError(f"{cut!r} is no cut episode: [env, time, reason]")
    return [Cut(*cut) for cut in found]


class Failure(NamedTuple):
    """Blob of ``FAILED``: what was raised on a worker."""

    env: int | None
    """Global env index, if one environment is to blame."""
    doing: str
    """``make``, ``reset``, ``step``, ``act``, or the method that was called."""
    error: bytes | None
    """The pickled exception, if it can be pickled."""
    traceback: str
    note: str = ""
    """Why the environment must not be tried again, if so."""


_NOT_PICKLED = frozenset({MessageKind.SCHEMA, MessageKind.FRAGMENT, MessageKind.OBSERVATIONS})


def decode_blob(kind: int, raw: bytes | bytearray) -> Any:
    """Return the value of a message's blob, or the bytes of one that is not pickled."""
    return bytes(raw) if kind in _NOT_PICKLED else loads(raw)
