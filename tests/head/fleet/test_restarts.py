"""A collector goes on when workers are lost: every row once, nothing across an incarnation."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from threading import Event
from typing import Any

import dask
import gymnasium as gym
import numpy as np
import pytest
import torch
from collecting import Counts, check, collecting, policy
from conftest import wait_until
from distributed import Client

import clusterenv
from clusterenv import Batch, Restarts, errors
from clusterenv.head.fleet.fleet import await_taken
from clusterenv.head.fleet.placement import Share
from clusterenv.head.fleet.roster import ShardRecord
from clusterenv.transport.messages import MessageKind


@pytest.fixture
def fragile() -> Iterator[Client]:
    with clusterenv.connect("local", n_workers=2) as client:
        yield client


def pids(client: Client) -> list[int]:
    return list(client.run(os.getpid).values())


def restarted(collector: clusterenv.Collector, batches: list[Batch], count: int) -> bool:
    """Take batches until ``count`` restarts are over and their shards deliver again."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        batches.append(next(iter(collector)))
        if sum(collector.stats().incarnations) >= count:
            newest = [(s, i) for s, i in enumerate(collector.stats().incarnations)]
            if all(any((b.shard, b.incarnation) == pair for b in batches) for pair in newest):
                return True
    return False


def test_killed_workers_come_back_and_rows_stay_contiguous(fragile: Client) -> None:
    batches: list[Batch] = []
    with collecting(fragile) as collector:
        batches += collector.collect(500)
        for shard in (0, 1, 0):
            # Two shards may be on one worker by now, and both be lost with it.
            assert wait_until(lambda: all(s.state == "running" for s in collector.shards))
            before = sum(collector.stats().incarnations)
            worker = collector.shards[shard].worker
            os.kill(fragile.run(os.getpid, workers=[worker])[worker], signal.SIGKILL)
            assert restarted(collector, batches, before + 1)
            assert wait_until(lambda: len(fragile.nthreads()) == 2)
    stats = collector.stats()  # nothing arrives any more
    assert stats.restarts >= 3
    rows = [batch.num_rows for batch in batches]
    assert stats.rows == sum(rows) + collector.ready * rows[0]
    check(batches)


def test_a_worker_that_left_is_not_waited_for(client: Client, leaves_nothing: None) -> None:
    with collecting(client) as collector:
        fleet = collector._fleet
        handle = fleet._submit(ShardRecord(2, Share(4, 2)), "tls://127.0.0.1:1")
        with pytest.raises(errors.WorkerLost, match="left before it took clusterenv-shard"):
            await_taken(client, handle.future, handle.worker, timeout=60)
        handle.future.cancel()


def test_lock_step_waits_for_the_shard_and_begins_with_the_newest_version(
    fragile: Client,
) -> None:
    batches: list[Batch] = []
    with (
        dask.config.set({"clusterenv.watch": "1h"}),  # no shard moves when the worker is back
        collecting(fragile, sync=clusterenv.Never()) as collector,
    ):
        batches += collector.rollout()
        assert collector.publish(policy()) == 1
        os.kill(pids(fragile)[0], signal.SIGKILL)
        for _ in range(3):
            rollout = collector.rollout()
            assert [batch.shard for batch in rollout] == [0, 1]
            batches += rollout
        (lost,) = (shard for shard, i in enumerate(collector.stats().incarnations) if i)
        assert batches[-2 + lost].policy_version == 1
        assert batches[-1 - lost].policy_version == 0
    check(batches)


@pytest.mark.parametrize("order", ["hang", "hold"])
def test_an_environment_that_hangs_is_ended_with_its_process(
    fragile: Client, tmp_path: Any, order: str
) -> None:
    batches: list[Batch] = []
    orders = tmp_path / "orders"
    deadlines = {"clusterenv.timeout.step": "3s", "clusterenv.timeout.silence": "8s"}
    with dask.config.set(deadlines), collecting(fragile, orders=str(orders)) as collector:
        batches += collector.collect(200)
        before = set(pids(fragile))
        orders.write_text(order)
        assert restarted(collector, batches, 1)
        assert wait_until(lambda: len(before & set(pids(fragile))) == 1)
    check(batches)


class SlowToMake(gym.Wrapper[Any, Any, Any, Any]):
    """Takes longer to make than a worker may be silent."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        time.sleep(2)
        super().__init__(env)


def test_environments_that_take_long_to_make_do_not_count_as_silent(client: Client) -> None:
    settings = {"clusterenv.timeout.silence": "1s"}
    with (
        dask.config.set(settings),
        collecting(client, num_envs=1, shards=1, wrappers=(SlowToMake,)) as collector,
    ):
        assert wait_until(lambda: collector.stats().seconds > 1.5, 10)  # it was looked at meanwhile
        collector.rollout()
        assert collector.stats().restarts == 0


@pytest.mark.parametrize("silence", ["1s", "3s"])
def test_a_stopped_process_is_lost_and_cannot_deliver_when_it_returns(
    fragile: Client, silence: str
) -> None:
    batches: list[Batch] = []
    with dask.config.set({"clusterenv.timeout.silence": silence}), collecting(fragile) as collector:
        batches += collector.collect(200)
        os.kill(pids(fragile)[0], signal.SIGSTOP)
        assert restarted(collector, batches, 1)
        batches += collector.collect(500)
    check(batches)


class Wide(gym.Env[Any, Any]):
    """Fragments of many times what a socket takes at once."""

    observation_space = gym.spaces.Box(0, 255, (1 << 20,), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.now = np.zeros(1 << 20, np.uint8)
        return self.now, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.now, 0.0, False, False, {}


class Heavy(clusterenv.policies.Policy):
    """Weights of many times what a socket takes at once; acts by none of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))

    def act(self, obs: Any, context: clusterenv.policies.Context) -> clusterenv.policies.Decision:
        return clusterenv.policies.Decision(torch.zeros(len(obs), dtype=torch.int64))


def stop_while_sending(monkeypatch: pytest.MonkeyPatch, handle: Any, kind: int) -> Event:
    """Stop the process of a shard when the head begins to send it a frame of this kind."""
    real, pid, stopped = handle.connection.send, pid_of(handle), Event()

    def stopping(*args: Any, **options: Any) -> Any:
        if args[0] == kind and not stopped.is_set():
            os.kill(pid, signal.SIGSTOP)
            stopped.set()
        return real(*args, **options)

    monkeypatch.setattr(handle.connection, "send", stopping)
    return stopped


def stop_while_receiving(monkeypatch: pytest.MonkeyPatch, handle: Any) -> Event:
    """Stop the process of a shard when the head begins to receive the body of a frame of it."""
    real, pid, stopped = handle.connection.receive, pid_of(handle), Event()

    def receive(place: Any) -> Any:
        def stopping(header: Any, blob: Any) -> Any:
            if header.body and not stopped.is_set():
                os.kill(pid, signal.SIGSTOP)
                stopped.set()
            return place(header, blob)

        return real(stopping)

    monkeypatch.setattr(handle.connection, "receive", receive)
    return stopped


def pid_of(handle: Any) -> int:
    return int(handle.future.client.run(os.getpid, workers=[handle.worker])[handle.worker])


@pytest.mark.parametrize("local", [True, False], ids=["local", "tls"])
def test_a_process_that_stops_within_a_fragment_holds_up_no_other(
    fragile: Client, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    settings = {"clusterenv.timeout.silence": "3s", "clusterenv.channel.local": local}
    options: dict[str, Any] = {"num_envs": 2, "shards": 2, "horizon": 16, "cluster": fragile}
    with (
        dask.config.set(settings),
        clusterenv.Collector(Wide, Heavy(1), **options) as collector,
    ):
        batches = iter(collector)
        next(batches)
        stopped = stop_while_receiving(monkeypatch, collector._fleet.handles[0])
        assert wait_until(lambda: bool(next(batches)) and stopped.is_set())
        meanwhile = 0
        while collector.stats().incarnations == [0, 0]:
            meanwhile += next(batches).shard == 1
        assert meanwhile > 5  # two had been asked for before
        assert wait_until(lambda: next(batches).incarnation == 1, 30)
        assert collector.stats().restarts == 1

        def all_counted() -> bool:
            # The other may move to the worker that is free again: it has a new incarnation from
            # then on, and has moved once it is open.
            stats = collector.stats()
            return bool(next(batches)) and sum(stats.incarnations) == 1 + stats.moves

        assert wait_until(all_counted, 30)


def test_a_process_that_stops_while_it_gets_weights_holds_up_no_other(
    fragile: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    heavy = Heavy(8_000_000)
    settings = {"clusterenv.timeout.silence": "6s", "clusterenv.channel.relay": None}
    options: dict[str, Any] = {"num_envs": 2, "shards": 2, "horizon": 16, "cluster": fragile}
    with dask.config.set(settings), clusterenv.Collector(Counts, heavy, **options) as collector:
        batches = iter(collector)
        next(batches)
        stopped = stop_while_sending(monkeypatch, collector._fleet.handles[0], MessageKind.WEIGHTS)
        versions = {0: 0, 1: 0}
        while not stopped.is_set() or versions[1] < collector.stats().version:
            if versions[1] == collector.stats().version:  # one after the other, and one more
                with torch.no_grad():
                    heavy.weight.add_(1)
                collector.publish(heavy)
            batch = next(batches)
            versions[batch.shard] = batch.policy_version
        assert collector.stats().incarnations == [0, 0]
        assert versions[0] < versions[1]
        assert wait_until(lambda: next(batches).incarnation == 1, 30)
        assert collector.stats().incarnations == [1, 0]


def test_the_run_ends_with_all_that_was_seen_when_the_budget_is_spent(fragile: Client) -> None:
    class Broken(Counts):
        def step(self, action: int) -> Any:
            if self.now == 3:
                os._exit(1)
            return super().step(action)

    options = {"num_envs": 2, "horizon": 8, "shards": 1, "cluster": fragile}
    collector = clusterenv.Collector(Broken, policy(), restarts=Restarts(2, backoff=0.1), **options)
    with pytest.raises(errors.WorkerLost, match=r"lost 3 times") as caught:
        collector.collect(10_000)
    # A shard may also be given to a process that has ended since.
    assert len(re.findall("is gone|left before", str(caught.value))) == 3


def test_shards_double_up_when_workers_are_fewer() -> None:
    with clusterenv.connect("local", n_workers=2) as client:
        batches: list[Batch] = []
        with collecting(client) as collector:
            batches += collector.collect(200)
            client.cluster.scale(1)
            assert restarted(collector, batches, 1)
            assert len(client.nthreads()) == 1
        check(batches)


def test_two_shards_in_one_process_pull_once() -> None:
    with clusterenv.connect("local", n_workers=2) as client, collecting(client) as collector:
        collector.rollout()
        client.cluster.scale(1)
        while collector.stats().restarts == 0:
            collector.rollout()
        nbytes = collector._publisher.newest.buffer.nbytes
        before = collector.stats()
        for version in (1, 2, 3):
            assert collector.publish(policy()) == version
            assert [batch.policy_version for batch in collector.rollout()] == [version] * 2
        after = collector.stats()
        assert after.pulls - before.pulls == 6
        assert after.weight_bytes - before.weight_bytes == 3 * nbytes


def test_a_shard_that_comes_back_between_two_rollouts_acts_with_the_newest_version(
    fragile: Client,
) -> None:
    with collecting(fragile) as collector:
        collector.rollout()
        for version in (1, 2):
            assert collector.publish(policy()) == version
            collector.rollout()
        os.kill(pids(fragile)[0], signal.SIGKILL)
        assert wait_until(lambda: collector.stats().restarts == 1, seconds=30)
        for version in (3, 4, 5):
            assert collector.publish(policy()) == version
            assert [batch.policy_version for batch in collector.rollout()] == [version] * 2
