"""Where shards of one process leave weights for each other, so that they travel there once."""

from __future__ import annotations

import threading
import weakref

from clusterenv.sync.weights import Weights

__all__ = ["WeightCache", "weight_cache_of"]


class WeightCache:
    """Holds the newest weights that any shard of a process has received."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._weights: Weights | None = None

    def put(self, weights: Weights) -> None:
        """Leave weights for the others; older ones than those there are not kept."""
        with self._changed:
            if self._weights is None or weights.version >= self._weights.version:
                self._weights = weights
            self._changed.notify_all()

    def take(self, version: int, timeout: float) -> Weights | None:
        """Return these weights or newer ones, and wait for them; ``None`` if they do not come."""
        with self._changed:
            self._changed.wait_for(lambda: self._has(version), timeout)
            return self._weights if self._has(version) else None

    def _has(self, version: int) -> bool:
        return self._weights is not None and self._weights.version >= version


_lock = threading.Lock()
_shelves: weakref.WeakValueDictionary[str, WeightCache] = weakref.WeakValueDictionary()


def weight_cache_of(fleet: str) -> WeightCache:
    """Return the shelf of a fleet's shards in this process; it goes with the last of them."""
    with _lock:
        shelf = _shelves.get(fleet)
        if shelf is None:
            shelf = _shelves[fleet] = WeightCache()
        return shelf
