"""Weights from worker to worker: who has them serves those whom the head sends."""

from __future__ import annotations

import socket
import ssl
import threading

import numpy as np

from clusterenv.data.pickling import dumps
from clusterenv.errors import ConnectionClosed
from clusterenv.sync.weight_cache import WeightCache
from clusterenv.sync.weights import Weights
from clusterenv.transport.endpoint import Endpoint, Listener, reach
from clusterenv.transport.messages import MessageKind

__all__ = ["WeightRelay", "fetch"]


class WeightRelay:
    """Serves what is on a process's shelf to whoever knows the listener's token."""

    def __init__(self, shelf: WeightCache, listener: Listener) -> None:
        self.endpoint = listener.endpoint
        self._shelf = shelf
        self._listener = listener
        threading.Thread(target=self._run, name="clusterenv-relay", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                for sock in self._listener.arrivals(None):
                    threading.Thread(
                        target=self._answer, args=(sock,), name="clusterenv-relay", daemon=True
                    ).start()
        except ConnectionClosed:
            pass
        finally:
            self._listener.close()  # who comes now is refused at once

    def _answer(self, sock: socket.socket) -> None:
        connection = self._listener.admit(sock)
        if connection is None:
            return
        try:
            header = connection.recv_header()
            weights = self._shelf.take(connection.recv_blob(header), timeout=0)
            if weights is not None:
                blob = dumps((weights.version, weights.digest))
                connection.send(MessageKind.WEIGHTS, blob, [weights.buffer])
                connection.recv_header()  # until the other end has all, and closes
        except ConnectionClosed:
            pass
        finally:
            connection.close()

    def close(self) -> None:
        """Serve nobody any more."""
        self._listener.close()


def fetch(
    endpoint: Endpoint, version: int, nbytes: int, context: ssl.SSLContext | None, timeout: float
) -> Weights:
    """Get weights of this version from a worker that has them.

    The time limit is for it to answer: how long the weights then take depends on the network.

    Raises
    ------
    OSError
        If it cannot be reached, has others, or what came is damaged.
    """
    connection = reach(endpoint, context, timeout)
    late = threading.Timer(timeout, connection.close)
    late.start()
    try:
        connection.send(MessageKind.PULL, dumps(version))
        header = connection.recv_header()
        late.cancel()
        found, digest = connection.recv_blob(header)
        buffer = np.empty(nbytes, np.uint8)
        connection.recv_body(header, [buffer])
    finally:
        late.cancel()
        connection.close()
    weights = Weights(found, buffer)
    if found != version:
        raise ConnectionClosed(f"it has version {found}, not {version}")
    if weights.digest != digest:
        raise ConnectionClosed(f"the weights of version {found} arrived damaged")
    return weights
