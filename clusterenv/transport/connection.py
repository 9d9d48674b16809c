"""Connections that exchange whole messages: blocking on workers, non-blocking at the head.

A blob larger than a connection's ``limit`` in bytes is refused before it is sent. If the peer
announces a larger one, the connection breaks before any memory is allocated for it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any

from clusterenv.data.spaces import Array
from clusterenv.transport.framing import (
    HEADER_SIZE,
    MESSAGE_LIMIT,
    Header,
    Message,
    Place,
    byte_views,
    check_body,
    pack,
    remaining,
    unpack,
)
from clusterenv.transport.messages import decode_blob
from clusterenv.transport.stream_socket import IOV_MAX, StreamSocket

__all__ = ["BlockingConnection", "NonBlockingConnection"]

_READ_BLOCK = 1 << 24  # bytes at a time, or a call would go on while the other end sends
_TURN_SECONDS = 0.02  # for one connection to receive; then it is the others' turn


class BlockingConnection:
    """The worker's side: sends and receives whole messages, and waits for the peer meanwhile.

    One thread may send while another receives. To receive a message, call :meth:`recv_header`,
    then :meth:`recv_blob` or :meth:`recv_raw`, then :meth:`recv_body` if the header announces one.
    All methods raise ``ConnectionClosed`` when the connection breaks or is closed.

    >>> head, shard = map(BlockingConnection, socket.socketpair())
    >>> head.send(7)
    >>> shard.recv_header()
    Header(kind=7, blob=0, body=0)
    >>> head.close(), shard.close()
    (None, None)
    """

    def __init__(self, sock: socket.socket, limit: int = MESSAGE_LIMIT) -> None:
        self._socket = StreamSocket(sock, blocking=True)
        self._limit = limit

    def send(self, kind: int, blob: bytes = b"", body: Sequence[Array] = ()) -> None:
        """Send a message; returns when the system has accepted all of it."""
        head, size = pack(kind, blob, body, self._limit)
        done = self._socket.send((head, *body[: IOV_MAX - 1]))
        if done < len(head) + size:
            views = byte_views((head, *body))
            while views := remaining(views, done):
                done = self._socket.send(views[:IOV_MAX])

    def recv_header(self) -> Header:
        """Wait for the next message."""
        raw = bytearray(HEADER_SIZE)
        self._fill((raw,), HEADER_SIZE)
        return unpack(raw, self._limit)

    def recv_raw(self, header: Header) -> bytearray:
        """Receive the bytes of the message's blob."""
        raw = bytearray(header.blob)
        self._fill((raw,), header.blob)
        return raw

    def recv_blob(self, header: Header) -> Any:
        """Receive the message's blob; ``None`` if it is empty."""
        return decode_blob(header.kind, self.recv_raw(header)) if header.blob else None

    def recv_body(self, header: Header, arrays: Sequence[Array]) -> None:
        """Receive the message's body into contiguous arrays, without a copy."""
        check_body(header, arrays)
        self._fill(arrays, header.body)

    def close(self) -> None:
        """Close the connection; a thread that waits on it is woken."""
        self._socket.close()

    def _fill(self, buffers: Sequence[bytearray | Array], size: int) -> None:
        if not size:
            return
        done = self._socket.recv_into(buffers[:IOV_MAX])
        if done != size:
            views = byte_views(buffers)
            while views := remaining(views, done or 0):
                done = self._socket.recv_into(views[:IOV_MAX])


class NonBlockingConnection:
    """The head's side: sends and receives messages piece by piece, as the socket allows.

    No method takes longer than a turn of 20 ms, so a peer that stops in the middle of a message,
    in either direction, delays no other. Any thread may call :meth:`send`; one thread calls
    :meth:`flush` and :meth:`receive`. All raise ``ConnectionClosed`` when the connection breaks or
    is closed.
    """

    def __init__(self, sock: socket.socket, limit: int = MESSAGE_LIMIT) -> None:
        self._socket = StreamSocket(sock, blocking=False)
        self._limit = limit
        self._sending = threading.Lock()
        self._unsent: list[memoryview] = []
        self._incoming: Generator[None, None, Message] | None = None  # a message in part
        self.encrypted = self._socket.encrypted
        """Whether the connection uses TLS."""

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    # Sending

    def send(
        self, kind: int, blob: bytes = b"", body: Sequence[Array] = (), *, copy: bool = False
    ) -> bool:
        """Send what the system accepts now, and queue the rest for :meth:`flush`.

        With ``copy``, the arrays of ``body`` may change after this call; otherwise they must not
        change until everything is sent. Returns whether a part is queued.
        """
        head, size = pack(kind, blob, body, self._limit)
        with self._sending:
            done = 0
            if not self._unsent:
                done = self._socket.send((head, *body[: IOV_MAX - 1]))
                if done == len(head) + size:
                    return False
            self._unsent += remaining(byte_views((head, *body)), done)
            self._send_queued()
            if copy:
                self._unsent = [memoryview(bytes(view)) for view in self._unsent]
            return bool(self._unsent)

    @property
    def has_unsent(self) -> bool:
        """Whether a part of a message is queued, because the peer does not read."""
        return bool(self._unsent)

    def flush(self) -> bool:
        """Send more of what is queued; return whether the system accepted anything."""
        with self._sending:
            return self._send_queued() > 0

    def _send_queued(self) -> int:
        total = 0
        views, self._unsent = self._unsent, []  # if the connection breaks, nothing is left to send
        while views and (done := self._socket.send(views[:IOV_MAX])):
            total += done
            views = remaining(views, done)
        self._unsent = views
        return total

    # Receiving

    @property
    def is_receiving(self) -> bool:
        """Whether a part of a message has arrived."""
        return self._incoming is not None

    def has_decrypted(self) -> bool:
        """Whether decrypted bytes are buffered, which no selector reports."""
        return self._socket.has_decrypted()

    def receive(self, place: Place) -> Message | None:
        """Receive what has arrived; return the next message once all of it has.

        The body is received into the arrays that ``place`` returns, without a copy.
        """
        if self._incoming is None:
            raw = bytearray(HEADER_SIZE)
            done = self._socket.recv_into((raw,))
            if done is None:  # under TLS, a selector also reports messages of the protocol
                return None
            header = unpack(raw, self._limit) if done == HEADER_SIZE else None
            if header is not None and not header.blob and header.body <= _READ_BLOCK:  # mostly
                arrays = place(header, None)
                check_body(header, arrays)
                done = (self._socket.recv_into(arrays[:IOV_MAX]) or 0) if header.body else 0
                if done == header.body:
                    return Message(header.kind, None, arrays)
                self._incoming = self._receive_body(header, None, arrays, done)
            else:
                self._incoming = self._receive_all(raw, done, place)
        try:
            next(self._incoming)
        except StopIteration as end:
            self._incoming = None
            message: Message = end.value
            return message
        return None

    def _receive_all(
        self, raw: bytearray, done: int, place: Place
    ) -> Generator[None, None, Message]:
        """Receive a message after ``done`` bytes of its header; yield whenever there is no more."""
        yield from self._fill((raw,), done)
        header = unpack(raw, self._limit)
        value: Any = None
        if header.blob:
            blob = bytearray(header.blob)
            yield from self._fill((blob,), 0)
            value = decode_blob(header.kind, blob)
        arrays = place(header, value)
        check_body(header, arrays)
        return (yield from self._receive_body(header, value, arrays, 0))

    def _receive_body(
        self, header: Header, value: Any, arrays: Sequence[Array], done: int
    ) -> Generator[None, None, Message]:
        yield from self._fill(arrays, done)
        return Message(header.kind, value, arrays)

    def _fill(self, buffers: Sequence[bytearray | Array], done: int) -> Generator[None, None, None]:
        """Receive into contiguous buffers; yield at the end of a turn if more is to come."""
        views = remaining(byte_views(buffers), done)
        ends = time.monotonic() + _TURN_SECONDS
        while views:
            large = views[0].nbytes > _READ_BLOCK
            now = [views[0][:_READ_BLOCK]] if large else views[:IOV_MAX]
            received = self._socket.recv_into(now)
            views = remaining(views, received or 0)
            left = ends - time.monotonic()
            if views and (left <= 0 or (received is None and not self._socket.wait_readable(left))):
                yield
                ends = time.monotonic() + _TURN_SECONDS
