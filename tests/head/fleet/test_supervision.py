"""Rules about losses: pure functions, no cluster."""

from __future__ import annotations

from typing import Any

import pytest

from clusterenv import errors
from clusterenv.data.seeds import env_seeds
from clusterenv.errors import EnvGivenUp, WorkerLost
from clusterenv.head.fleet.placement import choose_worker
from clusterenv.head.fleet.restarts import RestartHistory, Restarts
from clusterenv.simulation.env_faults import EnvFaults
from clusterenv.transport.heartbeat import Heartbeat


def test_the_first_restart_is_at_once_and_later_ones_wait_longer() -> None:
    rule = Restarts(count=5, seconds=100, backoff=1, backoff_max=5)
    waits = [rule.wait(list(range(n)), now=float(n)) for n in range(1, 7)]
    assert waits == [0, 1, 2, 4, 5, None]


def test_losses_long_ago_are_forgiven() -> None:
    rule = Restarts(count=2, seconds=10)
    assert rule.wait([0, 1, 2], now=2) is None
    assert rule.wait([0, 1, 20], now=20) == 0


def test_no_restart_at_all() -> None:
    assert Restarts(0).wait([5.0], now=5.0) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": -1}, r"count must be an integer, at least 0, got -1: Restarts\(5\)"),
        ({"count": "x"}, "count must be an integer, at least 0, got 'x'"),
        ({"seconds": 0}, "seconds must be a number, above 0, got 0"),
        ({"seconds": float("nan")}, "seconds must be a number, above 0, got nan"),
        ({"backoff": -1}, "backoff must be a number, at least 0, got -1"),
        ({"backoff": 2, "backoff_max": 1}, "backoff_max must be a number, at least 2 and .*got 1"),
        (
            {"backoff_max": 1e300},
            "backoff_max must be a number.*at most 3.1536e[+]07, got 1e[+]300",
        ),
    ],
)
def test_rules_that_cannot_work_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        Restarts(**wrong)


def test_a_wait_does_not_overflow_however_many_losses_there_were() -> None:
    assert Restarts(10**6, backoff=1.0, backoff_max=5).wait([0.0] * 3000, now=1.0) == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": "x"}, r"count must be an integer, at least 0, got 'x': EnvFaults\(5"),
        ({"seconds": None}, "seconds must be a number, above 0, got None"),
        ({"bounds": "yes"}, "bounds must be True or False, got 'yes'"),
    ],
)
def test_rules_for_faults_that_cannot_work_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        EnvFaults(**wrong)


def test_shards_double_up_on_the_least_loaded_worker() -> None:
    assert choose_worker({"a": 2, "b": 1, "c": 1}) == "b"
    assert choose_worker({"a": 2, "b": 1}, avoid=["b"]) == "a"
    assert choose_worker({}) is None


def test_no_incarnation_repeats_a_seed_whatever_the_sharding() -> None:
    seeds = [env_seeds(1, incarnation, 0, 64) for incarnation in range(20)]
    assert seeds[0] == list(range(1, 65))
    assert len({seed for each in seeds for seed in each}) == 20 * 64
    assert env_seeds(1, 3, 8, 4) == seeds[3][8:12]
    assert env_seeds(None, 3, 0, 2) == [None, None]


def test_a_shard_without_tickets_does_not_hang() -> None:
    heartbeat = Heartbeat(0)
    for now in range(0, 200, 10):
        heartbeat.pong(now, steps=7, busy=False)
        assert heartbeat.fault(now, silence=30, step=60) is None


def test_steps_are_progress_and_silence_is_not() -> None:
    heartbeat = Heartbeat(0)
    for now in range(0, 200, 10):
        heartbeat.pong(now, steps=now, busy=True)
        assert heartbeat.fault(now, silence=30, step=60) is None
    assert "not answered for 35 s" in str(heartbeat.fault(225, silence=30, step=60))


def test_the_error_that_ends_a_run_is_of_the_last_ones_kind_and_says_why() -> None:
    history = RestartHistory(Restarts(1))
    assert history.note(3, WorkerLost("gone"), now=0) is not None
    assert history.note(3, EnvGivenUp("broken"), now=1) is None
    verdict = history.verdict(3)
    assert type(verdict) is EnvGivenUp
    assert "shard 3 was lost 2 times, and the last error is final" in str(verdict)
    history = RestartHistory(Restarts(1))
    for now in range(2):
        last = history.note(0, WorkerLost("gone"), now)
    assert last is None
    assert "Restarts(count=1" in str(history.verdict(0))
