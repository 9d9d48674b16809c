"""Connected sockets of every kind that connections use."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from distributed.security import Security

from clusterenv.transport.endpoint import Listener, connect

KINDS = ["plain", "tls", "local"]


@contextlib.contextmanager
def connected(kind: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give the sockets of a client and of a server; both are closed at the end."""
    server = client = None
    if kind == "tls":
        security = Security.temporary()
        server = security.get_listen_args("worker")["ssl_context"]
        client = security.get_connection_args("client")["ssl_context"]
    listener = Listener("127.0.0.1", server, local=kind == "local")
    with ThreadPoolExecutor() as pool:
        accepting = pool.submit(listener.accept, 5)
        ours = connect(listener.endpoint, client, 5)
        theirs = accepting.result()._socket._sock
    listener.close()
    yield ours, theirs
    for sock in (ours, theirs):
        with contextlib.suppress(OSError):
            sock.close()
