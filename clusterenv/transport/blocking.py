"""The connection of a thread that serves nothing else: the worker's side."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from clusterenv.data.pickling import loads
from clusterenv.data.spaces import Array
from clusterenv.transport.framing import (
    HEADER_SIZE,
    MESSAGE_LIMIT,
    Header,
    byte_views,
    check_body,
    pack,
    remaining,
    unpack,
)
from clusterenv.transport.stream_socket import IOV_MAX, StreamSocket

__all__ = ["BlockingConnection"]


class BlockingConnection:
    """Sends and receives whole messages, and waits for the peer meanwhile.

    One thread may send while another receives. To receive a message, call :meth:`recv_header`,
    then :meth:`recv_blob` or :meth:`recv_raw`, then :meth:`recv_body` if the header announces one.
    All methods raise ``ConnectionClosed`` when the connection breaks or is closed.

    Parameters
    ----------
    sock
        The connected socket.
    limit
        Largest blob in bytes. A larger one is refused before it is sent; if the peer announces a
        larger one, the connection breaks before any memory is allocated for it.

    Examples
    --------
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
        """Receive the message's blob, still pickled."""
        raw = bytearray(header.blob)
        self._fill((raw,), header.blob)
        return raw

    def recv_blob(self, header: Header) -> Any:
        """Receive the message's blob; ``None`` if it is empty."""
        return loads(self.recv_raw(header)) if header.blob else None

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
