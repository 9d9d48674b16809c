"""The head's side of all its connections: one thread reads and writes frames without waiting.

Of a frame the multiplexer reads and writes what there is, then goes on with the other shards, so a
shard that stops in the middle of a frame, in either direction, holds up none of them.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from clusterenv.data.spaces import Array
from clusterenv.errors import ClusterEnvError, ConnectionClosed
from clusterenv.transport.connection import Connection, Header
from clusterenv.transport.connection import Place as ConnectionPlace
from clusterenv.transport.heartbeat import Heartbeat
from clusterenv.transport.messages import MessageKind

__all__ = ["Message", "Multiplexer", "Peer", "Place"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Peer(Protocol):
    """The other end of a connection, as the multiplexer needs to know it."""

    @property
    def connection(self) -> Connection:
        """The connection."""

    heartbeat: Heartbeat


P = TypeVar("P", bound=Peer)


Place = Callable[[P, Header, Any], Sequence[Array]]
"""Returns the arrays that the body of a shard's frame is received into, given header and blob.

It raises if there should be no such frame.
"""


class Message(NamedTuple):
    """A frame that has come."""

    kind: int
    blob: Any
    body: Sequence[Array]
    """The arrays that hold it."""


class Multiplexer(Generic[P]):
    """Reads and writes the frames of all shards.

    One thread calls :meth:`add`, :meth:`remove` and :meth:`listen`; any may call :meth:`send` and
    :meth:`wake`.

    Parameters
    ----------
    place
        Where the body of a frame goes.
    """

    def __init__(self, place: Place[P]) -> None:
        self._place = place
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._woken, _READ)
        self._places: dict[P, ConnectionPlace] = {}  # of each shard, where bodies go
        self._decrypting: list[P] = []  # shards whose bytes a selector may not report
        self._behind: set[P] = set()  # shards that have not read all that was sent to them
        self._posted: set[P] = set()  # shards that may have become so

    def add(self, handle: P) -> None:
        """Listen to a shard from now on."""
        self._selector.register(handle.connection, _READ, handle)
        self._places[handle] = partial(self._place, handle)
        if handle.connection.encrypted:
            self._decrypting.append(handle)
        if handle.connection.is_behind:
            self._posted.add(handle)

    def remove(self, handle: P) -> None:
        """Listen to a shard no more; a frame of which a part has come is dropped."""
        self._selector.unregister(handle.connection)
        del self._places[handle]
        self._behind.discard(handle)
        if handle in self._decrypting:
            self._decrypting.remove(handle)

    def send(
        self,
        handle: P,
        kind: MessageKind,
        blob: bytes = b"",
        body: Sequence[Any] = (),
        *,
        copy: bool = False,
    ) -> bool:
        """Send a frame: what the system takes at once, the rest while :meth:`listen` runs.

        Returns whether there is a rest. A connection that broke is reported by :meth:`listen`.

        Parameters
        ----------
        copy
            Whether the arrays of ``body`` may change after this call.
        """
        try:
            if not handle.connection.post(kind, blob, body):
                return False
        except ConnectionClosed:
            return False
        if copy:
            handle.connection.own_kept()
        self._posted.add(handle)
        self.wake()
        return True

    def wake(self) -> None:
        """End the pause of the thread that listens."""
        try:
            self._waker.send(b"!")
        except OSError:
            pass  # enough bytes lie there to wake it, or it has ended

    def listen(self, seconds: float) -> Iterator[tuple[P, Message | ClusterEnvError]]:
        """Wait for shards to say something, and yield what each has said.

        A connection that broke, or a frame that should not be, is an error instead; who gets it
        removes the shard.
        """
        if self._posted or self._behind:
            self._follow()
        # What was decrypted already, no selector reports; the others have their turn all the same.
        ready: list[tuple[P, int]] = []
        if self._decrypting:
            ready += [
                (handle, _READ) for handle in self._decrypting if handle.connection.has_buffered()
            ]
        for key, events in self._selector.select(0 if ready else seconds):
            if key.data is None:
                self._woken.recv(64)
            else:
                ready.append((key.data, events))
        for handle, events in ready:
            place = self._places.get(handle)
            if place is None:  # removed meanwhile
                continue
            try:
                if events & _WRITE and handle.connection.flush():
                    handle.heartbeat.heard(time.monotonic())  # it reads
                received = None
                if events & _READ:
                    heartbeat = (
                        handle.heartbeat
                    )  # more of a frame: however long it takes, nothing hangs
                    heard = (
                        heartbeat.progress if handle.connection.is_receiving else heartbeat.heard
                    )
                    heard(time.monotonic())
                    received = handle.connection.receive(place)
            except ClusterEnvError as error:
                yield handle, error
            else:
                if received is not None:
                    header, blob, body = received
                    yield handle, Message(header.kind, blob, body)

    def close(self) -> None:
        """Stop listening."""
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _follow(self) -> None:
        """Wait for shards to read on while something is kept for them, and no longer."""
        while self._posted:
            handle = self._posted.pop()
            if (
                handle in self._places
                and handle not in self._behind
                and handle.connection.is_behind
            ):
                self._behind.add(handle)
                self._selector.modify(handle.connection, _READ | _WRITE, handle)
        for handle in [handle for handle in self._behind if not handle.connection.is_behind]:
            self._behind.discard(handle)
            self._selector.modify(handle.connection, _READ, handle)
