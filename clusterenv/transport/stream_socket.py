"""A connected socket, with or without TLS, that one thread reads while another writes."""

from __future__ import annotations

import math
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial

from clusterenv.data.spaces import Array
from clusterenv.errors import ConnectionClosed
from clusterenv.transport.framing import byte_views

__all__ = ["IOV_MAX", "StreamSocket"]

IOV_MAX = 512
"""Buffers per system call; Linux allows 1,024."""
_TLS_BLOCK = 1 << 18  # bytes encrypted at a time; the other direction waits for no more
_LOCAL_BUFFER = 1 << 22  # bytes in transit between processes of one machine, if it allows so many
_SEND_SECONDS = 30.0  # for a process of the same machine to read; then the connection is given up
# A peer whose machine vanished is noticed within half a minute. Keep-alive covers an idle
# connection, the user timeout (in ms) one with bytes in transit.
_KEEPALIVE = (
    ("TCP_KEEPIDLE", 10),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", 30_000),  # also ends a send to a peer that does not read
)


class StreamSocket:
    """Sends and receives buffers, and turns every fault into ``ConnectionClosed``.

    ``blocking`` says whether :meth:`send` and :meth:`recv_into` wait for the peer.
    """

    def __init__(self, sock: socket.socket, *, blocking: bool) -> None:
        self._sock = sock
        self._blocking = blocking
        self.encrypted = isinstance(sock, ssl.SSLSocket)
        # OpenSSL allows one thread at a time, so no thread may wait for the network inside a call.
        self._tls = threading.Lock()
        self._shut = False
        sock.setblocking(blocking and not self.encrypted)
        if sock.family == getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER)
            patience = struct.pack("ll", round(_SEND_SECONDS), 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._sock.fileno()

    def send(self, buffers: Sequence[bytes | memoryview | Array]) -> int:
        """Send at most :data:`IOV_MAX` buffers; return how many bytes the system accepted.

        Without blocking that may be 0. After a fault the socket is shut down, so that the peer
        cannot take what follows for the rest of a message.
        """
        try:
            if not self.encrypted:
                return self._sock.sendmsg(buffers)
            block = memoryview(buffers[0]).cast("B")[:_TLS_BLOCK]
            return self._locked(partial(self._sock.send, block)) or 0
        except OSError as error:
            if isinstance(error, BlockingIOError) and not self._blocking:
                return 0
            self.shut_down()
            raise ConnectionClosed(f"the connection broke while sending: {error}") from error

    def recv_into(self, buffers: Sequence[bytearray | memoryview | Array]) -> int | None:
        """Receive into at most :data:`IOV_MAX` buffers; return the number of bytes.

        Without blocking it may be ``None``: nothing has arrived.
        """
        try:
            if not self.encrypted:
                done: int | None = self._sock.recvmsg_into(buffers)[0]
            else:
                done = self._locked(partial(self._sock.recv_into, byte_views(buffers)[0]))
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionClosed(f"the connection broke while receiving: {error}") from error
        if done == 0:
            raise ConnectionClosed("the other end closed the connection")
        return done

    def _locked(self, call: Callable[[], int]) -> int | None:
        """Call OpenSSL while no other thread does; wait for the network outside of the lock."""
        while True:
            with self._tls:
                if self._shut:  # the bytes that come now would be read encrypted
                    raise ConnectionClosed("the connection was closed")
                try:
                    return call()
                except ssl.SSLWantReadError:
                    wanted = select.POLLIN
                except ssl.SSLWantWriteError:
                    wanted = select.POLLOUT
            if not self._blocking:
                return None
            self._poll(wanted, None)

    def wait_readable(self, seconds: float) -> bool:
        """Wait until something arrives; return whether it has."""
        return self._poll(select.POLLIN, seconds)

    def _poll(self, wanted: int, seconds: float | None) -> bool:
        poll = select.poll()
        try:
            poll.register(self._sock, wanted)
        except ValueError as error:  # closed meanwhile
            raise ConnectionClosed("the connection was closed") from error
        return bool(poll.poll(None if seconds is None else math.ceil(1e3 * seconds)))

    def has_decrypted(self) -> bool:
        """Whether decrypted bytes are buffered, which no selector reports."""
        if not isinstance(self._sock, ssl.SSLSocket):
            return False
        with self._tls:
            return self._sock.pending() > 0

    def close(self) -> None:
        """Close the socket; a thread that waits on it is woken."""
        self.shut_down()
        with self._tls:
            self._sock.close()

    def shut_down(self) -> None:
        """End both directions."""
        self._shut = True
        try:
            # Not TLS's own shutdown, which would leave the bare connection open for reading.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            pass
