"""Requests to shards and their answers: the way in which ``ClusterEnv`` talks to its fleet."""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from clusterenv.channel import Array, Header
from clusterenv.errors import ChannelClosed
from clusterenv.fleet import Fleet, Link, env_error
from clusterenv.frames import Frame

__all__ = ["Answer", "Exchange", "Reader"]

# Unanswered requests up to this size fit into the sockets' buffers whatever the shard
# does; beyond it, answers are read first, or both sides could wait for the other to read.
_UNANSWERED_BYTES = 65_536
_WATCH_SECONDS = 0.5

Reader = Callable[[Link, Header, Any], Any]
"""Reads the body of an answer, given its header and blob, and returns the value."""


class Answer(NamedTuple):
    """What a shard answered; an exception if it failed."""

    link: Link
    value: Any


class Exchange:
    """Sends requests to the shards of a fleet and receives whichever answer comes first."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._selector = selectors.DefaultSelector()
        self._ready: deque[Answer] = deque()
        self._unanswered: dict[int, deque[tuple[int, Reader]]] = {}
        for link in fleet.links:
            self._selector.register(link.channel, selectors.EVENT_READ, link)
            self._unanswered[link.index] = deque()

    @property
    def outstanding(self) -> bool:
        """Whether any answer is still to come or to be taken."""
        return bool(self._ready) or any(self._unanswered.values())

    def send(
        self,
        link: Link,
        kind: Frame,
        reader: Reader,
        blob: bytes = b"",
        body: Sequence[Array] = (),
    ) -> None:
        """Send a request; its answer will be read by ``reader``."""
        unanswered = self._unanswered[link.index]
        size = len(blob) + sum(array.nbytes for array in body)
        while unanswered and sum(sent for sent, _ in unanswered) + size > _UNANSWERED_BYTES:
            self._read(link)
        try:
            link.channel.send(kind, blob, body)
        except ChannelClosed as error:
            raise self._fleet.lost(link) from error
        unanswered.append((size, reader))

    def recv(self) -> Answer:
        """Return the next answer of any shard."""
        while not self._ready:
            for link in self._readable():
                self._read(link)
            if not self._ready:
                self._fleet.watch()
        return self._ready.popleft()

    def _readable(self) -> list[Link]:
        buffered = [link for link in self._fleet.links if link.channel.has_buffered()]
        return buffered or [key.data for key, _ in self._selector.select(_WATCH_SECONDS)]

    def _read(self, link: Link) -> None:
        try:
            header = link.channel.recv_header()
            blob = link.channel.recv_blob(header)
            _, reader = self._unanswered[link.index].popleft()
            failed = header.kind == Frame.FAILED
            value = env_error(link, blob) if failed else reader(link, header, blob)
            self._ready.append(Answer(link, value))
        except ChannelClosed as error:
            raise self._fleet.lost(link) from error

    def close(self) -> None:
        """Forget the channels; the fleet closes them."""
        self._selector.close()
