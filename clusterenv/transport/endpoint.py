"""How the head and a shard find each other: one listens, the other comes with a token.

Between machines a connection is a TCP connection, under the cluster's TLS certificates if it has
any. Between processes of one user on one Linux machine it is a Unix socket: nobody else can
connect to it or read along, so there is nothing to encrypt.
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
from collections.abc import Sequence
from typing import NamedTuple

from clusterenv.errors import ConfigError, ConnectionClosed
from clusterenv.transport.connection import MESSAGE_LIMIT, Connection

__all__ = ["Endpoint", "Listener", "reach"]

_TOKEN_BYTES = 32
_HANDSHAKE_SECONDS = 5.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_HAS_LOCAL = sys.platform == "linux"  # names without files, and peers that cannot lie who they are


class Endpoint(NamedTuple):
    """Where a shard listens, and what the head must say there."""

    host: str
    port: int
    local: bytes | None
    """Name of a Unix socket without a file, for a head on the same machine."""
    token: bytes


class Listener:
    """Waits for those who know the token.

    Parameters
    ----------
    host
        Where to listen.
    context
        Of TLS, for heads that come by TCP.
    ports
        The first and the last port allowed.
    local
        Whether to listen on a Unix socket too.
    limit
        Largest message of a connection, in bytes.
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
            try:
                self._socks.append(_bind_local(name))
            except OSError:  # a system that forbids it; TCP will do
                name = None
        port: int = tcp.getsockname()[1]
        self.endpoint = Endpoint(host, port, name, secrets.token_bytes(_TOKEN_BYTES))

    def accept(self, timeout: float) -> Connection:
        """Return the head's connection; strangers are turned away without an answer.

        Raises
        ------
        ConnectionClosed
            If the head did not come within ``timeout`` seconds, or the listener was closed.
        """
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            admitted = [
                connection
                for sock in self.arrivals(left)
                if (connection := self.admit(sock)) is not None
            ]
            for connection in admitted[1:]:  # there is one head
                connection.close()
            if admitted:
                return admitted[0]
        raise ConnectionClosed(f"the head did not connect within {timeout:g} s")

    def arrivals(self, timeout: float | None) -> list[socket.socket]:
        """Return those who knock, or nobody if none does in time.

        Raises
        ------
        ConnectionClosed
            If the listener was closed.
        """
        poll = select.poll()
        try:
            waiting = {sock.fileno(): sock for sock in self._socks}
            for number in waiting:
                poll.register(number, select.POLLIN)
            ready = poll.poll(None if timeout is None else 1000 * timeout)
            return [waiting[number].accept()[0] for number, _ in ready]
        except (OSError, ValueError) as error:
            raise ConnectionClosed("the listener was closed") from error

    def admit(self, sock: socket.socket) -> Connection | None:
        """Return the connection of one who knows the token; a stranger's connection is closed."""
        try:
            sock.settimeout(_HANDSHAKE_SECONDS)
            known = not _is_local(sock) or _peer_is_me(sock)
            if self._context is not None and not _is_local(sock):
                sock = self._context.wrap_socket(sock, server_side=True)
            if known and hmac.compare_digest(_read_token(sock), self.endpoint.token):
                sock.settimeout(None)
                return Connection(sock, self._limit)
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


def reach(
    endpoint: Endpoint,
    context: ssl.SSLContext | None,
    timeout: float,
    limit: int = MESSAGE_LIMIT,
) -> Connection:
    """Connect to a :class:`Listener`, the shortest way there is.

    Raises
    ------
    OSError
        If nobody answers.
    """
    sock = _connect_local(endpoint.local) if endpoint.local is not None else None
    if sock is None:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout)
    try:
        if context is not None and not _is_local(sock):
            sock = context.wrap_socket(sock)
        sock.settimeout(None)
        sock.sendall(endpoint.token)
        return Connection(sock, limit)
    except BaseException:
        sock.close()
        raise


def _connect_local(name: bytes) -> socket.socket | None:
    """Return a connection to a Unix socket of this user, or ``None`` if there is none here.

    The name is random, so whoever has it on this machine is the shard; one on another machine,
    or in a network of its own, is not found.
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


def _bind_local(name: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(name)
        sock.listen(4)
    except BaseException:
        sock.close()
        raise
    return sock


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
