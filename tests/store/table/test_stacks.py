"""Stacked frames: stored once per frame, and put together again bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from batches import (
    Fleet,
    Frames,
    FramesAndSpeed,
    Row,
    Vector,
    all_of,
    changed,
    fill,
    same,
    transitions,
)

from clusterenv.data.buffer_pool import BufferPool
from clusterenv.errors import ConfigError
from clusterenv.store import ReplayStore, Stack, Uniform
from clusterenv.store.table.slots import Block, SideSlots, put
from clusterenv.store.table.stacks import FrameHistory, stack_starts

CAPACITY, SIDE = 40, 200


def store_of(capacity: int, content: Frames, **options: float) -> ReplayStore:
    stack = Stack(content.size, content.axis)
    return ReplayStore(capacity, sampler=Uniform(replace=False), stack=stack, **options)  # type: ignore[arg-type]


def check(store: ReplayStore, added: list[Row], content: Frames | FramesAndSpeed) -> None:
    found = all_of(store)
    assert found["indices"].tolist() == list(range(len(added) - len(store), len(added)))
    same(found, transitions(added[len(added) - len(store) :], content))


def fill_and_check(store: ReplayStore, fleet: Fleet, content: Frames | FramesAndSpeed) -> None:
    """Add batches until rows have left several times, with shards that restart."""
    added: list[Row] = []
    for turn in range(30):
        if turn % 8 == 7:
            fleet.restart(turn % 2)
        batch, rows = fleet.next()
        store.add(batch)
        added += rows
        if turn % 3 == 0:
            check(store, added, content)
    check(store, added, content)


@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize("padding", ["zero", "first"])
@pytest.mark.parametrize(("size", "axis"), [(4, 0), (4, -1), (3, 1), (2, 0)])
def test_stacks_are_bit_equal_whatever_left_meanwhile(
    size: int, axis: int, padding: str, tracks: bool
) -> None:
    content = Frames(size, axis, padding)
    fleet = Fleet(content, seed=size, envs=3, horizon=5, episode=7, tracks=tracks)
    fill_and_check(store_of(101, content), fleet, content)


@pytest.mark.parametrize("seed", range(6))
def test_stacks_of_batches_of_changing_size_are_bit_equal(seed: int) -> None:
    content = Frames()
    fleets = [Fleet(content, seed=seed, shards=1, envs=envs, episode=5) for envs in (1, 4, 3)]
    rng = np.random.default_rng(seed)
    store, added, first = store_of(57, content, side=1.0), [], 0
    for _ in range(50):
        batch, rows = fleets[int(rng.integers(3))].next(0, horizon=int(rng.integers(1, 5)))
        store.add(batch)
        added += rows
        check(store, added, content)
        assert store.stats.evicted_rows >= first  # a row that left does not come back
        first = store.stats.evicted_rows


def test_rows_leave_early_when_there_is_no_room_beside_them() -> None:
    content = Frames()
    fleet = Fleet(content, shards=1, envs=2, horizon=6, episode=3)
    store, added = store_of(3000, content, side=0.01), []
    for turn in range(250):
        batch, rows = fleet.next()
        store.add(batch)
        added += rows
        if turn % 50 == 49:
            check(store, added, content)
    assert len(store) < 1500


def test_only_named_observations_are_stacks() -> None:
    content = FramesAndSpeed()
    fleet = Fleet(content, envs=3, horizon=5, episode=7)
    stack = Stack(4, only=("obs.image",))
    store = ReplayStore(101, sampler=Uniform(replace=False), stack=stack)
    fill_and_check(store, fleet, content)
    assert store._buffer.ring is not None
    assert store._buffer.ring.columns["obs.image"].shape[1:] == (6, 6)
    assert store._buffer.ring.columns["obs.speed"].shape[1:] == (4,)


def test_a_stack_of_an_observation_that_is_not_there_is_refused() -> None:
    store = ReplayStore(100, stack=Stack(4, only=("image",)))
    message = r"names 'image', but the observations are obs.image, obs.speed: Stack\(4, only=\("
    with pytest.raises(ConfigError, match=message):
        store.add(Fleet(FramesAndSpeed()).next()[0])
    with pytest.raises(
        ConfigError, match=r"list of names, got 'obs.image': .*only=\('obs.image',\)"
    ):
        Stack(4, only="obs.image")


def test_frames_are_stored_once() -> None:
    content = Frames()
    fleet = Fleet(content, shards=1, envs=4, horizon=64, episode=100)
    stacked, plain = store_of(12_000, content), ReplayStore(12_000)
    batch = fleet.next()[0]
    for store in (stacked, plain):
        store.add(batch)
    assert stacked._buffer.ring is not None
    assert plain._buffer.ring is not None
    frames, stacks = stacked._buffer.ring.columns["obs"], plain._buffer.ring.columns["obs"]
    assert frames.nbytes * 4 == stacks.nbytes
    assert frames.dtype == np.uint8
    assert stacked.nbytes - plain.nbytes < -0.65 * stacks.nbytes


def test_observations_that_are_no_stacks_are_refused_and_nothing_is_changed() -> None:
    content = Frames()
    fleet = Fleet(content, shards=1, envs=2, horizon=6, episode=1e9)
    batch, rows = fleet.next()
    wrong = batch.flat("obs").copy()
    wrong[7, 1, 2, 3] += 1
    store = store_of(100, content)
    with pytest.raises(ConfigError, match=r"obs of environment 1 at step 3 .*leave stack= out"):
        store.add(changed(batch, obs=wrong))
    assert len(store) == 0
    store.add(batch)
    check(store, rows, content)


def test_a_next_observation_that_is_no_stack_is_refused() -> None:
    content = Frames()
    batch, _ = Fleet(content).next()
    tail = batch.tail["obs"].copy()
    tail[0, 0, 0, 0] += 1
    with pytest.raises(ConfigError, match=r"does not go on from the stack before it"):
        store_of(100, content).add(changed(batch, tail={"obs": tail}))


@pytest.mark.parametrize("stack", [Stack(3), Stack(4, axis=1), Stack(4, axis=-2), Stack(4, axis=7)])
def test_an_axis_along_which_no_frames_lie_is_refused(stack: Stack) -> None:
    store = ReplayStore(100, stack=stack)
    with pytest.raises(ConfigError, match=rf"axis {stack.axis}.*\(4, 6, 6\).*stack=Stack\("):
        store.add(Fleet(Frames()).next()[0])


def test_vectors_are_no_stacks() -> None:
    with pytest.raises(ConfigError, match=r"stack=6 .*does not|would change it|leave stack="):
        fill(ReplayStore(100, stack=6), Fleet(Vector()), 3)


@pytest.mark.parametrize("size", [1, 0, -4])
def test_less_than_two_frames_are_no_stack(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"stack={size} is no stack.*stack=4"):
        ReplayStore(100, stack=size)


# Frames, without a store


def test_stacks_are_rebuilt_from_frames_that_are_stored_once() -> None:
    stack, fleet = Stack(4), Fleet(Frames(), shards=1, envs=2, horizon=8, episode=5)
    column = np.zeros((CAPACITY + SIDE, 6, 6), np.uint8)
    frames = FrameHistory(stack, ["obs"], np.zeros(CAPACITY + SIDE, np.int64), CAPACITY)
    side = SideSlots(np.zeros(SIDE, np.int64), CAPACITY, ordered=False)
    end = 35  # the rows wrap around
    batch, rows = fleet.next()
    starts = stack_starts(batch)
    assert starts.tolist() == [
        at for at, row in enumerate(rows) if at < batch.num_envs or not row.step
    ]
    owners = frames.owners(starts, end, batch.num_rows, batch.num_envs)
    assert owners.max() < end + batch.num_rows
    older, _ = side.take(owners)
    order = np.argsort(batch.tail_rows)
    tail_rows = end + batch.tail_rows[order]
    tail_slots, _ = side.take(tail_rows)
    block = Block(end, end + batch.num_rows, batch.num_envs, 0, 0, 0, 0, tail_rows, tail_slots)
    put(column, end, stack.newest(batch.flat("obs")), CAPACITY)
    column[tail_slots] = stack.newest(batch.tail["obs"][order])
    frames.add(block, batch, starts, older, {"obs": column})
    slots = np.arange(end, block.end) % CAPACITY
    found = stack.join(column, frames.of(slots), BufferPool())
    np.testing.assert_array_equal(found, batch.flat("obs"))
    found = stack.join(column, frames.of(tail_slots), BufferPool())
    np.testing.assert_array_equal(found, batch.tail["obs"][order])


def test_older_frames_are_needed_as_long_as_a_stack_contains_them() -> None:
    frames = FrameHistory(Stack(4), ["obs"], np.zeros(60, np.int64), CAPACITY)
    owners = frames.owners(np.array([0, 1, 10]), first=100, rows=12, width=2)
    # Three older frames each, until two time rows later, or until the batch ends.
    assert owners.tolist() == [104] * 3 + [105] * 3 + [111] * 3
