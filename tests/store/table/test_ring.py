"""Rows in, rows out: every row with its own next observation, whatever left meanwhile."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from batches import (
    Content,
    Fleet,
    Frames,
    Row,
    TwoLeaves,
    Vector,
    all_of,
    changed,
    fill,
    same,
    transitions,
)

from clusterenv import Batch
from clusterenv.errors import ConfigError, EmptyStore, SchemaMismatch
from clusterenv.store import ReplayStore, Uniform


def store_of(capacity: int, **options: Any) -> ReplayStore:
    return ReplayStore(capacity, sampler=Uniform(replace=False), **options)


def check(store: ReplayStore, added: list[Row], content: Content) -> None:
    """Compare all rows of a store with the newest of those that were added."""
    found = all_of(store)
    rows = added[len(added) - len(store) :]
    assert found["indices"].tolist() == list(range(len(added) - len(store), len(added)))
    same(found, transitions(rows, content))


@pytest.mark.parametrize("seed", range(24))
def test_every_row_has_its_own_next_observation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    content = (Vector(), TwoLeaves())[seed % 2]
    envs, horizon = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    fleet = Fleet(
        content,
        seed=seed,
        shards=int(rng.integers(1, 4)),
        envs=envs,
        horizon=horizon,
        episode=float(rng.choice([1.5, 4, 30])),
        tracks=bool(rng.integers(2)),
        state=bool(rng.integers(2)),
    )
    capacity = int(envs * horizon * rng.uniform(1, 7))
    store = store_of(capacity, side=1.0)
    added: list[Row] = []
    for turn in range(25):
        if rng.random() < 0.1:
            fleet.restart(int(rng.integers(fleet.shards)))
        batch, rows = fleet.next()
        if rng.random() < 0.1:
            continue  # a fragment that never arrived
        store.add(batch)
        added += rows
        assert min(len(added), capacity - envs + 1) <= len(store) <= capacity
        if turn % 3 == 0:
            check(store, added, content)
    check(store, added, content)


@pytest.mark.parametrize("seed", range(6))
def test_batches_of_changing_size_wrap_around_a_capacity_that_none_divides(seed: int) -> None:
    fleets = [Fleet(seed=seed, shards=1, envs=envs, episode=5) for envs in (1, 4, 3)]
    rng = np.random.default_rng(seed)
    store, added, first = store_of(37, side=1.0), [], 0
    for _ in range(60):
        batch, rows = fleets[int(rng.integers(3))].next(0, horizon=int(rng.integers(1, 6)))
        store.add(batch)
        added += rows
        check(store, added, Vector())
        assert store.stats.evicted_rows >= first  # a row that left does not come back
        first = store.stats.evicted_rows


def test_rows_leave_early_when_there_is_no_room_beside_them() -> None:
    fleet = Fleet(shards=1, envs=2, horizon=4, episode=1.2)
    store, added = store_of(4000, side=0.01), []  # room for 1024, and nearly every row needs one
    for turn in range(300):
        batch, rows = fleet.next()
        store.add(batch)
        added += rows
        if turn % 20 == 0:
            check(store, added, Vector())
    check(store, added, Vector())
    assert 900 < len(store) < 1400


def test_a_store_that_holds_less_for_want_of_room_says_so_once_and_what_helps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def filled(side: float) -> ReplayStore:
        fleet = Fleet(shards=1, envs=2, horizon=8, episode=1e9)  # every eighth row is an end
        store = store_of(16_000, side=side)
        for _ in range(1500):
            store.add(fleet.next()[0])
        return store

    assert len(filled(0.07)) < 0.6 * 16_000
    (record,) = caplog.records
    found = re.search(r"full with ([\d,]+) of 16,000 rows.*16_000, side=(.*)\)", record.message)
    assert found is not None
    assert abs(int(found[1].replace(",", "")) - 0.07 * 8 * 16_000) < 100
    caplog.clear()
    assert len(filled(float(found[2]))) > 15_900
    assert not caplog.records


def test_a_batch_with_more_ends_than_room_is_refused_and_nothing_is_lost() -> None:
    fleet = Fleet(shards=1, envs=1, horizon=1500, episode=1e9)
    store = store_of(4000, side=0.01)
    added = fill(store, fleet, 2)
    fleet.episode = 1.01
    with pytest.raises(ConfigError, match=r"beside those of its rows.*room for 1,024.*side=1\.0"):
        store.add(fleet.next()[0])
    check(store, added, Vector())


def test_nothing_is_joined_across_a_restart_that_goes_on_counting() -> None:
    fleet = Fleet(shards=1, envs=1, horizon=3, episode=1e9)
    store = store_of(100)
    first, second = fleet.rows(0), fleet.rows(0)
    store.add(fleet.batch(first))
    store.add(changed(fleet.batch(second), incarnation=1))
    at = int(np.flatnonzero(store.sample(6)["indices"] == 2)[0])
    assert store._buffer.ring is not None
    assert store._buffer.ring.next[2] >= store.capacity
    assert at >= 0


def test_fragments_of_an_episode_are_joined_and_those_with_a_gap_are_not() -> None:
    fleet = Fleet(shards=1, envs=1, horizon=3, episode=1e9)
    store = store_of(100)
    for turn in range(4):
        batch, _ = fleet.next()
        if turn != 2:
            store.add(batch)
    assert store._buffer.ring is not None
    assert store._buffer.ring.next[:9].tolist()[2] == 3
    assert store._buffer.ring.next[:9].tolist()[5] >= 100


def test_observations_of_long_episodes_take_at_most_a_tenth_more() -> None:
    capacity = 20_000
    fleet = Fleet(shards=1, envs=8, horizon=128, episode=200)
    store = store_of(capacity)
    added = []
    while len(added) < 1.5 * capacity:
        batch, rows = fleet.next()
        store.add(batch)
        added += rows
    assert store._buffer.ring is not None
    assert store._buffer.ring.columns["obs"].nbytes <= 1.1 * capacity * 6 * 4
    assert len(store) > 0.99 * capacity
    check(store, added, Vector())


def test_a_sample_is_the_callers_own() -> None:
    store, fleet = store_of(50), Fleet()
    added = fill(store, fleet, 3)
    for column in store.sample(len(store)).values():
        column[...] = 0
    check(store, added, Vector())


def test_a_batch_may_be_changed_after_it_was_added() -> None:
    store, fleet = store_of(50), Fleet()
    batch, rows = fleet.next()
    store.add(batch)
    for name in batch.names:
        batch.flat(name)[...] = 0
    batch.tail["obs"][...] = 0
    check(store, rows, Vector())


def test_further_columns_come_on_request() -> None:
    store, fleet = store_of(50), Fleet()
    rows = fill(store, fleet, 2)
    sample = store.sample(len(rows), columns=("env", "step"))
    expected = [rows[at] for at in sample["indices"]]
    assert sample["env"].tolist() == [row.env for row in expected]
    assert sample["step"].tolist() == [row.step for row in expected]


def test_observations_asked_for_again_are_still_whole_stacks() -> None:
    store, fleet = store_of(50, stack=4), Fleet(Frames())
    fill(store, fleet, 2)
    assert store.sample(8, columns=("obs",))["obs"].shape == (8, 4, 6, 6)


def test_the_order_of_columns_does_not_matter() -> None:
    store, fleet = store_of(50), Fleet(TwoLeaves())
    (first, rows), (second, more) = fleet.next(), fleet.next()
    store.add(first)
    backwards = {name: second.flat(name) for name in reversed(second.names)}
    store.add(
        Batch(
            backwards,
            second.num_envs,
            tail_rows=second.tail_rows,
            tail=dict(reversed(second.tail.items())),
            state={},
            run=second.run,
            shard=second.shard,
            incarnation=second.incarnation,
            policy_version=0,
        )
    )
    check(store, rows + more, TwoLeaves())


GOOD = Fleet(state=True).next()[0]
ROWS = GOOD.num_rows
TAIL = GOOD.tail["obs"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (changed(GOOD, action=np.ones(ROWS, np.int32)), r"'action' expected int64 .*got int32"),
        (changed(GOOD, obs=np.ones((ROWS, 7), np.float32)), r"'obs' expected .*\[6\], got .*\[7\]"),
        (changed(GOOD, version=None), r"column 'version' expected int32 .*, got none"),
        (changed(GOOD, value=np.ones(ROWS)), r"column 'value' expected none, got float64"),
        (changed(GOOD, state={}), r"state 'h' expected float32 \[3\], got none"),
        (changed(GOOD, state={"h": np.ones((3, 9), np.float32)}), r"'h' expected .*got .*\[9\]"),
        (changed(GOOD, state={"h": np.ones((1, 3), np.float32)}), r"state 'h' .* 1 .* 3 env"),
        (changed(GOOD, tail={"obs": TAIL[:, :1]}), r"next 'obs' expected .*\[6\], got .*\[1\]"),
        (changed(GOOD, tail={"obs": TAIL[:1]}), r"next 'obs' .* 1 .* \d+ tail_rows"),
        (changed(GOOD, tail={}), r"next 'obs' expected .*got none"),
    ],
)
def test_a_batch_that_does_not_fit_names_the_difference(other: Batch, message: str) -> None:
    fleet = Fleet(state=True)
    store = store_of(100)
    rows = fill(store, fleet, 2)
    with pytest.raises(SchemaMismatch, match=message):
        store.add(other)
    check(store, rows, Vector())


@pytest.mark.parametrize("name", ["obs", "action", "reward", "terminated", "env", "step"])
def test_a_first_batch_without_a_needed_column_names_it(name: str) -> None:
    batch = Fleet().next()[0]
    if name == "reward":
        columns = {k: batch.flat(k) for k in batch.names if k != name}
        columns = {"reward_": batch.flat("reward"), **columns}
        other = changed(batch)
        other._columns = columns
    else:
        other = changed(batch, **{name: None})
    store = store_of(100)
    with pytest.raises(SchemaMismatch, match=rf"no column '{name}', only .*batches of a Collector"):
        store.add(other)
    assert len(store) == 0


@pytest.mark.parametrize("which", ["end of an episode", "end of the fragment"])
def test_a_batch_that_would_join_episodes_is_refused(which: str) -> None:
    fleet = Fleet(shards=1, envs=2, horizon=6, episode=2)
    batch, rows = fleet.next()
    ends = [at for at in range(10) if rows[at].terminated or rows[at].truncated]
    without = batch.tail_rows != (ends[0] if "episode" in which else 11)
    bad = changed(
        batch, tail_rows=batch.tail_rows[without], tail={"obs": batch.tail["obs"][without]}
    )
    store = store_of(100)
    with pytest.raises(SchemaMismatch, match=r"next observation.*tail_rows"):
        store.add(bad)
    store.add(batch)
    check(store, rows, Vector())


def test_a_batch_larger_than_the_store_names_a_capacity() -> None:
    fleet = Fleet(horizon=10)
    with pytest.raises(ConfigError, match=r"batch of 30 rows .* capacity=20: ReplayStore\(300\)"):
        store_of(20).add(fleet.next()[0])


@pytest.mark.parametrize("env", [-1, 2**30])
def test_invalid_environment_numbers_are_refused(env: int) -> None:
    fleet = Fleet()
    store = store_of(100)
    rows = fill(store, fleet, 2)
    with pytest.raises(ConfigError, match=rf"column 'env' goes from {env} to {env}.*from 0"):
        store.add(changed(fleet.next()[0], env=np.full(12, env, np.int32)))
    check(store, rows, Vector())


@pytest.mark.parametrize("env", [-1, 2**30])
def test_a_batch_that_is_refused_costs_a_full_store_no_row(env: int) -> None:
    fleet = Fleet()
    store = store_of(30)
    rows = fill(store, fleet, 5)
    before = store.stats
    with pytest.raises(ConfigError, match="column 'env'"):
        store.add(changed(fleet.next()[0], env=np.full(12, env, np.int32)))
    assert store.stats == before
    check(store, rows, Vector())
    rows += fill(store, fleet, 3)
    check(store, rows, Vector())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"env": np.full(12, -1, np.int32)}, "column 'env' goes from -1"),
        ({"tail": {}}, r"observations are obs, and the next observations missing; tail must"),
        ({"tail_rows": np.arange(9, 12), "tail": {"obs": TAIL[:2]}}, r"next 'obs' .* 2 rows"),
    ],
    ids=["env", "no tail", "length"],
)
def test_a_first_batch_that_is_refused_decides_nothing(wrong: Any, message: str) -> None:
    fleet = Fleet(episode=1e9)
    store = store_of(100)
    batch, _ = fleet.next()
    with pytest.raises((ConfigError, SchemaMismatch), match=message):
        store.add(changed(batch, value=np.zeros(12), **wrong))
    assert store.nbytes == 0
    rows = fill(store, fleet, 3)  # without a column 'value'
    check(store, rows, Vector())


def test_the_next_observation_stays_when_the_row_it_was_shared_with_leaves_first() -> None:
    # An environment's second track begins in the first time row, and so leaves before the end of
    # its first track, which goes on with it.
    fleet = Fleet(shards=1, envs=2, horizon=5, episode=1e9)
    track = fleet.rows(0, horizon=10)[::2]
    rows = [row for pair in zip(track[:5], track[5:], strict=True) for row in pair]
    store = store_of(12, side=1.0)
    store.add(fleet.batch(rows))
    check(store, rows, Vector())
    batch, more = fleet.next(horizon=2)
    store.add(batch)
    assert len(store) == 12
    check(store, rows + more, Vector())


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rows"):
        store_of(20).add(_empty(Fleet()))


def _empty(fleet: Fleet) -> Batch:
    batch = fleet.next()[0]
    columns = {name: batch.flat(name)[:0] for name in batch.names}
    return changed(batch, tail_rows=batch.tail_rows[:0], tail={"obs": TAIL[:0]}, **columns)


@pytest.mark.parametrize("capacity", [0, -5, 2.5, "many", None])
def test_a_capacity_that_holds_no_row_is_refused(capacity: Any) -> None:
    with pytest.raises(ConfigError, match=rf"capacity .*got {capacity!r}: ReplayStore\(100_000\)"):
        ReplayStore(capacity)


@pytest.mark.parametrize("side", [0, -0.1, 1.5, float("nan"), "0.1"])
def test_a_side_outside_its_range_is_refused(side: Any) -> None:
    with pytest.raises(ConfigError, match=rf"side must be .*, got {side!r}: .*side=0\.1"):
        ReplayStore(10, side=side)


def test_an_empty_store_shows_the_call_that_fills_it() -> None:
    with pytest.raises(EmptyStore, match=r"holds no rows.*store\.add\(batch\)"):
        ReplayStore(10).sample(1)


@pytest.mark.parametrize("n", [0, -3, 2.5, "all"])
def test_a_number_of_rows_that_is_none_is_refused(n: Any) -> None:
    store = store_of(50)
    fill(store, Fleet(), 1)
    with pytest.raises(ConfigError, match=rf"n must be .*got {n!r}: store\.sample\(256\)"):
        store.sample(n)


def test_an_unknown_column_names_those_there_are() -> None:
    store = store_of(50)
    fill(store, Fleet(), 1)
    with pytest.raises(ConfigError, match=r"no column 'log_prob'; there are obs, reward"):
        store.sample(4, columns=("log_prob",))
