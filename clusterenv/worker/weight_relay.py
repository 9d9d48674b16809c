"""Weights from worker to worker: a worker that has them serves others on the head's order."""

from __future__ import annotations

import socket
import ssl
import threading

import numpy as np

from clusterenv.data.pickling import dumps
from clusterenv.errors import ConnectionClosed
from clusterenv.sync.weight_cache import WeightCache
from clusterenv.sync.weights import Weights
from clusterenv.transport.connection import BlockingConnection
from clusterenv.transport.endpoint import Endpoint, Listener, connect
from clusterenv.transport.messages import MessageKind, WeightsMeta

__all__ = ["WeightRelay", "fetch"]


class WeightRelay:
    """Serves the weights of a process's cache to clients that know the listener's token."""

    def __init__(self, cache: WeightCache, listener: Listener) -> None:
        self.endpoint = listener.endpoint
        self._cache = cache
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
            self._listener.close()  # clients that connect now are refused at once

    def _answer(self, sock: socket.socket) -> None:
        connection = self._listener.admit(sock)
        if connection is None:
            return
        try:
            header = connection.recv_header()
            weights = self._cache.get(connection.recv_blob(header))
            if weights is not None:
                blob = dumps(tuple(WeightsMeta(weights.version, weights.digest)))
                connection.send(MessageKind.WEIGHTS, blob, [weights.buffer])
                connection.recv_header()  # until the client has everything and closes
        except ConnectionClosed:
            pass
        finally:
            connection.close()

    def close(self) -> None:
        """Stop serving."""
        self._listener.close()


def fetch(
    endpoint: Endpoint, version: int, nbytes: int, context: ssl.SSLContext | None, timeout: float
) -> Weights:
    """Download the weights of a version from a worker that has them.

    The timeout is for the answer to begin; how long the weights take depends on the network.

    Raises
    ------
    OSError
        If the worker cannot be reached or has another version, or the weights are damaged.
    """
    connection = BlockingConnection(connect(endpoint, context, timeout))
    late = threading.Timer(timeout, connection.close)
    late.start()
    try:
        connection.send(MessageKind.PULL, dumps(version))
        header = connection.recv_header()
        late.cancel()
        meta = WeightsMeta(*connection.recv_blob(header))
        buffer = np.empty(nbytes, np.uint8)
        connection.recv_body(header, [buffer])
    finally:
        late.cancel()
        connection.close()
    weights = Weights(version, buffer)
    if meta.version != version:
        raise ConnectionClosed(f"it has version {meta.version}, not {version}")
    if weights.digest != meta.digest:
        raise ConnectionClosed(f"the weights of version {version} arrived damaged")
    return weights
