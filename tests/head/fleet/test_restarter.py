"""The restart loop with a fake placement and a fake clock: no cluster."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from clusterenv.errors import ClosedError, ConfigError, EnvGivenUp, WorkerLost
from clusterenv.head.fleet.placement import split
from clusterenv.head.fleet.restarts import Restarter, Restarts
from clusterenv.head.fleet.roster import Roster, ShardRecord, ShardState


class Cluster:
    """A fleet whose placement fails on demand, a clock that only waiting moves, and a log."""

    def __init__(self, rule: Restarts, failures: Sequence[Exception] = ()) -> None:
        self.roster = Roster(split(4, 2))
        self.now, self.closes_at = 0.0, float("inf")
        self.failures, self.log = list(failures), list[Any]()
        self.closing = SimpleNamespace(wait=self.pause)
        fleet: Any = self
        self.restarter = Restarter(rule, fleet, clock=lambda: self.now)
        for record in self.roster:
            self.roster.opening(record.index, self.handle(record))
            self.roster.admit(record.index)

    def handle(self, record: ShardRecord) -> Any:
        return SimpleNamespace(index=record.index, incarnation=record.incarnation, worker="a")

    def place(self, record: ShardRecord) -> Any:
        assert record.state is ShardState.PLACING
        self.log.append(("place", record.incarnation))
        if self.failures:
            raise self.failures.pop(0)
        self.roster.opening(record.index, handle := self.handle(record))
        return handle

    def end_process(self, handle: Any) -> None:
        self.log.append(("end", handle.incarnation))

    def pause(self, seconds: float) -> bool:
        self.log.append(("wait", seconds))
        self.now += seconds
        return self.now >= self.closes_at

    def lose(self, **options: Any) -> Any:
        self.roster.lost(1)
        return self.restarter.restart(1, WorkerLost("gone."), **options)


def test_a_lost_shard_is_placed_at_once_with_the_next_incarnation() -> None:
    cluster = Cluster(Restarts(5))
    assert cluster.lose().incarnation == 1
    assert cluster.log == [("wait", 0.0), ("place", 1)]
    assert cluster.roster[1].state is ShardState.OPENING


def test_a_placement_that_fails_is_another_loss_and_waits_longer() -> None:
    failures = [WorkerLost("left."), TimeoutError("busy."), WorkerLost("left.")]
    cluster = Cluster(Restarts(5, backoff=1), failures)
    assert cluster.lose().incarnation == 4
    waits = [seconds for what, seconds in cluster.log if what == "wait"]
    assert waits == [0.0, 1.0, 2.0, 4.0]


def test_a_process_that_hangs_is_ended_once_before_the_first_placement() -> None:
    cluster = Cluster(Restarts(5, backoff=0), [WorkerLost("left.")])
    cluster.lose(end_process=True)
    assert [each for each in cluster.log if each[0] != "wait"] == [
        ("end", 0),
        ("place", 1),
        ("place", 2),
    ]


def test_a_move_needs_no_budget_but_its_failure_does() -> None:
    cluster = Cluster(Restarts(0))
    cluster.roster.drain(1)
    cluster.roster.drained(1)
    assert cluster.restarter.restart(1).incarnation == 1
    assert cluster.log == [("place", 1)]
    cluster.roster.admit(1)
    cluster.roster.drain(1)
    cluster.roster.drained(1)
    cluster.failures = [WorkerLost("left.")]
    with pytest.raises(WorkerLost, match=r"left\."):
        cluster.restarter.restart(1)


def test_a_spent_budget_raises_with_all_errors() -> None:
    cluster = Cluster(Restarts(2, backoff=0), [WorkerLost("first."), WorkerLost("second.")])
    with pytest.raises(WorkerLost, match="shard 1 was lost 3 times") as caught:
        cluster.lose()
    assert all(each in str(caught.value) for each in ("gone.", "first.", "second."))
    assert cluster.roster[1].state is ShardState.LOST


@pytest.mark.parametrize("kind", [ConfigError, EnvGivenUp])
def test_an_error_that_a_restart_would_meet_again_is_final(kind: type[Exception]) -> None:
    cluster = Cluster(Restarts(5), [kind("broken")])
    with pytest.raises(kind, match="the last error is final"):
        cluster.lose()
    assert [each for each in cluster.log if each[0] == "place"] == [("place", 1)]


def test_losses_of_one_shard_are_not_counted_for_another() -> None:
    cluster = Cluster(Restarts(1, backoff=0))
    cluster.lose()
    cluster.roster.lost(0)
    assert cluster.restarter.restart(0, WorkerLost("gone.")).incarnation == 1


def test_close_interrupts_the_wait() -> None:
    cluster = Cluster(Restarts(5, backoff=8), [WorkerLost("left.")])
    cluster.closes_at = 3.0
    with pytest.raises(ClosedError, match="waited for a restart"):
        cluster.lose()
    assert [each for each in cluster.log if each[0] == "place"] == [("place", 1)]


def test_close_during_a_placement_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(Restarts(5))

    def place(record: ShardRecord) -> Any:
        cluster.roster.close()
        raise WorkerLost("left.")

    monkeypatch.setattr(cluster, "place", place)
    with pytest.raises(ClosedError, match="closed while shard 1"):
        cluster.lose()
