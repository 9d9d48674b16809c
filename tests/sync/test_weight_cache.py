from __future__ import annotations

import gc
import threading

import numpy as np

from clusterenv.sync.weight_cache import WeightCache, weight_cache_of
from clusterenv.sync.weights import Weights


def weights(version: int) -> Weights:
    return Weights(version, np.zeros(8, np.uint8))


def test_weights_wait_for_whoever_wants_them_or_older_ones() -> None:
    shelf = WeightCache()
    assert shelf.take(1, timeout=0) is None
    shelf.put(weights(3))
    shelf.put(weights(2))  # came later, and is older
    for version in (1, 2, 3):
        taken = shelf.take(version, timeout=0)
        assert taken is not None
        assert taken.version == 3
    assert shelf.take(4, timeout=0.01) is None
    timer = threading.Timer(0.05, shelf.put, [weights(4)])
    timer.start()
    taken = shelf.take(4, timeout=10)
    assert taken is not None
    assert taken.version == 4


def test_a_shelf_goes_with_the_last_shard() -> None:
    ours = weight_cache_of("fleet")
    assert weight_cache_of("fleet") is ours
    assert weight_cache_of("other") is not ours
    ours.put(weights(1))
    del ours
    gc.collect()
    assert weight_cache_of("fleet").take(1, timeout=0) is None
