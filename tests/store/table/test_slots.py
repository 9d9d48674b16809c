"""Side slots, next slots and recurrent states, without a store."""

from __future__ import annotations

import numpy as np
import pytest

from clusterenv.store.table.slots import (
    Block,
    NextSlots,
    RecurrentStates,
    SideSlots,
    pieces,
    put,
)

CAPACITY = 10


def block_of(start: int, rows: int, width: int, tail_slots: list[int]) -> Block:
    """Return a block without ends of episodes: only its last time row has tails."""
    end = start + rows
    return Block(start, end, width, 0, 0, 0, 0, np.arange(end - width, end), np.array(tail_slots))


@pytest.mark.parametrize("row", range(25))
@pytest.mark.parametrize("count", [1, 4, 10])
def test_rows_are_written_to_their_slots_across_the_end_of_a_column(row: int, count: int) -> None:
    column = np.full(CAPACITY, -1)
    put(column, row, np.arange(row, row + count), CAPACITY)
    for number in range(row, row + count):
        assert column[number % CAPACITY] == number
    assert (column >= 0).sum() == count
    assert len(pieces(row, count, CAPACITY)) == 1 + (row % CAPACITY + count > CAPACITY)


@pytest.mark.parametrize("seed", range(10))
def test_a_side_slot_is_reused_only_after_its_owner_could_have_been_evicted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    side = SideSlots(np.zeros(7, np.int64), CAPACITY)
    owner_of: dict[int, int] = {}
    oldest = row = 0
    for _ in range(50):
        count = int(rng.integers(0, 5))
        owners = row + np.arange(count)
        row += count
        oldest = max(oldest, side.oldest_row(count))
        slots, index = side.take(owners)
        assert slots.tolist() == np.arange(CAPACITY + 7)[index].tolist()
        for slot, owner in zip(slots.tolist(), owners.tolist(), strict=True):
            assert CAPACITY <= slot < CAPACITY + 7
            assert owner_of.get(slot, -1) < oldest
            owner_of[slot] = owner
    assert side.taken == row


def test_owners_out_of_order_count_as_the_newest_so_far() -> None:
    side = SideSlots(np.zeros(3, np.int64), CAPACITY, ordered=False)
    side.take(np.array([5, 2]))
    side.take(np.array([3]))
    assert [side.oldest_row(count) for count in range(4)] == [0, 6, 6, 6]


def test_rows_are_linked_to_the_next_time_row_and_the_last_ones_to_their_tails() -> None:
    slots = np.full(CAPACITY, -1)
    links = NextSlots(slots)
    block = block_of(7, 6, 2, [10, 11])  # rows 7 to 12, in slots 7, 8, 9, 0, 1, 2
    links.add(block, slice(4, 6), pieces(7, 6, CAPACITY))
    following = {row: int(slots[row % CAPACITY]) for row in range(7, 13)}
    assert following == {7: 9, 8: 0, 9: 1, 10: 2, 11: 10, 12: 11}


@pytest.mark.parametrize("as_ranges", [True, False])
def test_a_continued_row_is_linked_to_its_successor_instead_of_its_tail(as_ranges: bool) -> None:
    slots = np.full(CAPACITY, -1)
    links = NextSlots(slots)
    first, second = block_of(0, 8, 2, [10, 11]), block_of(8, 4, 2, [12, 13])
    for block in (first, second):
        rows = block.end - block.start
        links.add(block, slice(rows - 2, rows), pieces(block.start, rows, CAPACITY))
    assert slots[[6, 7]].tolist() == [10, 11]
    before, after = range(6, 8), range(8, 10)
    if as_ranges:
        links.join(second, before, after)
    else:
        links.join(second, np.array(before), np.array(after))
    assert slots[[6, 7]].tolist() == [8, 9]
    assert second.rejoined is None


def test_a_track_ends_with_its_fragment_again_when_its_successor_is_evicted() -> None:
    slots = np.full(CAPACITY, -1)
    links = NextSlots(slots)
    block = block_of(0, 4, 2, [10, 11])  # two tracks: rows 0, 2 and rows 1, 3
    links.add(block, slice(2, 4), pieces(0, 4, CAPACITY))
    links.join(block, np.array([3]), np.array([0]))  # the second track came first
    assert slots[3] == 0
    links.separate(block, first=0)
    assert slots[3] == 0
    links.separate(block, first=2)
    assert slots[3] == 11


def test_the_state_is_known_at_the_first_time_row_of_a_block_only() -> None:
    columns = {"h": np.zeros((4, 3))}
    states = RecurrentStates(columns, np.full(CAPACITY, -1))
    given = np.arange(6.0).reshape(2, 3)
    states.add(block_of(8, 4, 2, [12, 13]), {"h": given})
    found, known = states.of(np.array([8, 9, 0, 1]))
    assert known.tolist() == [True, True, False, False]
    np.testing.assert_array_equal(found["h"][:2], given)
    states.add(block_of(18, 4, 2, [10, 11]), {"h": given[:0]})  # saved after it was evicted
    assert not states.of(np.array([8, 9, 0, 1]))[1].any()
