"""Shards follow the workers: they spread, move away in time, and become more or fewer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from threading import Thread
from typing import Any

import dask
import gymnasium as gym
import pytest
from agents import Cycle
from collecting import check, collecting, policy
from conftest import wait_until
from distributed import Client, LocalCluster
from worlds import Slow

import clusterenv
from clusterenv import Batch, errors
from clusterenv.head.fleet.placement import shards_to_add, shards_to_move


def test_shards_leave_crowded_workers_and_those_that_are_to_go() -> None:
    assert shards_to_move({}, {}, ()) == []
    assert shards_to_move({0: "a"}, {}, ()) == []  # its worker is gone: a loss, not a move
    assert shards_to_move({0: "a", 1: "b"}, {"a": 1, "b": 1, "c": 0}, ()) == []
    assert shards_to_move({0: "a", 1: "a", 2: "a"}, {"a": 3, "b": 0, "c": 0}, ()) == [2, 1]
    # Others' shards count too: b has more than a, but they are not ours to move.
    assert shards_to_move({0: "a"}, {"a": 1, "b": 3}, ()) == []
    assert shards_to_move({0: "a", 1: "b"}, {"a": 1, "b": 1}, {"a", "b"}) == [0, 1]
    # What leaves a worker is on another one soon, and is reckoned with there.
    assert shards_to_move({0: "a", 1: "b", 2: "b"}, {"a": 1, "b": 2, "c": 0}, {"a"}) == [0]


def test_free_workers_take_shards_up_to_a_number() -> None:
    assert shards_to_add(1, 1, {"a": 1, "b": 0}, ()) == 0
    assert shards_to_add(1, 9, {"a": 1, "b": 0, "c": 0}, ()) == 2
    assert shards_to_add(1, 9, {"a": 1, "b": 0, "c": 0}, {"c"}) == 1
    assert shards_to_add(5, 2, {"a": 0}, ()) == 0


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"restarts": 3}, r"restarts=3 is no rule: restarts=clusterenv.Restarts\(5\)"),
        ({"env_faults": 0}, r"env_faults=0 is no rule: env_faults=clusterenv.EnvFaults\(5\)"),
        ({"shards": 2, "max_shards": 1}, "at least shards=2, got 1: max_shards=4"),
        ({"max_shards": 2.5}, "max_shards must be an integer"),
    ],
)
def test_bad_rules_are_refused_before_anything_is_placed(rule: Any, message: str) -> None:
    policy = clusterenv.policies.Random(gym.spaces.Discrete(2))
    with pytest.raises(clusterenv.errors.ConfigError, match=message):
        clusterenv.Collector("CartPole-v1", policy, num_envs=4, horizon=8, **rule)


def take_until(
    collector: clusterenv.Collector, batches: list[Batch], condition: Callable[[], bool]
) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        batches.append(next(iter(collector)))
        if condition():
            return True
    return False


def homes(collector: clusterenv.Collector) -> int:
    workers = {shard.worker for shard in collector.shards}
    return 0 if None in workers else len(workers)


def running(collector: clusterenv.Collector) -> int:
    return sum(shard.state == "running" for shard in collector.shards)


def test_shards_spread_again_when_workers_come() -> None:
    batches: list[Batch] = []
    with clusterenv.connect("local", n_workers=2) as client, collecting(client) as collector:
        batches += collector.collect(100)
        client.cluster.scale(1)
        assert take_until(collector, batches, lambda: homes(collector) == 1)
        client.cluster.scale(2)
        assert take_until(collector, batches, lambda: homes(collector) == 2)
        assert take_until(collector, batches, lambda: collector.stats().moves == 1)
        stats = collector.stats()
        assert (stats.restarts, stats.moves, stats.dropped_rows) == (1, 1, 0)
        seen = len(batches)
        assert take_until(collector, batches, lambda: {b.shard for b in batches[seen:]} == {0, 1})
    check(batches)


def test_workers_that_join_get_shards_and_the_newest_version() -> None:
    batches: list[Batch] = []
    options = {"max_shards": 3, "sync": clusterenv.Never()}
    with clusterenv.connect("local", n_workers=2) as client, collecting(client, **options) as col:
        batches += col.collect(100)
        col.publish(policy())
        client.cluster.scale(4)
        assert take_until(col, batches, lambda: any(batch.shard == 2 for batch in batches))
        assert len(col.shards) == 3  # and not 4
        (new,) = {batch.policy_version for batch in batches if batch.shard == 2}
        assert new == 1
        envs = {int(env) for batch in batches for env in batch.flat("env")}
        assert envs == {0, 1, 2, 3, 4, 5}
    check(batches)


def test_a_shard_that_is_added_first_acts_with_the_first_version(client: Client) -> None:
    with collecting(client, version=5, sync=clusterenv.Divergence(0.1)) as collector:
        collector.scale(3)
        assert wait_until(lambda: running(collector) == 3)
        assert collector.stats().versions == [5, 5, 5]
        assert collector.publish(policy()) == 6
        collector.rollout()
        assert collector.publish(policy()) == 7


@pytest.mark.parametrize("how", ["iterate", "rollout", "overlap"])
def test_scaling_up_and_down_loses_nothing(client: Client, how: str) -> None:
    batches: list[Batch] = []
    with collecting(client, overlap=how == "overlap") as collector:

        def take(condition: Callable[[], bool]) -> bool:
            if how == "iterate":
                return take_until(collector, batches, condition)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not condition():
                batches.extend(collector.rollout())
            return condition()

        collector.scale(4)
        assert take(lambda: running(collector) == 4)
        assert take(lambda: {batch.shard for batch in batches} == {0, 1, 2, 3})
        collector.scale(1)
        assert take(lambda: len(collector.shards) == 1)
        collector.scale(2)
        assert take(lambda: any(b.shard == 1 and b.incarnation == 1 for b in batches))
        with pytest.raises(errors.ConfigError, match=r"shards must be .*got 0: collector\.scale"):
            collector.scale(0)
    stats = collector.stats()  # nothing arrives any more
    assert stats.restarts == 0
    received = stats.rows + stats.dropped_rows  # none dropped but of a rollout that nobody took
    assert received == sum(b.num_rows for b in batches) + 16 * 2 * collector.ready
    check(batches)


def test_fewer_shards_stay_fewer_though_a_worker_is_free() -> None:
    batches: list[Batch] = []
    with (
        dask.config.set({"clusterenv.watch": "100ms"}),
        clusterenv.connect("local", n_workers=2) as client,
        collecting(client, max_shards=3) as collector,
    ):
        batches += collector.collect(100)
        collector.scale(1)
        assert take_until(collector, batches, lambda: len(collector.shards) == 1)
        looked = time.monotonic() + 1.5
        assert take_until(collector, batches, lambda: time.monotonic() > looked)
        assert len(collector.shards) == 1
        client.cluster.scale(3)
        collector.scale(2)
        assert take_until(collector, batches, lambda: len(collector.shards) == 2)
    check(batches)


def test_a_rollout_is_whole_though_a_shard_is_lost_that_was_to_end() -> None:
    with clusterenv.connect("local", n_workers=2) as client:
        collector = clusterenv.Collector(
            Slow, Cycle(2), num_envs=2, shards=2, horizon=800, cluster=client
        )
        pid = client.run(os.getpid)[collector.shards[1].worker]
        found: list[list[Batch]] = []
        reader = Thread(target=lambda: found.append(collector.rollout()))
        reader.start()
        roster = collector._fleet.roster
        assert wait_until(lambda: all(record.owes for record in roster))
        collector.scale(1)
        assert wait_until(lambda: collector.shards[1].state == "draining")
        os.kill(pid, signal.SIGKILL)
        reader.join(60)
        assert [(batch.shard, batch.incarnation) for batch in found[0]] == [(0, 0), (1, 1)]
        assert wait_until(lambda: len(collector.shards) == 1)
        assert [batch.shard for batch in collector.rollout()] == [0]
        collector.close()


def test_more_shards_that_are_wanted_while_one_still_ends() -> None:
    batches: list[Batch] = []
    with (
        dask.config.set({"clusterenv.watch": "100ms"}),
        clusterenv.connect("local", n_workers=2) as client,
        collecting(client) as collector,
    ):
        batches += collector.collect(100)
        with collector._fleet.roster.lock:  # it cannot have ended when two are wanted again
            collector.scale(1)
            collector._receiver._drain(collector._fleet.roster[1])
            assert collector.shards[1].state == "draining"
            collector.scale(2)
        assert take_until(
            collector, batches, lambda: any(b.shard == 1 and b.incarnation == 1 for b in batches)
        )
        assert len(collector.shards) == 2
    check(batches)


def lost(shard: Any) -> bool:
    return shard.state != "running" or shard.incarnation > 0


def test_fewer_shards_that_are_wanted_while_one_is_placed_again() -> None:
    """It ends as soon as it is back, and its seeds are never used again."""
    batches: list[Batch] = []
    with clusterenv.connect("local", n_workers=3) as client, collecting(client) as collector:
        batches += collector.collect(100)
        os.kill(client.run(os.getpid)[collector.shards[1].worker], signal.SIGKILL)
        # On a busy machine it may be back before the next batch.
        assert take_until(collector, batches, lambda: lost(collector.shards[1]))
        collector.scale(1)
        assert take_until(collector, batches, lambda: len(collector.shards) == 1)
        collector.scale(2)
        assert take_until(collector, batches, lambda: len(collector.shards) == 2)
        assert take_until(collector, batches, lambda: batches[-1].shard == 1)
    assert batches[-1].incarnation > 1
    check(batches)


def test_a_rollout_is_whole_though_a_shard_that_moves_is_to_end(client: Client) -> None:
    with collecting(client) as collector:
        collector.rollout()
        receiver, roster = collector._receiver, collector._fleet.roster
        with roster.lock:  # an order of three threads that it allows
            receiver._drain(roster[1])  # it is to move
            asked = receiver.request_rollout()  # rollout() begins
            collector.scale(1)
        found = [receiver.take() for _ in range(asked)]
        assert sorted(batch.shard for batch in found) == [0, 1]
        assert wait_until(lambda: len(collector.shards) == 1)


def test_a_shard_moves_before_the_lifetime_of_its_worker_ends() -> None:
    batches: list[Batch] = []
    settings = {"clusterenv.timeout.leave": "4s", "clusterenv.watch": "500ms"}
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            lifetime="25s",
            silence_logs=50,
        ) as cluster,
        clusterenv.connect(cluster) as client,
        collecting(client, num_envs=2, shards=1) as collector,
    ):
        batches += collector.collect(50)
        cluster.new_spec = {**cluster.new_spec, "options": _immortal(cluster)}
        cluster.scale(2)
        assert take_until(collector, batches, lambda: collector.stats().moves == 1)
        assert take_until(collector, batches, lambda: batches[-1].incarnation == 1)
        assert collector.stats().restarts == 0
        assert wait_until(lambda: len(client.nthreads()) == 1, 40)
        batches += collector.collect(200)
        assert collector.stats().restarts == 0
    check(batches)


def _immortal(cluster: LocalCluster) -> dict[str, Any]:
    options = dict(cluster.new_spec["options"])
    options.pop("lifetime")
    return options


def test_adaptive_scaling_never_takes_a_worker_with_a_shard() -> None:
    with clusterenv.connect("local", n_workers=3) as client, collecting(client) as collector:
        collector.collect(100)
        held = {shard.worker for shard in collector.shards}
        client.cluster.adapt(minimum=0, maximum=3, interval="200ms", wait_count=2)
        assert wait_until(lambda: set(client.nthreads()) == held, 20)  # the third was free
        time.sleep(2)
        collector.collect(500)
        assert set(client.nthreads()) == held
        assert collector.stats().restarts == 0
