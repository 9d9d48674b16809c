"""Frames of stacks, without a store: each is stored once, and found again."""

from __future__ import annotations

import numpy as np
from batches import Fleet, Frames

from clusterenv.data.buffer_pool import BufferPool
from clusterenv.store.table.slots import Block, SideSlots, put
from clusterenv.store.table.stacks import FrameHistory, Stack, stack_starts

CAPACITY, SIDE = 40, 200


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
