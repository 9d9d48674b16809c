"""Transitions, credits and counters of shards: no cluster, no sockets, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from clusterenv.errors import ClosedError
from clusterenv.head.fleet.placement import Share, split
from clusterenv.head.fleet.roster import InvalidTransition, Reason, Roster, ShardState
from clusterenv.transport.messages import FragmentMeta

PLACING, OPENING, RUNNING, DRAINING, LOST, ENDED = ShardState


def handle(index: int) -> Any:
    return SimpleNamespace(index=index, worker=f"tls://10.0.0.{index}:4000")


def meta(version: int = 0, checks: int = 0, pulls: int = 0) -> FragmentMeta:
    return FragmentMeta(version, version, 0.5, [], [], 0, checks, pulls, [])


def bring_up(roster: Roster, index: int, version: int = 0) -> None:
    roster.opening(index, handle(index))
    roster.admit(index, version)


def running(shards: int, envs: int | None = None) -> Roster:
    roster = Roster(split(envs or 2 * shards, shards))
    for index in range(shards):
        bring_up(roster, index)
    return roster


def states(roster: Roster) -> list[ShardState]:
    return [record.state for record in roster]


def in_state(state: ShardState) -> Roster:
    """A roster whose shard 1 of 2 is in a state."""
    roster = Roster(split(4, 2))
    bring_up(roster, 0)
    if state is PLACING:
        return roster
    roster.opening(1, handle(1))
    if state is OPENING:
        return roster
    roster.admit(1, 0)
    if state is LOST:
        roster.lost(1)
    if state is ENDED:
        roster.scale(1)
    if state in (DRAINING, ENDED):
        roster.drain(1)
    if state is ENDED:
        roster.drained(1)
    assert roster[1].state is state
    return roster


TRANSITIONS: dict[str, tuple[Callable[[Roster], Any], dict[ShardState, ShardState]]] = {
    "place": (lambda roster: roster.place(1), {LOST: PLACING}),
    "opening": (lambda roster: roster.opening(1, handle(1)), {PLACING: OPENING}),
    "admit": (lambda roster: roster.admit(1, 0), {OPENING: RUNNING}),
    "drain": (lambda roster: roster.drain(1), {RUNNING: DRAINING}),
    "drained": (lambda roster: roster.drained(1), {DRAINING: PLACING}),
    "lost": (
        lambda roster: roster.lost(1),
        dict.fromkeys((PLACING, OPENING, RUNNING, DRAINING), LOST),
    ),
    "abandon": (lambda roster: roster.abandon(1, 2), dict.fromkeys((PLACING, OPENING), ENDED)),
}


@pytest.mark.parametrize("state", ShardState)
@pytest.mark.parametrize("name", TRANSITIONS)
def test_every_transition_is_legal_from_some_states_and_raises_from_all_others(
    name: str, state: ShardState
) -> None:
    change, legal = TRANSITIONS[name]
    roster = in_state(state)
    if state in legal:
        change(roster)
        assert roster[1].state is legal[state]
    else:
        with pytest.raises(InvalidTransition, match=f"shard 1 cannot change from {state} to"):
            change(roster)
        assert roster[1].state is state
    assert roster[0].state is RUNNING


@pytest.mark.parametrize("state", ShardState)
def test_close_ends_every_state_and_what_follows_is_refused(state: ShardState) -> None:
    roster = in_state(state)
    active, lost = roster.close()
    assert [each.index for each in active] == ([0, 1] if state in (RUNNING, DRAINING) else [0])
    assert [each.index for each in lost] == ([1] if state is LOST else [])
    assert states(roster) == [ENDED, ENDED]
    assert roster.shards == ()
    assert roster.handles == ()
    for change, _ in TRANSITIONS.values():
        with pytest.raises(ClosedError):
            change(roster)
    assert roster.add() is None
    assert roster.grant(0) == 0
    with pytest.raises(ClosedError):
        roster.request()


# Incarnations


def test_every_placement_after_the_first_has_the_next_incarnation() -> None:
    roster = running(2)
    incarnations = [roster[1].incarnation]
    roster.lost(1)
    assert roster.place(1).because is Reason.LOSS
    incarnations.append(roster[1].incarnation)
    roster.lost(1)  # while it is placed
    roster.place(1)
    roster.opening(1, handle(1))
    incarnations.append(roster[1].incarnation)
    roster.lost(1)  # while it opens
    roster.place(1)
    bring_up(roster, 1)
    incarnations.append(roster[1].incarnation)
    roster.drain(1)
    assert roster.drained(1) is PLACING
    assert roster[1].because is Reason.MOVE
    bring_up(roster, 1)
    incarnations.append(roster[1].incarnation)
    assert incarnations == [0, 1, 2, 3, 4]


def test_a_shard_that_is_added_again_has_its_environments_and_the_next_incarnation() -> None:
    """So that no pair of environment and incarnation, which is a seed, occurs twice."""
    roster = running(3, envs=7)
    roster.scale(1)
    for record in roster.surplus:
        roster.drain(record.index)
    for index in (2, 1):
        assert roster.drained(index) is ENDED
    roster.scale(4)
    added = [(r.index, r.share, r.incarnation) for r in iter(roster.add, None) if r]
    assert added == [(1, Share(3, 2), 1), (2, Share(5, 2), 1), (3, Share(7, 3), 0)]


# Scaling


def test_shards_that_are_too_many_are_drained_from_the_last_on_and_end() -> None:
    roster = running(3)
    roster.scale(1)
    assert [record.index for record in roster.surplus] == [2, 1]
    for index in (2, 1):
        roster.drain(index)
        assert roster[index].because is Reason.SCALE
    assert roster.surplus == []
    assert not roster.settled
    assert [roster.drained(index) for index in (2, 1)] == [ENDED, ENDED]
    assert roster.settled
    assert len(roster.shards) == 1


def test_a_shard_that_ended_before_a_later_one_keeps_its_place_among_the_shards() -> None:
    roster = running(4)
    roster.scale(1)
    for index in (1, 2, 3):
        roster.drain(index)
    roster.drained(1)
    assert [info.state for info in roster.shards] == [RUNNING, ENDED, DRAINING, DRAINING]
    assert [info.index for info in roster.shards] == [0, 1, 2, 3]
    roster.drained(3)
    assert len(roster.shards) == 3
    roster.drained(2)
    assert len(roster.shards) == 1


def test_a_drained_shard_that_is_wanted_again_before_it_has_ended_comes_back() -> None:
    roster = running(2)
    roster.scale(1)
    roster.drain(1)
    roster.scale(2)
    assert roster.add() is None  # it will come back by itself
    assert roster.drained(1) is PLACING
    assert roster[1].because is Reason.SCALE
    bring_up(roster, 1)
    assert roster.settled


def test_a_shard_that_ended_between_others_is_added_while_a_later_one_still_drains() -> None:
    roster = running(3)
    roster.scale(1)
    roster.drain(1)
    roster.drain(2)
    roster.drained(1)
    roster.scale(3)
    record = roster.add()
    assert record is not None
    assert record.index == 1
    assert roster.add() is None
    assert roster.drained(2) is PLACING
    bring_up(roster, 1)
    bring_up(roster, 2)
    assert roster.settled


def test_a_lost_shard_that_is_not_wanted_any_more_is_restarted_and_then_drained() -> None:
    roster = running(2)
    roster.lost(1)
    roster.scale(1)
    assert roster.surplus == []
    roster.place(1)
    bring_up(roster, 1)
    assert [record.index for record in roster.surplus] == [1]
    roster.drain(1)
    assert roster.drained(1) is ENDED
    roster.scale(2)
    record = roster.add()
    assert record is not None
    assert record.incarnation == 2


def test_a_shard_that_cannot_be_added_is_not_wanted_any_more() -> None:
    roster = running(1)
    roster.scale(3)
    assert not roster.settled
    record = roster.add()
    assert record is not None
    roster.abandon(record.index, wanted=3)
    assert roster.wanted == 1
    assert roster.settled
    roster.scale(3)
    record = roster.add()
    assert record is not None
    roster.scale(2)  # meanwhile
    roster.abandon(record.index, wanted=3)
    assert roster.wanted == 2
    assert roster.add() is record


# Losses while something else goes on


def test_a_shard_lost_while_it_drains_for_good_has_ended() -> None:
    roster = running(2)
    roster.scale(1)
    roster.drain(1)
    assert roster.lost(1) is ENDED


def test_a_shard_lost_while_it_moves_is_restarted() -> None:
    roster = running(2)
    roster.drain(1)
    assert roster.lost(1) is LOST
    assert roster.place(1).because is Reason.LOSS


def test_a_shard_lost_while_it_drains_and_owes_a_fragment_is_restarted_to_deliver_it() -> None:
    roster = running(2)
    assert roster.request() == 2
    assert roster.grant(1) == 1
    roster.scale(1)
    roster.drain(1)
    assert roster.lost(1) is LOST
    roster.place(1)
    bring_up(roster, 1)
    assert roster.grant(1) == 1
    roster.drain(1)  # right away: it is not wanted
    roster.received(1, 8, meta())
    assert roster.drained(1) is ENDED


def test_a_drained_shard_that_owes_a_fragment_comes_back_to_deliver_it() -> None:
    """A move begins, then a rollout, then fewer shards are wanted."""
    roster = running(2)
    roster.drain(1)
    assert roster.request() == 2
    assert roster.grant(1) == 0  # it would not use it
    roster.scale(1)
    assert roster.drained(1) is PLACING
    bring_up(roster, 1)
    assert roster.grant(1) == 1
    roster.drain(1)
    roster.received(1, 8, meta())
    assert roster.drained(1) is ENDED


def test_a_rollout_waits_for_lost_and_moving_shards_and_for_no_others() -> None:
    roster = running(6)
    roster.lost(0)
    roster.place(0)
    roster.lost(1)
    roster.drain(2)
    roster.scale(5)
    roster.drain(5)  # it ends
    roster.scale(7)
    assert roster.add() is not None  # it is being added
    assert roster.request() == 5
    assert [record.owes for record in roster] == [1, 1, 1, 1, 1, 0, 0]
    assert [roster.grant(index) for index in range(7)] == [0, 0, 0, 1, 1, 0, 0]


# Credits


def test_outstanding_credits_and_waiting_batches_are_never_more_than_the_limit() -> None:
    roster = running(1)
    assert roster.grant(0) == 0
    roster.limit = 3
    assert roster.grant(0) == 3
    roster.received(0, 8, meta())
    assert roster.grant(0) == 0
    roster.taken(0)
    assert roster.grant(0) == 1
    roster.received(0, 8, meta())
    roster.lost(0)
    roster.taken(0)
    assert roster.grant(0) == 0  # it is lost
    roster.received(0, 8, meta())  # had arrived before
    roster.place(0)
    bring_up(roster, 0)
    assert roster.grant(0) == 2
    assert roster[0].waiting == 1


def test_a_rollout_is_outstanding_until_all_of_its_fragments_are_taken() -> None:
    roster = running(2)
    assert roster.outstanding == 0
    assert roster.request() == roster.outstanding == 2
    roster.grant(1)
    roster.received(1, 8, meta())
    roster.lost(1)
    assert roster.outstanding == 2
    roster.taken(1)
    assert roster.outstanding == 1


# Versions and counters


def test_versions_in_use_are_those_of_shards_that_act() -> None:
    roster = running(3)
    roster[1].version = 4
    assert roster.versions_in_use() == {0, 4}
    roster.lost(1)
    assert roster.versions_in_use() == {0}
    roster.place(1)
    bring_up(roster, 1, version=7)
    assert roster.versions_in_use() == {0, 7}


def test_counters_go_on_over_incarnations() -> None:
    roster = running(1)
    arrived = [roster.received(0, 8, meta(checks=3, pulls=1))]
    arrived.append(roster.received(0, 8, meta(version=1, checks=5, pulls=2)))
    roster.lost(0)
    roster.place(0)
    bring_up(roster, 0)
    record = roster[0]
    assert record.delivered == 0
    arrived.append(roster.received(0, 8, meta(version=2, checks=1, pulls=1)))
    assert (record.rows, record.delivered, record.checks, record.acted) == (0, 8, 0, None)
    for arrival in arrived:  # also if that is after the shard was restarted
        roster.count(arrival)
    assert (record.rows, record.delivered, record.checks, record.pulls) == (24, 8, 6, 3)
    assert (record.acted, record.divergence) == (2, 0.5)


def test_users_see_where_a_shard_is_only_while_a_worker_holds_it() -> None:
    roster = running(2)
    info = roster.shards[1]
    assert (info.worker, info.host) == ("tls://10.0.0.1:4000", "10.0.0.1")
    assert (info.index, info.state, info.incarnation, info.version) == (1, "running", 0, 0)
    assert info.envs == range(2, 4)
    roster.lost(1)
    assert (roster.shards[1].worker, roster.shards[1].version) == (None, None)
    roster.place(1)
    assert roster.shards[1].worker is None
    assert roster.shards[1].incarnation == 1


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_no_fragment_is_owed_forever_and_the_wanted_shards_run(seed: int) -> None:
    draw = random.Random(seed)
    roster = running(3)
    seen: set[tuple[int, int]] = {(index, 0) for index in range(3)}
    expected = 0

    def advance(index: int) -> None:
        """Do what the supervisor and the receiver would do next with a shard."""
        nonlocal expected
        record = roster[index]
        if record.state is PLACING:
            assert (index, record.incarnation) not in seen or record.incarnation == 0
            seen.add((index, record.incarnation))
            roster.opening(index, handle(index))
        elif record.state is OPENING:
            roster.admit(index, 0)
        elif record.state is LOST:
            roster.place(index)
        roster.grant(index)
        if record in roster.surplus:
            roster.drain(index)
        if record.active and record.credits and record.owes:
            roster.received(index, 1, meta())
            roster.taken(index)
            expected -= 1
        if record.state is DRAINING:
            roster.drained(index)

    for _ in range(300):
        event, index = draw.random(), draw.randrange(len(roster))
        record = roster[index]
        if event < 0.1:
            roster.scale(draw.randrange(1, 6))
        elif event < 0.15:
            roster.add()
        elif event < 0.3 and record.state not in (LOST, ENDED):
            roster.lost(index)
        elif event < 0.4 and record.state is RUNNING:
            roster.drain(index)
        elif event < 0.45 and not expected:
            expected = roster.request()
            assert expected >= 1
        else:
            advance(index)
        assert expected == sum(each.owes for each in roster)
    for _ in range(100):
        roster.add()
        for index in range(len(roster)):
            advance(index)
    assert not expected
    assert roster.settled
    assert states(roster)[: roster.wanted] == [RUNNING] * roster.wanted
