"""Weights on their way to a shard: from the head, from its process's cache or another worker."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import weakref
from collections.abc import Callable

import numpy as np

from clusterenv.data.pickling import dumps
from clusterenv.errors import ConnectionClosed
from clusterenv.sync.weights import Weights
from clusterenv.transport.connection import BlockingConnection
from clusterenv.transport.endpoint import Endpoint, Listener, connect
from clusterenv.transport.messages import FROM_CACHE, MessageKind, WeightsMeta

__all__ = ["Fetch", "WeightCache", "WeightPuller", "WeightRelay", "fetch", "weight_cache_of"]

logger = logging.getLogger("clusterenv")

_CACHE_SECONDS = 5.0  # for another shard of the process to receive the weights

Fetch = Callable[[Endpoint, int, int], Weights]
"""Downloads weights from a worker's relay: its endpoint, the version, and the size in bytes."""


class WeightCache:
    """The newest weights that any shard of a process has received: they share one download.

    >>> cache = WeightCache()
    >>> cache.put(Weights(3, np.zeros(8, np.uint8)))
    >>> cache.get(2).version, cache.get(4)
    (3, None)
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._weights: Weights | None = None

    def put(self, weights: Weights) -> None:
        """Store weights, unless newer ones are there."""
        with self._changed:
            if self._weights is None or weights.version >= self._weights.version:
                self._weights = weights
            self._changed.notify_all()

    def get(self, version: int) -> Weights | None:
        """Return the weights of this or a newer version, if they are there."""
        weights = self._weights
        return weights if weights is not None and weights.version >= version else None

    def wait(self, version: int, timeout: float, cancelled: threading.Event) -> Weights | None:
        """Wait for weights of this or a newer version; ``None`` after the timeout.

        To end the wait earlier, set ``cancelled`` and call :meth:`wake`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.get(version) is not None or cancelled.is_set(), timeout
            )
            return self.get(version)

    def wake(self) -> None:
        """Have all waiting threads check whether they were cancelled."""
        with self._changed:
            self._changed.notify_all()


_lock = threading.Lock()
_caches: weakref.WeakValueDictionary[str, WeightCache] = weakref.WeakValueDictionary()


def weight_cache_of(fleet: str) -> WeightCache:
    """Return the cache that a fleet's shards share in this process; it lives as long as they do."""
    with _lock:
        return _caches.setdefault(fleet, WeightCache())


class WeightPuller:
    """Delivers the weights of each ``WEIGHTS`` message to a shard.

    Weights that are in the message or in the cache of the process are delivered at once. To wait
    for another shard of the process, or to download from another worker, the puller starts a
    thread. :meth:`pull` and :meth:`received` never block.

    ``deliver`` is called, in any thread, with the weights, and whether this shard has downloaded
    them. It is called with ``None`` if they were damaged, did not arrive within the deadline, or
    were replaced in the cache by a newer version.
    """

    def __init__(
        self,
        cache: WeightCache,
        fetch: Fetch | None,
        nbytes: int,
        deliver: Callable[[Weights | None, bool], None],
        first: int,
    ) -> None:
        self._cache = cache
        self._fetch = fetch
        self._nbytes = nbytes
        self._deliver = deliver
        self._name = f"clusterenv-pull-{first}"
        self._closed = threading.Event()

    def received(self, meta: WeightsMeta, weights: Weights) -> None:
        """Deliver weights that were the body of the message, if their checksum is right."""
        if weights.digest != meta.digest:
            logger.warning("the weights of version %d arrived damaged", meta.version)
            self._deliver(None, False)
        else:
            self._store(weights)

    def pull(self, meta: WeightsMeta) -> None:
        """Get weights from the source that the message names."""
        cached = self._cache.get(meta.version) if meta.source == FROM_CACHE else None
        if cached is not None:
            self._deliver_cached(meta, cached)
        else:
            threading.Thread(
                target=self._wait if meta.source == FROM_CACHE else self._download,
                args=(meta,),
                name=self._name,
                daemon=True,
            ).start()

    def close(self) -> None:
        """Deliver nothing more, and end the threads that wait for the cache."""
        self._closed.set()
        self._cache.wake()

    def _wait(self, meta: WeightsMeta) -> None:
        weights = self._cache.wait(meta.version, _CACHE_SECONDS, self._closed)
        if not self._closed.is_set():
            self._deliver_cached(meta, weights)

    def _deliver_cached(self, meta: WeightsMeta, weights: Weights | None) -> None:
        # A newer version may have replaced it, for another shard of the process.
        right = weights is not None and weights.version == meta.version
        self._deliver(weights if right else None, False)

    def _download(self, meta: WeightsMeta) -> None:
        try:
            assert self._fetch is not None
            assert isinstance(meta.source, tuple)
            weights = self._fetch(Endpoint(*meta.source), meta.version, self._nbytes)
        except OSError as error:
            logger.info("another worker did not send version %d: %s", meta.version, error)
            self._deliver(None, False)
        else:
            self._store(weights)

    def _store(self, weights: Weights) -> None:
        self._cache.put(weights)
        self._deliver(weights, True)


class WeightRelay:
    """Serves the weights of a process's cache to other workers, as the head orders them."""

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
    Raises ``OSError`` if the worker cannot be reached or has another version, or the weights are
    damaged.
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
