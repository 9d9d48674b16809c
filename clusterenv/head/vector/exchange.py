"""Requests to shards and their answers: how ``ClusterEnv`` communicates with its fleet."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from clusterenv import config
from clusterenv.data.spaces import Array
from clusterenv.errors import ClusterEnvError, ConnectionClosed, WorkerLost
from clusterenv.head.fleet.env_errors import env_error
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.transport.framing import Header, Message
from clusterenv.transport.messages import MessageKind
from clusterenv.transport.multiplexer import Multiplexer

if TYPE_CHECKING:
    from clusterenv.head.fleet.fleet import Fleet

__all__ = ["ACT", "CALL", "RESET", "STEP", "Exchange", "Request"]

_WATCH_SECONDS = 0.5
_SENDING_SECONDS = 0.05
# Plain integers: in Python 3.11 a member of an enum takes 0.1 µs to look up.
RESET, STEP, CALL, ACT = map(
    int, (MessageKind.RESET, MessageKind.STEP, MessageKind.CALL, MessageKind.ACT)
)
_RESULT, _VALUE, _FAILED = map(int, (MessageKind.RESULT, MessageKind.VALUE, MessageKind.FAILED))


class Request(NamedTuple):
    """A message to a shard, and how its answer is handled."""

    kind: int
    complete: Callable[[ShardHandle, Any], Any]
    """Returns the answer's value, given the shard and the answer's blob."""
    again: Callable[[], None]
    """Sends the request that replaces this one if the shard is lost before it answers."""
    arrays: Sequence[Array] = ()
    """Receive the body of the answer."""
    blob: bytes = b""
    body: Sequence[Array] = ()


class Exchange:
    """Sends requests to the shards of a fleet, and receives their answers in any order.

    It calls ``recover`` with a shard that is lost, the error, and whether its process must be
    ended; then it replaces the shard's unanswered requests. Before it raises, it calls ``fail``, a
    method of its owner, of which it keeps a weak reference.
    """

    def __init__(
        self,
        fleet: Fleet,
        recover: Callable[[ShardHandle, WorkerLost, bool], ShardHandle],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._fleet = fleet
        self._recover = recover
        self._fail = weakref.WeakMethod(fail)
        self._multiplexer = Multiplexer(self._place)
        self._ready: deque[Any] = deque()
        self._unanswered: dict[int, deque[tuple[Request, float]]] = {}  # and the times of sending
        self._step_limit = config.seconds("timeout.step")
        self._call_limit = config.seconds("timeout.call")
        self._watched = time.monotonic()
        self.outstanding = 0
        """Requests whose answers :meth:`recv` has still to return."""
        for handle in fleet.handles:
            self._multiplexer.add(handle)
            self._unanswered[handle.index] = deque()

    def send(self, shard: int, request: Request) -> None:
        """Send a request; while the shard reads, wait until it has all of it."""
        handle = self._fleet.handles[shard]
        kind = request.kind
        try:
            # The caller may reuse its actions; weights never change.
            unsent = self._multiplexer.send(
                handle, kind, request.blob, request.body, copy=kind == STEP
            )
            self._unanswered[shard].append((request, time.monotonic()))
            self.outstanding += 1
            if unsent:
                self._finish_sending(handle)
        except BaseException as error:
            self._failed(error)
            raise

    def recv(self, timeout: float | None = None) -> Any:
        """Return the value of the next answer of any shard; raise if the answer is a failure.

        Raises ``TimeoutError`` if there was none within ``timeout`` seconds; a later call may
        still return it.
        """
        if not self._ready:
            try:
                self._listen(math.inf if timeout is None else timeout)
            except BaseException as error:
                self._failed(error)
                raise
            if not self._ready:
                raise TimeoutError(f"no answer was received within {timeout:g} s")
        self.outstanding -= 1
        value = self._ready.popleft()
        if isinstance(value, Exception):
            self._failed(value)
            raise value
        return value

    def _listen(self, timeout: float) -> None:
        """Receive until there is an answer, or the time is over."""
        now = time.monotonic()
        ends = now + timeout
        while not self._ready:
            began, pause = now, max(0.0, min(_WATCH_SECONDS, ends - now))
            for handle, message in self._multiplexer.listen(pause):
                self._take(handle, message)
            now = time.monotonic()
            if now - began > pause + self._step_limit / 2:  # this process was held up or suspended
                for handle in self._fleet.handles:
                    handle.heartbeat.heard(now)
            if now - self._watched >= _WATCH_SECONDS:
                self._watch(now)
            if now >= ends:
                break

    def _finish_sending(self, handle: ShardHandle) -> None:
        """Send the rest of a message, until the shard has not read for a moment."""
        began = time.monotonic()
        while (
            handle.connection.has_unsent
            and time.monotonic() - max(began, handle.heartbeat.heard_at) < _SENDING_SECONDS
        ):
            for peer, message in self._multiplexer.listen(_SENDING_SECONDS):
                self._take(peer, message)

    def _place(self, handle: ShardHandle, header: Header, _blob: Any) -> Sequence[Array]:
        """Return the arrays that receive the body of an answer."""
        unanswered = self._unanswered[handle.index]
        if not unanswered or header.kind not in (_RESULT, _VALUE, _FAILED):
            raise ConnectionClosed(
                f"{handle} sent a message of kind {header.kind} without a request for it"
            )
        return () if header.kind == _FAILED else unanswered[0][0].arrays

    def _take(self, handle: ShardHandle, message: Message | ClusterEnvError) -> None:
        if isinstance(message, Message):
            request, _ = self._unanswered[handle.index].popleft()
            if message.kind == _FAILED:
                self._ready.append(env_error(handle, message.blob))
            else:
                self._ready.append(request.complete(handle, message.blob))
        elif isinstance(message, ConnectionClosed):
            self._lose(handle, self._fleet.lost(handle), message)
        else:
            raise message

    def _watch(self, now: float) -> None:
        """Look for shards that Dask reports as lost, and for answers that are overdue."""
        self._watched = now
        for handle in self._fleet.gone():
            self._lose(handle, self._fleet.lost(handle))
        for handle in list(self._fleet.handles):
            unanswered = self._unanswered[handle.index]
            if not unanswered:
                continue
            request, sent = unanswered[0]
            limit = self._step_limit if request.kind in (STEP, ACT) else self._call_limit
            if handle.connection.is_receiving:
                limit = min(limit, self._step_limit)
            if now - max(sent, handle.heartbeat.heard_at) > limit:
                self._lose(handle, _overdue(handle, limit), end_process=True)

    def _lose(
        self,
        handle: ShardHandle,
        error: WorkerLost,
        cause: BaseException | None = None,
        end_process: bool = False,
    ) -> None:
        """Restart a shard, and replace the requests that it did not answer."""
        error.__cause__ = cause
        self._multiplexer.remove(handle)
        requests = list(self._unanswered[handle.index])
        self._unanswered[handle.index].clear()
        self.outstanding -= len(requests)
        self._multiplexer.add(self._recover(handle, error, end_process))
        for request, _ in requests:
            request.again()

    def _failed(self, error: BaseException) -> None:
        fail = self._fail()
        if fail is not None:
            fail(error)

    def close(self) -> None:
        """Stop receiving; the fleet closes the connections."""
        self._multiplexer.close()


def _overdue(handle: ShardHandle, limit: float) -> WorkerLost:
    return WorkerLost(
        f"{handle} has not answered for {limit:g} s: an environment hangs, or its process is "
        "stopped or cannot be reached. If a step may take longer: "
        "dask.config.set({'clusterenv.timeout.step': '10 m'}); for resets and calls it is "
        "'clusterenv.timeout.call'"
    )
