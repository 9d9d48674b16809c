"""Who has to wait, learner or collection: never both, and the ratio holds."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from batches import Fleet, changed, fill

from clusterenv import Batch
from clusterenv.errors import ConfigError, EmptyStore, RatioError, SchemaMismatch
from clusterenv.store import Ratio, ReplayStore, Sequences, Uniform
from clusterenv.store.rate_limiter import RateLimiter


@pytest.mark.parametrize("seed", range(60))
def test_there_is_always_one_side_that_may_go_on_and_the_ratio_holds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    per_insert = float(rng.choice([0.05, 0.5, 1, 3, 8, 40])) * float(rng.uniform(0.5, 1.5))
    rows, n = int(rng.integers(1, 300)), int(rng.integers(1, 300))
    least = max(1.0, n, (n + rows * per_insert) / 2)
    slack = None if rng.random() < 0.5 else max(least, per_insert) * float(rng.uniform(1, 3))
    ratio = Ratio(per_insert, min_rows=int(rng.integers(1, 500)), slack=slack)
    ratio.check_sizes(rows, n)
    added = sampled = 0
    for _ in range(3000):
        may_add = ratio.may_add(rows, n, added=added, sampled=sampled)
        may_sample = ratio.may_sample(n, added=added, sampled=sampled, rows=rows)
        assert may_add or may_sample
        assert not may_sample or added >= ratio.min_rows
        if may_add and (not may_sample or rng.random() < 0.5):
            added += rows
        else:
            sampled += n
    ahead = sampled - (added - ratio.min_rows) * per_insert
    assert abs(ahead) <= max(slack or least, least) + rows * per_insert + n


@pytest.mark.parametrize("seed", range(20))
def test_sizes_that_change_stop_neither_side(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ratio = Ratio(float(rng.uniform(0.1, 20)), min_rows=int(rng.integers(1, 50)))
    store = ReplayStore(2000, ratio=ratio, side=1.0)
    fleet = Fleet(shards=1, envs=2, episode=20)
    for _ in range(150):
        rows = fleet.next(horizon=int(rng.integers(1, 30)))[1]
        n = int(rng.integers(1, 200))
        went_on = False
        for _ in range(2):  # each side knows of the other once it has been refused
            with contextlib.suppress(RatioError):
                store.add(fleet.batch(rows))
                went_on = True
            with contextlib.suppress(RatioError):
                store.sample(n)
                went_on = True
        assert went_on


def test_a_learner_that_is_ahead_is_told_to_wait_and_nothing_is_drawn() -> None:
    store = ReplayStore(200, ratio=Ratio(1, min_rows=24), seed=0)
    fleet = Fleet()
    fill(store, fleet, 1)
    assert not store.may_sample(8)
    with pytest.raises(RatioError, match=r"learner is ahead: 12 rows were added and 0 sampled"):
        store.sample(8)
    fill(store, fleet, 1)
    store.sample(8)
    assert store.stats.sampled_rows == 8


def test_a_collection_that_is_ahead_is_told_to_wait_and_no_row_is_added() -> None:
    store = ReplayStore(200, ratio=Ratio(4))
    fleet = Fleet()
    fill(store, fleet, 1)
    store.sample(2)
    batch = fleet.next()[0]
    assert not store.may_add(batch.num_rows)
    with pytest.raises(RatioError, match=r"learner is behind: 12 rows were added and 2 sampled"):
        store.add(batch)
    assert len(store) == 12
    while not store.may_add(batch.num_rows):
        store.sample(2)
    store.add(batch)


def test_rows_that_cannot_be_drawn_yet_do_not_stop_collection() -> None:
    store = ReplayStore(500, sampler=Sequences(20), ratio=1, seed=0)
    fleet = Fleet(shards=1, episode=1e9)
    for _ in range(5):  # sequences of 20 rows are complete with the fifth fragment of 4
        with pytest.raises(EmptyStore):
            store.sample(2)
        assert store.may_add(12)
        store.add(fleet.next()[0])
    store.sample(2)
    assert len(list(zip(range(20), store.feed(fleet, 2), strict=False))) == 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples_per_insert": 0}, r"samples_per_insert must be a number, .*got 0: .*Ratio\(8\)"),
        (
            {"samples_per_insert": -1},
            r"samples_per_insert must be a number, .*got -1: .*Ratio\(8\)",
        ),
        (
            {"samples_per_insert": float("nan")},
            r"samples_per_insert must be a number, .*got nan: .*Ratio\(8\)",
        ),
        (
            {"samples_per_insert": float("inf")},
            r"samples_per_insert must be a number, .*got inf: .*ratio=None",
        ),
        (
            {"samples_per_insert": "x"},
            r"samples_per_insert must be a number, .*got 'x': .*Ratio\(8\)",
        ),
        (
            {"samples_per_insert": None},
            r"samples_per_insert must be a number, .*got None: .*Ratio\(8\)",
        ),
        (
            {"samples_per_insert": 8, "min_rows": "1000"},
            r"min_rows must be an integer, .*got '1000': Ratio\(8, 1000\)",
        ),
        (
            {"samples_per_insert": 8, "slack": "64"},
            r"slack must be a number, got '64': Ratio\(8, slack=64\)",
        ),
        (
            {"samples_per_insert": 8, "min_rows": 0},
            r"min_rows must be an integer, .*got 0: Ratio\(8, 1000\)",
        ),
        ({"samples_per_insert": 8, "slack": 4}, r"slack=4 would stop both sides.*slack=64\)"),
        ({"samples_per_insert": 8, "slack": float("nan")}, "slack must be a number, got nan"),
        ({"samples_per_insert": 0.5, "slack": 0.5}, r"at least 1: Ratio\(0\.5, slack=8\)"),
    ],
)
def test_settings_that_would_stop_both_sides_are_refused_with_the_reason(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Ratio(**settings)


def test_more_rows_to_begin_with_than_the_store_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_rows=101 .*capacity=100.*min_rows=50\)"):
        ReplayStore(100, ratio=Ratio(8, min_rows=101))


def test_slack_too_small_for_the_sizes_names_one_that_is_enough() -> None:
    store = ReplayStore(200, ratio=Ratio(2, slack=10))
    fill(store, Fleet(), 1)
    with pytest.raises(RatioError, match=r"12 rows and samples of 8.*Ratio\(2, slack=16\)"):
        store.sample(8)
    Ratio(2, slack=16).check_sizes(12, 8)


def test_a_number_is_a_ratio() -> None:
    assert ReplayStore(100, ratio=4).ratio == Ratio(4)


# feed


def test_feeding_from_a_finite_source_adds_everything_and_ends() -> None:
    fleet = Fleet()
    batches = [fleet.next()[0] for _ in range(10)]
    store = ReplayStore(500, ratio=Ratio(2), seed=0)
    samples = list(store.feed(batches, 6))
    assert store.stats.added_rows == 120
    assert abs(6 * len(samples) - 2 * 120) <= 2 * 15 + 12
    assert all(len(sample["reward"]) == 6 for sample in samples)


class Source:
    """Batches that arrive as they are let through; taking one that is not there is an error."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.arrived: deque[Batch] = deque()
        self.waited = 0

    @property
    def ready(self) -> int:
        return len(self.arrived)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self.arrived:
            self.waited += 1
            return self.fleet.next()[0]
        return self.arrived.popleft()

    def arrive(self, count: int) -> None:
        self.arrived += [self.fleet.next()[0] for _ in range(count)]


def test_feeding_waits_for_a_batch_only_when_no_sample_may_be_taken() -> None:
    source = Source(Fleet())
    store = ReplayStore(5000, seed=0)
    samples = store.feed(source, 6)
    next(samples)
    assert (source.waited, store.stats.added_rows) == (1, 12)
    for _ in range(5):
        next(samples)
    assert (source.waited, store.stats.added_rows) == (1, 12)
    source.arrive(3)
    next(samples)
    assert (source.waited, store.stats.added_rows) == (1, 48)


def test_batches_that_the_ratio_does_not_allow_stay_with_the_source() -> None:
    source = Source(Fleet())
    source.arrive(50)
    store = ReplayStore(5000, ratio=Ratio(4), seed=0)
    samples = store.feed(source, 12)
    for _ in range(20):
        next(samples)
    assert source.waited == 0
    assert source.ready > 38
    assert abs(store.stats.sampled_rows - 4 * store.stats.added_rows) <= 4 * 12 + 12 + 30


def test_a_slow_source_makes_the_learner_wait() -> None:
    source = Source(Fleet())
    store = ReplayStore(5000, ratio=Ratio(0.5), seed=0)
    samples = store.feed(source, 12)
    for _ in range(20):
        next(samples)
    assert source.waited >= 20 * 12 / 0.5 / 12 - 4


def test_feeding_goes_on_with_rows_that_a_store_has_already() -> None:
    source = Source(Fleet())
    store = ReplayStore(5000, seed=0)
    fill(store, source.fleet, 3)
    next(store.feed(source, 6))
    assert source.waited == 0


def test_feeding_with_slack_that_stops_both_sides_says_so_instead_of_waiting() -> None:
    store = ReplayStore(200, ratio=Ratio(2, slack=10))
    with pytest.raises(RatioError, match=r"Ratio\(2, slack=16\)"):
        next(store.feed(Source(Fleet()), 8))


def sized(horizons: list[int]) -> list[Batch]:
    """Return batches of so many time rows."""
    fleet = Fleet(shards=1, envs=2, episode=20)
    return [fleet.next(horizon=horizon)[0] for horizon in horizons]


def rewards(batches: list[Batch]) -> list[float]:
    return [float(reward) for batch in batches for reward in batch.flat("reward")]


def held(store: ReplayStore) -> list[float]:
    """Return the rewards of all rows, oldest first."""
    assert store._buffer.ring is not None
    return rewards([store._buffer.ring.batch(block) for block in store._buffer.ring.blocks])


def test_feeding_keeps_a_batch_larger_than_any_before_until_the_learner_has_caught_up() -> None:
    batches = sized([1, 2, 4, 8, 16, 32, 8, 12])
    store = ReplayStore(2000, side=1.0, ratio=Ratio(4), seed=0)
    for _ in store.feed(batches, 5):
        ahead = store.stats.sampled_rows - 4 * store.stats.added_rows
        assert abs(ahead) <= 4 * 64 + 5  # the largest batch, and a sample
    assert held(store) == rewards(batches)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ready", [False, True], ids=["list", "collector"])
def test_feeding_adds_batches_of_any_sizes_each_once_and_in_order(seed: int, ready: bool) -> None:
    rng = np.random.default_rng(seed)
    batches = sized(rng.integers(1, 40, 40).tolist())
    ratio = Ratio(float(rng.uniform(0.1, 12)), min_rows=int(rng.integers(1, 60)))
    store = ReplayStore(4000, side=1.0, ratio=ratio, seed=0)
    samples = store.feed(Arrived(batches) if ready else batches, int(rng.integers(1, 80)))
    for _ in samples:
        if rng.random() < 0.1:
            with contextlib.suppress(RatioError):
                store.sample(int(rng.integers(1, 200)))  # by hand, of any size
    assert held(store) == rewards(batches)


class Arrived:
    """Batches that are all there."""

    def __init__(self, batches: list[Batch]) -> None:
        self.left = deque(batches)

    @property
    def ready(self) -> int:
        return len(self.left)

    def __iter__(self) -> Iterator[Batch]:
        while self.left:
            yield self.left.popleft()


def test_a_postponed_batch_is_added_by_the_next_feed() -> None:
    batches = sized([2, 2, 40, 2])
    source = Arrived(batches)
    store = ReplayStore(2000, side=1.0, ratio=Ratio(4), seed=0)
    samples = store.feed(source, 4)
    while source.ready > 1:
        next(samples)
    assert store.stats.added_rows == 8  # of the third, none yet
    samples.close()  # type: ignore[attr-defined]
    for _ in store.feed(source, 4):
        pass
    assert held(store) == rewards(batches)


def test_feeding_says_when_a_larger_batch_makes_slack_too_small_and_keeps_the_batch() -> None:
    batches = sized([4, 4, 40])
    store = ReplayStore(2000, side=1.0, ratio=Ratio(2, slack=16), seed=0)
    with pytest.raises(RatioError, match=r"80 rows and samples of 8.*Ratio\(2, slack=84\)"):
        list(store.feed(batches, 8))
    store.ratio = Ratio(2, slack=84)
    list(store.feed([], 8))
    assert held(store) == rewards(batches)


def test_feeding_a_batch_that_never_fits_is_refused_at_once() -> None:
    batches = sized([2, 100])
    store = ReplayStore(150, side=1.0, ratio=Ratio(4), seed=0)
    with pytest.raises(ConfigError, match=r"batch of 200 rows does not fit into capacity=150"):
        list(store.feed(batches, 4))


def test_a_batch_that_is_refused_says_nothing_of_the_sizes_that_come() -> None:
    store = ReplayStore(2000, side=1.0, ratio=Ratio(2, slack=16), seed=0)
    small, large = sized([4, 40])
    store.add(small)
    with pytest.raises(SchemaMismatch):
        store.add(changed(large, version=None))
    assert len(store.sample(8)["reward"]) == 8


# The rate limiter without a store


def test_without_a_ratio_nothing_is_limited() -> None:
    limiter = RateLimiter(None, 100, Uniform())
    limiter.check_sample(10**6, added=0, sampled=0)
    limiter.check_add(10**6, added=0, sampled=0)


def test_a_limiter_says_which_side_is_ahead() -> None:
    limiter = RateLimiter(2, 100, Uniform())
    limiter.batch_rows = 10
    limiter.check_add(10, added=0, sampled=0)
    limiter.check_sample(8, added=10, sampled=0)
    with pytest.raises(RatioError, match="the learner is ahead: 10 rows were added and 40 sampled"):
        limiter.check_sample(8, added=10, sampled=40)
    with pytest.raises(RatioError, match="the learner is behind: 90 rows were added and 8 sampled"):
        limiter.check_add(10, added=90, sampled=8)


def test_collection_is_not_limited_while_the_sampler_finds_nothing() -> None:
    limiter = RateLimiter(2, 100, Uniform())
    assert limiter.may_add(10, added=90, sampled=0)  # no sample yet
    limiter.check_sample(1, added=1, sampled=0)
    assert not limiter.may_add(10, added=90, sampled=0)
    limiter.starved = True
    assert limiter.may_add(10, added=90, sampled=0)
