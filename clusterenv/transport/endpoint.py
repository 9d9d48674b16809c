"""Listening for connections, and connecting: the client authenticates itself with a token.

Between machines a connection uses TCP, with the cluster's TLS certificates if it has any. Between
processes of one user on one Linux machine it uses a Unix socket. No other user can connect to it
or read it, so it is not encrypted.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from clusterenv.errors import ConfigError, ConnectionClosed
from clusterenv.transport.connection import BlockingConnection
from clusterenv.transport.framing import MESSAGE_LIMIT

__all__ = ["Endpoint", "Listener", "connect"]

_TOKEN_BYTES = 32
_HANDSHAKE_SECONDS = 5.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_HAS_LOCAL = sys.platform == "linux"  # abstract socket names and SO_PEERCRED


class Endpoint(NamedTuple):
    """The addresses of a :class:`Listener`, and the token that it asks for."""

    host: str
    port: int
    local: bytes | None
    """Abstract name of a Unix socket, for clients on the same machine."""
    token: bytes


class Listener:
    """Accepts connections from clients that know the token.

    It listens on a TCP port, from the first to the last of ``ports`` if they are given, and with
    ``local`` also on a Unix socket. The TLS context is for TCP only. ``limit`` is the largest blob
    of a message, in bytes.
    """

    def __init__(
        self,
        host: str,
        context: ssl.SSLContext | None = None,
        ports: Sequence[int] | None = None,
        local: bool = True,
        limit: int = MESSAGE_LIMIT,
    ) -> None:
        self._context = context
        self._limit = limit
        tcp = _bind(host, ports)
        self._socks = [tcp]
        name = None
        if local and _HAS_LOCAL:
            name = b"\0clusterenv-" + secrets.token_hex(16).encode()
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socks.append(sock)
            try:
                sock.bind(name)
                sock.listen(4)
            except OSError:  # a system that forbids it; TCP will do
                self._socks.pop().close()
                name = None
        port: int = tcp.getsockname()[1]
        self.endpoint = Endpoint(host, port, name, secrets.token_bytes(_TOKEN_BYTES))

    def accept(self, timeout: float) -> BlockingConnection:
        """Return the first connection of a client that knows the token.

        Raises ``ConnectionClosed`` after ``timeout`` seconds, or if the listener was closed.
        """
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            for sock in self.arrivals(left):
                if (connection := self.admit(sock)) is not None:
                    return connection
        raise ConnectionClosed(f"the head did not connect within {timeout:g} s")

    def arrivals(self, timeout: float | None) -> Iterator[socket.socket]:
        """Yield the sockets of new clients; none if no client connects within ``timeout`` seconds.

        Raises ``ConnectionClosed`` if the listener was closed.
        """
        poll = select.poll()
        try:
            waiting = {sock.fileno(): sock for sock in self._socks}
            for number in waiting:
                poll.register(number, select.POLLIN)
            for number, _ in poll.poll(None if timeout is None else 1000 * timeout):
                yield waiting[number].accept()[0]
        except (OSError, ValueError) as error:
            raise ConnectionClosed("the listener was closed") from error

    def admit(self, sock: socket.socket) -> BlockingConnection | None:
        """Return the connection of a client that knows the token; close that of any other."""
        try:
            sock.settimeout(_HANDSHAKE_SECONDS)
            known = not _is_local(sock) or _peer_is_me(sock)
            if self._context is not None and not _is_local(sock):
                sock = self._context.wrap_socket(sock, server_side=True)
            if known and hmac.compare_digest(_read_token(sock), self.endpoint.token):
                return BlockingConnection(sock, self._limit)
        except OSError:
            pass
        sock.close()
        return None

    def close(self) -> None:
        """Stop listening."""
        for sock in self._socks:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            sock.close()


def _read_token(sock: socket.socket) -> bytes:
    given, deadline = b"", time.monotonic() + _HANDSHAKE_SECONDS
    while len(given) < _TOKEN_BYTES and (part := sock.recv(_TOKEN_BYTES - len(given))):
        given += part
        sock.settimeout(max(0.01, deadline - time.monotonic()))
    return given


def connect(endpoint: Endpoint, context: ssl.SSLContext | None, timeout: float) -> socket.socket:
    """Return a socket that is connected to a :class:`Listener` and has sent the token.

    It is a Unix socket if the listener is on this machine and has one. The caller makes the
    connection of it that it needs: ``NonBlockingConnection(connect(…))`` at the head. Raises
    ``OSError`` if the listener cannot be reached.
    """
    sock = _connect_local(endpoint.local) if endpoint.local is not None else None
    if sock is None:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout)
    try:
        if context is not None and not _is_local(sock):
            sock = context.wrap_socket(sock)
        sock.settimeout(None)
        sock.sendall(endpoint.token)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_local(name: bytes) -> socket.socket | None:
    """Return a socket connected to a Unix socket of this user, or ``None`` if there is none here.

    The name is random. A listener on another machine, or in another network namespace, is not
    found.
    """
    if not _HAS_LOCAL:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(name)
        if _peer_is_me(sock):
            return sock
    except OSError:
        pass
    sock.close()
    return None


def _is_local(sock: socket.socket) -> bool:
    return _HAS_LOCAL and sock.family == socket.AF_UNIX


def _peer_is_me(sock: socket.socket) -> bool:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())


def _bind(host: str, ports: Sequence[int] | None) -> socket.socket:
    if ports and not 0 < ports[0] <= ports[1] < 1 << 16:
        raise ConfigError(
            f"clusterenv.channel.ports is {list(ports)}; the first and the last port: [9000, 9100]"
        )
    candidates = range(ports[0], ports[1] + 1) if ports else (0,)
    error: OSError | None = None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in candidates:
        try:
            return socket.create_server((host, port), family=family, backlog=4)
        except OSError as problem:
            error = problem
    raise OSError(f"no free port for a connection on {host} in {ports}: {error}")
