"""Per-process weight cache: shards in one process share one download."""

from __future__ import annotations

import threading
import weakref

from clusterenv.sync.weights import Weights

__all__ = ["WeightCache", "weight_cache_of"]


class WeightCache:
    """Holds the newest weights that any shard of a process has received.

    >>> import numpy as np
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
        cache = _caches.get(fleet)
        if cache is None:
            cache = _caches[fleet] = WeightCache()
        return cache
