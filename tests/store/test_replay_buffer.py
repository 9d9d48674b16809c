"""Rows and sampler without rate limit, journal and lock."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from batches import Fleet, Vector, same, transitions

from clusterenv.errors import ConfigError, EmptyStore
from clusterenv.store import Prioritized, ReplayStore, Uniform
from clusterenv.store.replay_buffer import ReplayBuffer, check_priorities


def test_columns_are_allocated_with_the_first_batch_that_fits() -> None:
    buffer, fleet = ReplayBuffer(20, Uniform()), Fleet(shards=1)
    with pytest.raises(ConfigError, match="does not fit into capacity=20"):
        buffer.check(fleet.next(horizon=9)[0])
    assert buffer.ring is None
    assert buffer.stats.nbytes == 0
    buffer.check(fleet.next()[0])
    assert buffer.stats.nbytes > 0
    assert buffer.added == 0


def test_checked_batches_are_added_sampled_and_counted() -> None:
    buffer, fleet = ReplayBuffer(100, Uniform(replace=False), seed=1), Fleet()
    with pytest.raises(EmptyStore, match="holds no rows"):
        buffer.check_columns(())
    batch, rows = fleet.next()
    buffer.add(batch, buffer.check(batch))
    sample = buffer.sample(len(rows), buffer.check_columns(("obs", "step")))
    order = np.argsort(sample["indices"])
    found = {name: column[order] for name, column in sample.items()}
    same(found, transitions(rows, Vector()))
    assert found["step"].tolist() == [row.step for row in rows]
    assert (buffer.stats.added_rows, buffer.stats.sampled_rows) == (len(rows), len(rows))


def test_a_closed_buffer_drops_its_arrays_though_the_sampler_refers_to_the_ring() -> None:
    buffer, batch = ReplayBuffer(100, Prioritized()), Fleet().next()[0]
    buffer.add(batch, buffer.check(batch))
    ring = buffer.ring
    assert ring is not None
    buffer.close()
    assert not ring.columns
    assert not len(ring.steps)
    assert buffer.ring is None


def test_a_store_without_references_is_freed_without_garbage_collection() -> None:
    store = ReplayStore(100, ratio=1)
    store.add(Fleet().next()[0])
    columns = weakref.ref(store._buffer)
    gc.disable()
    try:
        del store
        assert columns() is None  # the rows may be gigabytes
    finally:
        gc.enable()


def test_priorities_must_be_one_number_per_index() -> None:
    rows, values = check_priorities([1, 2], [0.5, 1.0])
    assert (rows.tolist(), values.tolist()) == ([1, 2], [0.5, 1.0])
    for indices, priorities in (([1, 2], [0.5]), ([[1]], [[1.0]])):
        with pytest.raises(ConfigError, match="one number per index"):
            check_priorities(indices, priorities)
