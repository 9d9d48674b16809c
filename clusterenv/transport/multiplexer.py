"""The head's side of all its connections: one thread exchanges messages with all shards."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from clusterenv.data.spaces import Array
from clusterenv.errors import ClusterEnvError, ConnectionClosed
from clusterenv.transport.connection import NonBlockingConnection
from clusterenv.transport.framing import Header, Message
from clusterenv.transport.framing import Place as ConnectionPlace
from clusterenv.transport.heartbeat import Heartbeat

__all__ = ["Multiplexer", "Peer", "Place"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Peer(Protocol):
    """What the multiplexer needs to know of a shard."""

    @property
    def connection(self) -> NonBlockingConnection:
        """The connection to it."""

    heartbeat: Heartbeat


P = TypeVar("P", bound=Peer)
Place = Callable[[P, Header, Any], Sequence[Array]]
"""As the ``Place`` of a connection, for the message of a peer."""


class Multiplexer(Generic[P]):
    """Exchanges messages with all peers, without waiting for any of them.

    It sends and receives as much of a message as the socket allows, then goes on with the next
    peer. A peer that stops in the middle of a message, in either direction, delays no other.

    One thread calls :meth:`add`, :meth:`remove` and :meth:`listen`; any thread may call
    :meth:`send` and :meth:`wake`.
    """

    def __init__(self, place: Place[P]) -> None:
        self._place = place
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._woken, _READ)
        self._places: dict[P, ConnectionPlace] = {}
        self._encrypted: list[P] = []
        self._writing: set[P] = set()  # peers whose sockets are also watched for writing
        self._unsent: set[P] = set()  # peers that may have to be
        self._select = self._selector.select

    def add(self, peer: P) -> None:
        """Receive from a peer from now on."""
        self._selector.register(peer.connection, _READ, peer)
        self._places[peer] = partial(self._place, peer)
        if peer.connection.encrypted:
            self._encrypted.append(peer)
        if peer.connection.has_unsent:
            self._unsent.add(peer)

    def remove(self, peer: P) -> None:
        """Receive no more from a peer; a message that has arrived in part is dropped."""
        self._selector.unregister(peer.connection)
        del self._places[peer]
        self._writing.discard(peer)
        if peer in self._encrypted:
            self._encrypted.remove(peer)

    def send(
        self,
        peer: P,
        kind: int,
        blob: bytes = b"",
        body: Sequence[Array] = (),
        *,
        copy: bool = False,
    ) -> bool:
        """Send what the system accepts at once; :meth:`listen` sends the rest.

        If the connection is broken, :meth:`listen` reports that. With ``copy``, the arrays of
        ``body`` may change after this call. Returns whether a part is still to be sent.
        """
        try:
            if not peer.connection.send(kind, blob, body, copy=copy):
                return False
        except ConnectionClosed:
            return False
        self._unsent.add(peer)
        self.wake()
        return True

    def wake(self) -> None:
        """Let :meth:`listen` return at once."""
        try:
            self._waker.send(b"!")
        except OSError:
            pass  # enough bytes are queued to wake it, or it is closed

    def listen(self, seconds: float) -> Iterator[tuple[P, Message | ClusterEnvError]]:
        """Wait until peers can be served, and yield each message that is complete.

        A broken connection, or a message that is not expected, yields the error in place of a
        message; the caller must then :meth:`remove` the peer. The caller may also add and remove
        other peers, and call ``listen`` again, before the iterator is exhausted.
        """
        if self._unsent or self._writing:
            self._watch_writing()
        ready: list[tuple[P, int]] = []
        if self._encrypted:  # no selector reports what is decrypted already
            ready += [(peer, _READ) for peer in self._encrypted if peer.connection.has_decrypted()]
        for key, events in self._select(0 if ready else seconds):
            if key.data is None:
                self._woken.recv(64)
            else:
                ready.append((key.data, events))
        for peer, events in ready:
            place = self._places.get(peer)
            if place is None:  # removed meanwhile
                continue
            connection = peer.connection
            try:
                if events & _WRITE and connection.flush():
                    peer.heartbeat.heard(time.monotonic())  # it reads
                if not events & _READ:
                    continue
                if connection.is_receiving:  # however long a message takes, nothing hangs
                    peer.heartbeat.progress(time.monotonic())
                else:
                    peer.heartbeat.heard(time.monotonic())
                message: Message | ClusterEnvError | None = connection.receive(place)
            except ClusterEnvError as error:
                message = error
            if message is not None:
                yield peer, message

    def close(self) -> None:
        """Release the selector; the connections stay open."""
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _watch_writing(self) -> None:
        """Watch sockets for writing while something is to be sent, and no longer."""
        while self._unsent:
            peer = self._unsent.pop()
            if peer in self._places and peer not in self._writing and peer.connection.has_unsent:
                self._writing.add(peer)
                self._selector.modify(peer.connection, _READ | _WRITE, peer)
        for peer in [peer for peer in self._writing if not peer.connection.has_unsent]:
            self._writing.discard(peer)
            self._selector.modify(peer.connection, _READ, peer)
