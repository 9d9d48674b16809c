"""Requests to shards and their answers: the way in which ``ClusterEnv`` talks to its fleet."""

from __future__ import annotations

import math
import selectors
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from clusterenv import config
from clusterenv.channel import Array, Header
from clusterenv.errors import ChannelClosed, WorkerLost
from clusterenv.fleet import Fleet, Link, env_error
from clusterenv.frames import Frame

__all__ = ["Answer", "Exchange", "Reader", "Recover"]

# Unanswered requests up to this size fit into the sockets' buffers whatever the shard
# does; beyond it, answers are read first, or both sides could wait for the other to read.
_UNANSWERED_BYTES = 65_536
_WATCH_SECONDS = 0.5

Reader = Callable[[Link, Header, Any], Any]
"""Reads the body of an answer, given its header and blob, and returns the value."""

Recover = Callable[[Link, WorkerLost, bool], Link]
"""Places a lost shard again, ending its process first if told to; raises if it must not."""

Fail = Callable[[BaseException], None]
"""Stops everything before an error, or Ctrl-C, goes on to whoever asked."""


class Answer(NamedTuple):
    """What a shard answered; an exception if it failed."""

    link: Link
    value: Any


class _Request(NamedTuple):
    size: int
    reader: Reader
    again: Callable[[], None]
    overdue: float


class Exchange:
    """Sends requests to the shards of a fleet and receives whichever answer comes first.

    Parameters
    ----------
    fleet
        The shards.
    recover
        Called with a shard that is lost; its unanswered requests are then made again.
    fail
        Called when a request cannot be sent or no answer be received; a method of whoever owns
        the exchange, and held weakly.
    """

    def __init__(self, fleet: Fleet, recover: Recover, fail: Fail) -> None:
        self._fleet = fleet
        self._recover = recover
        self._fail = weakref.WeakMethod(fail)
        self._selector = selectors.DefaultSelector()
        self._ready: deque[Answer] = deque()
        self._unanswered: dict[int, deque[_Request]] = {}
        self._patience = config.seconds("timeout.step")
        for link in fleet.links:
            self._selector.register(link.channel, selectors.EVENT_READ, link)
            self._unanswered[link.index] = deque()

    @property
    def outstanding(self) -> bool:
        """Whether any answer is still to come or to be taken."""
        return bool(self._ready) or any(self._unanswered.values())

    def send(
        self,
        shard: int,
        kind: Frame,
        reader: Reader,
        again: Callable[[], None],
        blob: bytes = b"",
        body: Sequence[Array] = (),
    ) -> None:
        """Send a request.

        Parameters
        ----------
        shard
            To whom.
        reader
            Reads the answer.
        again
            Asks for what is to be had instead if the shard is lost before it answers.
        """
        try:
            self._send(shard, kind, reader, again, blob, body)
        except BaseException as error:
            self._failed(error)
            raise

    def recv(self, timeout: float | None = None) -> Answer:
        """Return the next answer of any shard.

        Raises
        ------
        TimeoutError
            If none came within so many seconds; it may come later.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while not self._ready:
                seconds = min(_WATCH_SECONDS, max(0.0, deadline - time.monotonic()))
                for link in self._readable(seconds):
                    self._read(link)
                if not self._ready:
                    self._watch()
                    if time.monotonic() > deadline:
                        break
        except BaseException as error:
            self._failed(error)
            raise
        if not self._ready:
            raise TimeoutError(f"no shard has answered within {timeout:g} s")
        return self._ready.popleft()

    def _send(
        self,
        shard: int,
        kind: Frame,
        reader: Reader,
        again: Callable[[], None],
        blob: bytes,
        body: Sequence[Array],
    ) -> None:
        size = len(blob) + sum(array.nbytes for array in body)
        unanswered = self._unanswered[shard]
        while unanswered and sum(each.size for each in unanswered) + size > _UNANSWERED_BYTES:
            for link in self._readable():
                self._read(link)
        link = self._fleet.links[shard]
        try:
            link.channel.send(kind, blob, body)
        except ChannelClosed as error:
            self._lose(link, self._fleet.lost(link), error)
            again()
            return
        # Resets and calls take as long as they take; a step that does not end is a fault.
        limit = self._patience if kind in (Frame.STEP, Frame.ACT) else float("inf")
        unanswered.append(_Request(size, reader, again, time.monotonic() + limit))

    def _readable(self, seconds: float = _WATCH_SECONDS) -> list[Link]:
        buffered = [link for link in self._fleet.links if link.channel.has_buffered()]
        return buffered or [key.data for key, _ in self._selector.select(seconds)]

    def _read(self, link: Link) -> None:
        try:
            header = link.channel.try_header()
            if header is None:
                return
            blob = link.channel.recv_blob(header)
            reader = self._unanswered[link.index][0].reader
            failed = header.kind == Frame.FAILED
            value = env_error(link, blob) if failed else reader(link, header, blob)
        except ChannelClosed as error:
            self._lose(link, self._fleet.lost(link), error)
            return
        self._unanswered[link.index].popleft()
        self._ready.append(Answer(link, value))

    def _watch(self) -> None:
        """Look for shards that Dask knows to be lost, and for answers that do not come."""
        for link in self._fleet.gone():
            self._lose(link, self._fleet.lost(link))
        now = time.monotonic()
        for link in self._fleet.links:
            unanswered = self._unanswered[link.index]
            if unanswered and now > unanswered[0].overdue:
                error = WorkerLost(
                    f"{link} has not finished a step for {self._patience:g} s: an environment "
                    "hangs, or its process is stopped or cannot be reached. If a step may take "
                    "longer: dask.config.set({'clusterenv.timeout.step': '10 min'})"
                )
                self._lose(link, error, end_process=True)

    def _lose(
        self,
        link: Link,
        error: WorkerLost,
        cause: BaseException | None = None,
        end_process: bool = False,
    ) -> None:
        """Have a shard placed again, and ask it for what its predecessor did not answer."""
        error.__cause__ = cause
        self._selector.unregister(link.channel)
        requests = list(self._unanswered[link.index])
        self._unanswered[link.index].clear()
        back = self._recover(link, error, end_process)
        self._selector.register(back.channel, selectors.EVENT_READ, back)
        for request in requests:
            request.again()

    def _failed(self, error: BaseException) -> None:
        fail = self._fail()
        if fail is not None:
            fail(error)

    def close(self) -> None:
        """Forget the channels; the fleet closes them."""
        self._selector.close()
