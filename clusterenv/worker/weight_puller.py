"""Gets weights for a shard, from wherever the head says, without delaying the shard's reader."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from clusterenv.sync.weight_cache import WeightCache
from clusterenv.sync.weights import Weights
from clusterenv.transport.endpoint import Endpoint
from clusterenv.transport.messages import FROM_CACHE, WeightsMeta

__all__ = ["Fetch", "WeightPuller"]

logger = logging.getLogger("clusterenv")

_CACHE_SECONDS = 5.0  # for another shard of the process to receive the weights

Fetch = Callable[[Endpoint, int, int], Weights]
"""Downloads weights from a worker's relay: its endpoint, the version, and the size in bytes."""


class WeightPuller:
    """Delivers the weights of each ``WEIGHTS`` message to a shard.

    Weights that are in the message or in the cache of the process are delivered at once. To wait
    for another shard of the process, or to download from another worker, the puller starts a
    thread. :meth:`pull` and :meth:`received` never block.

    Parameters
    ----------
    cache
        The weights that shards of this process have received.
    fetch
        Downloads weights from another worker.
    nbytes
        Size of the weights.
    deliver
        Called, in any thread, with the weights, and whether this shard has downloaded them. It is
        called with ``None`` if the weights were damaged or did not arrive within the deadline.
    name
        Suffix for the names of threads.
    """

    def __init__(
        self,
        cache: WeightCache,
        fetch: Fetch | None,
        nbytes: int,
        deliver: Callable[[Weights | None, bool], None],
        name: str = "",
    ) -> None:
        self._cache = cache
        self._fetch = fetch
        self._nbytes = nbytes
        self._deliver = deliver
        self._name = f"clusterenv-pull-{name}"
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
            self._deliver(cached, False)
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
            self._deliver(weights, False)

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
