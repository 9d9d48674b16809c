"""Announcements by the topic may be late, doubled, reordered or missed: credits tell the rest."""

from __future__ import annotations

import signal
from typing import Any

import dask
import numpy as np
import pytest
from agents import cartpole_policy, changed
from conftest import wait_until
from distributed import Client
from worlds import Slow

import clusterenv
from clusterenv import Divergence, Every, EveryVersion


def lock_step(client: Client, rule: Any = None) -> clusterenv.Collector:
    return clusterenv.Collector(
        "CartPole-v1",
        cartpole_policy(),
        num_envs=4,
        horizon=8,
        shards=2,
        cluster=client,
        sync=rule,
    )


def versions(collector: clusterenv.Collector) -> set[int]:
    """The versions of a rollout's rows."""
    return {int(version) for batch in collector.rollout() for version in batch["version"].flat}


def events(client: Client, collector: clusterenv.Collector, version: int) -> list[Any]:
    """All messages on the run's topic, once this version is among them."""
    found: list[Any] = []

    def arrived() -> bool:
        found[:] = [message for _, message in client.get_events(collector.topic)]
        return found[-1]["version"] == version

    assert wait_until(arrived)
    return found


@pytest.mark.parametrize("rule", [EveryVersion(), Every(2), Divergence(0.0)])
def test_missed_announcements_stop_nothing(client: Client, rule: Any) -> None:
    with dask.config.set({"clusterenv.publish.share": 0}), lock_step(client, rule) as collector:
        assert versions(collector) == {0}
        for seed in range(4):
            collector.publish(changed(cartpole_policy(), 0.5, seed), epsilon=seed)
        assert versions(collector) == {4}
        assert not [m for _, m in client.get_events(collector.topic) if m["kind"] == "version"]


def test_late_doubled_and_reordered_announcements_change_nothing(client: Client) -> None:
    with lock_step(client, Divergence(0.0)) as collector:
        collector.rollout()
        for version in (1, 2, 3):
            collector.publish(changed(cartpole_policy(), 0.5, version))
            told = events(client, collector, version)  # so that none is coalesced
        for late in (told[1], told[0], told[3], told[3], told[2]):
            client.log_event(collector.topic, late)
        assert versions(collector) == {3}
        client.log_event(collector.topic, told[2])
        collector.publish(changed(cartpole_policy(), 0.5, 4))
        client.log_event(collector.topic, told[1])
        assert versions(collector) == {4}
        stats = collector.stats()
        assert (stats.pulls, stats.lag_max) == (2 * 2, 0)


def test_lock_step_never_begins_on_an_older_version_than_was_published(client: Client) -> None:
    with lock_step(client) as collector:
        for version in range(1, 30):
            collector.publish(changed(cartpole_policy(), 0.1, version))
            assert versions(collector) == {version}


def streaming(client: Client, **options: Any) -> clusterenv.Collector:
    given = {"num_envs": 2, "horizon": 60, "shards": 2, "cluster": client, "switch": "step"}
    return clusterenv.Collector(Slow, cartpole_policy(), **{**given, **options})


@pytest.mark.parametrize("share", [0.05, 0])
def test_the_topic_tells_a_shard_of_a_version_within_a_fragment(
    client: Client, share: float
) -> None:
    """No credit is granted meanwhile: without the topic, these fragments keep the old version."""
    with dask.config.set({"clusterenv.publish.share": share}), streaming(client) as collector:
        next(iter(collector))
        granted = 2 * len(collector.shards)  # fragments that are under way or will be, by shard
        collector.publish(changed(cartpole_policy(), 0.5, 1))
        assert wait_until(lambda: collector.ready >= granted - 1, 30)
        batches = [collector._receiver.take() for _ in range(granted - 1)]
        told = {int(v) for batch in batches for v in np.unique(batch["version"])}  # type: ignore[index]
        assert told == ({0, 1} if share else {0})


def test_a_late_joiner_begins_with_the_newest_version() -> None:
    with clusterenv.connect("local", n_workers=1) as client:
        with dask.config.set({"clusterenv.watch": "100ms"}):
            collector = clusterenv.Collector(
                "CartPole-v1",
                cartpole_policy(),
                num_envs=2,
                horizon=8,
                shards=1,
                max_shards=2,
                cluster=client,
                sync=Divergence(100.0),
            )
        with collector:
            for version in (1, 2, 3):
                collector.publish(changed(cartpole_policy(), 0.1, version))
            client.cluster.scale(2)
            batch = next(batch for batch in collector if batch.shard == 1)
            assert batch.policy_version == 3


def test_shards_go_on_by_credits_while_the_scheduler_does_not_answer(
    separate_cluster: tuple[str, list[Any]],
) -> None:
    file, processes = separate_cluster
    policy = cartpole_policy()
    with clusterenv.Collector(
        "CartPole-v1", policy, num_envs=4, horizon=32, shards=2, cluster=file
    ) as collector:
        next(iter(collector))
        processes[0].send_signal(signal.SIGSTOP)
        try:
            for version in range(1, 20):
                assert collector.publish(changed(policy, 0.1, version)) == version
                seen: set[int] = set()
                for batch in collector:
                    if batch.policy_version == version:
                        seen.add(batch.shard)
                    if len(seen) == 2:
                        break
        finally:
            processes[0].send_signal(signal.SIGCONT)


def test_a_process_keeps_no_subscription_of_a_shard_that_has_left(client: Client) -> None:
    def subscriptions() -> int:
        from clusterenv.sync.topics import _handlers

        return sum(len(handlers) for each in _handlers.values() for handlers in each.values())

    with streaming(client, horizon=4) as collector:
        assert wait_until(lambda: sum(client.run(subscriptions).values()) == 2)
        collector.scale(1)  # the other one is drained, and never closed
        for _ in collector:
            if len(collector.shards) == 1:
                break
        assert wait_until(lambda: sum(client.run(subscriptions).values()) == 1)
    assert wait_until(lambda: sum(client.run(subscriptions).values()) == 0)
