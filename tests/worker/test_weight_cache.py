from __future__ import annotations

import gc
import threading

import numpy as np

from clusterenv.sync.weights import Weights
from clusterenv.worker.weight_transfer import WeightCache, weight_cache_of


def weights(version: int) -> Weights:
    return Weights(version, np.zeros(8, np.uint8))


def test_weights_serve_requests_for_their_version_and_older_ones() -> None:
    cache = WeightCache()
    assert cache.get(1) is None
    cache.put(weights(3))
    cache.put(weights(2))  # arrived later, and is older
    for version in (1, 2, 3):
        found = cache.get(version)
        assert found is not None
        assert found.version == 3
    assert cache.get(4) is None


def test_waiting_ends_with_the_weights_the_timeout_or_a_cancellation() -> None:
    cache, cancelled = WeightCache(), threading.Event()
    assert cache.wait(4, 0.01, cancelled) is None
    timer = threading.Timer(0.05, cache.put, [weights(4)])
    timer.start()
    found = cache.wait(4, 60, cancelled)
    assert found is not None
    assert found.version == 4

    def cancel() -> None:
        cancelled.set()
        cache.wake()

    timer = threading.Timer(0.05, cancel)
    timer.start()
    assert cache.wait(5, 60, cancelled) is None
    timer.join()


def test_a_cache_lives_as_long_as_the_shards_that_share_it() -> None:
    ours = weight_cache_of("fleet")
    assert weight_cache_of("fleet") is ours
    assert weight_cache_of("other") is not ours
    ours.put(weights(1))
    del ours
    gc.collect()
    assert weight_cache_of("fleet").get(1) is None
