"""Requests to shards and their answers: the way in which ``ClusterEnv`` talks to its fleet."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from clusterenv import config
from clusterenv.data.spaces import Array
from clusterenv.errors import ClusterEnvError, ConnectionClosed, WorkerLost
from clusterenv.head.fleet.env_errors import env_error
from clusterenv.head.fleet.fleet import Fleet
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.transport.connection import Header
from clusterenv.transport.messages import MessageKind
from clusterenv.transport.multiplexer import Message, Multiplexer

__all__ = ["Answer", "Exchange", "Reader", "Recover"]

_WATCH_SECONDS = 0.5
_READING_SECONDS = 0.05
# Members of an enum are looked up slowly.
_STEP, _ACT, _RESULT, _VALUE, _FAILED = (
    int(kind)
    for kind in (
        MessageKind.STEP,
        MessageKind.ACT,
        MessageKind.RESULT,
        MessageKind.VALUE,
        MessageKind.FAILED,
    )
)


class Reader(NamedTuple):
    """What becomes of an answer."""

    arrays: Sequence[Array]
    """The body is received into these."""
    value: Callable[[ShardHandle, Any], Any]
    """Returns the answer's value, given the blob, once the body has come."""


Recover = Callable[[ShardHandle, WorkerLost, bool], ShardHandle]
"""Places a lost shard again, ending its process first if told to; raises if it must not."""

Fail = Callable[[BaseException], None]
"""Stops everything before an error, or Ctrl-C, reaches the caller."""


class Answer(NamedTuple):
    """What a shard answered; an exception if it failed."""

    handle: ShardHandle
    value: Any


class _Request(NamedTuple):
    reader: Reader
    again: Callable[[], None]
    sent: float
    limit: float
    """Seconds until it must be answered."""


class Exchange:
    """Sends requests to the shards of a fleet and receives whichever answer comes first.

    Parameters
    ----------
    fleet
        The shards.
    recover
        Called with a shard that is lost; its unanswered requests are then made again.
    fail
        Called when a request cannot be sent or no answer be received; a method of the exchange's
        owner, and held weakly.
    """

    def __init__(self, fleet: Fleet, recover: Recover, fail: Fail) -> None:
        self._fleet = fleet
        self._recover = recover
        self._fail = weakref.WeakMethod(fail)
        self._multiplexer = Multiplexer(self._place)
        self._ready: deque[Answer] = deque()
        self._unanswered: dict[int, deque[_Request]] = {}
        self._step_limit = config.seconds("timeout.step")
        self._call_limit = config.seconds("timeout.call")
        self._looked = time.monotonic()
        for handle in fleet.handles:
            self._multiplexer.add(handle)
            self._unanswered[handle.index] = deque()

    @property
    def outstanding(self) -> bool:
        """Whether any answer is still to come or to be taken."""
        return bool(self._ready) or any(self._unanswered.values())

    def send(
        self,
        shard: int,
        kind: MessageKind,
        reader: Reader,
        again: Callable[[], None],
        blob: bytes = b"",
        body: Sequence[Array] = (),
    ) -> None:
        """Send a request; it waits for the shard to read on only as long as the shard does.

        Parameters
        ----------
        shard
            To whom.
        reader
            Takes the answer.
        again
            Asks for what is to be had instead if the shard is lost before it answers.
        """
        limit = self._step_limit if kind in (_STEP, _ACT) else self._call_limit
        handle = self._fleet.handles[shard]
        try:
            # The caller may reuse its actions; weights never change.
            behind = self._multiplexer.send(handle, kind, blob, body, copy=kind == _STEP)
            self._unanswered[shard].append(_Request(reader, again, time.monotonic(), limit))
            if behind:
                self._go_on_sending(handle)
        except BaseException as error:
            self._failed(error)
            raise

    def recv(self, timeout: float | None = None) -> Answer:
        """Return the next answer of any shard.

        Raises
        ------
        TimeoutError
            If none came within ``timeout`` seconds; it may still come, for a later call.
        """
        if not self._ready:
            try:
                self._listen(math.inf if timeout is None else timeout)
            except BaseException as error:
                self._failed(error)
                raise
            if not self._ready:
                raise TimeoutError(f"no answer came within {timeout:g} s")
        return self._ready.popleft()

    def _listen(self, timeout: float) -> None:
        """Receive until there is an answer, or the time is over."""
        now = time.monotonic()
        ends = now + timeout
        while not self._ready:
            began, pause = now, max(0.0, min(_WATCH_SECONDS, ends - now))
            for handle, message in self._multiplexer.listen(pause):
                self._take(handle, message)
            now = time.monotonic()
            if now - began > pause + self._step_limit / 2:  # this process was held up, or suspended
                for handle in self._fleet.handles:
                    handle.heartbeat.heard(now)
            if now - self._looked >= _WATCH_SECONDS:
                self._watch(now)
            if now >= ends:
                break

    def _go_on_sending(self, handle: ShardHandle) -> None:
        """Send more of what is kept for a shard, until it has not read for a moment."""
        began = time.monotonic()
        while (
            handle.connection.is_behind
            and time.monotonic() - max(began, handle.heartbeat.heard_at) < _READING_SECONDS
        ):
            for speaker, message in self._multiplexer.listen(_READING_SECONDS):
                self._take(speaker, message)

    def _take(self, handle: ShardHandle, message: Message | ClusterEnvError) -> None:
        if isinstance(message, Message):
            self._answer(handle, message)
        elif isinstance(message, ConnectionClosed):
            self._lose(handle, self._fleet.lost(handle), message)
        else:
            raise message

    def _place(self, handle: ShardHandle, header: Header, _blob: Any) -> Sequence[Array]:
        """Return where the body of an answer goes."""
        unanswered = self._unanswered[handle.index]
        if not unanswered or header.kind not in (_RESULT, _VALUE, _FAILED):
            raise ConnectionClosed(
                f"{handle} sent a frame of kind {header.kind} that nothing asked for"
            )
        return () if header.kind == _FAILED else unanswered[0].reader.arrays

    def _answer(self, handle: ShardHandle, message: Message) -> None:
        request = self._unanswered[handle.index].popleft()
        if message.kind == _FAILED:
            value: Any = env_error(handle, message.blob)
        else:
            value = request.reader.value(handle, message.blob)
        self._ready.append(Answer(handle, value))

    def _watch(self, now: float) -> None:
        """Look for shards that Dask knows to be lost, and for answers that do not come."""
        self._looked = now
        for handle in self._fleet.gone():
            self._lose(handle, self._fleet.lost(handle))
        for handle in list(self._fleet.handles):
            unanswered = self._unanswered[handle.index]
            if not unanswered:
                continue
            limit = unanswered[0].limit
            if handle.connection.is_receiving:
                limit = min(limit, self._step_limit)
            quiet_since = max(unanswered[0].sent, handle.heartbeat.heard_at)
            if now - quiet_since > limit:
                self._lose(handle, _overdue(handle, limit), end_process=True)

    def _lose(
        self,
        handle: ShardHandle,
        error: WorkerLost,
        cause: BaseException | None = None,
        end_process: bool = False,
    ) -> None:
        """Have a shard placed again, and ask it for what its predecessor did not answer."""
        error.__cause__ = cause
        self._multiplexer.remove(handle)
        requests = list(self._unanswered[handle.index])
        self._unanswered[handle.index].clear()
        back = self._recover(handle, error, end_process)
        self._multiplexer.add(back)
        for request in requests:
            request.again()

    def _failed(self, error: BaseException) -> None:
        fail = self._fail()
        if fail is not None:
            fail(error)

    def close(self) -> None:
        """Stop listening; the fleet closes the connections."""
        self._multiplexer.close()


def _overdue(handle: ShardHandle, limit: float) -> WorkerLost:
    return WorkerLost(
        f"{handle} has not answered for {limit:g} s: an environment hangs, or its process is "
        "stopped or cannot be reached. If a step may take longer: "
        "dask.config.set({'clusterenv.timeout.step': '10 m'}); for resets and calls it is "
        "'clusterenv.timeout.call'"
    )
