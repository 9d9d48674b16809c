"""``Collector(overlap=True)``: the next rollout is simulated while the learner works."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import gymnasium as gym
import pytest
import torch
from agents import Bad, cartpole_policy, changed
from collecting import Counts, check, collecting
from compare import assert_same
from conftest import wait_until
from distributed import Client

import clusterenv
from clusterenv import Batch, Collector, Divergence, Every, EveryVersion, Never, errors
from clusterenv.policies import EpsilonGreedy

pytestmark = [pytest.mark.usefixtures("leaves_nothing"), pytest.mark.timeout(180)]
SHARDS, ROWS = 2, 8 * 5
TIMED = {
    *("seconds", "steps_per_second", "evaluation_seconds", "announced_bytes"),
    *("queued", "queued_by_shard"),
}


def overlapping(client: Client, policy: Any = None, **kwargs: Any) -> Collector:
    options = {"env": "CartPole-v1", "num_envs": 5, "horizon": 8, "shards": SHARDS, "seed": 3}
    options |= {"policy": policy or cartpole_policy(), "cluster": client, "overlap": True}
    return Collector(**{**options, **kwargs})  # type: ignore[arg-type]


def versions(batches: list[Batch]) -> set[int]:
    return {int(version) for batch in batches for version in batch["version"].flat}


def has_arrived(collector: Collector) -> bool:
    """Wait for all fragments of the rollout that was requested."""
    return wait_until(lambda: collector.ready == SHARDS, 60)


def test_rows_are_of_the_version_before_the_newest(client: Client) -> None:
    policy = cartpole_policy()
    with overlapping(client, policy) as collector:
        for rollout in range(1, 6):
            batches = collector.rollout()
            assert [batch.shard for batch in batches] == [0, 1]
            assert versions(batches) == {max(0, rollout - 2)}
            stats = collector.stats()
            assert (stats.rows, stats.pulls) == (rollout * ROWS, SHARDS * max(0, rollout - 2))
            assert (stats.lag_min, stats.lag_max) == (0, 0)
            policy = changed(policy, 0.1, seed=rollout)
            assert collector.publish(policy) == rollout


def test_the_weights_of_the_version_that_a_row_names_have_acted(client: Client) -> None:
    policies = [cartpole_policy(seed) for seed in range(5)]
    with overlapping(client, policies[0]) as collector:
        for policy in policies[1:]:
            for batch in collector.rollout():
                assert_acted(policies[batch.policy_version], batch)
            collector.publish(policy)


def assert_acted(policy: Any, batch: Batch) -> None:
    columns = batch.torch()
    with torch.no_grad():
        logits = policy.module(columns["obs"])
        expected = torch.distributions.Categorical(logits=logits).log_prob(columns["action"])
    assert torch.allclose(columns["log_prob"], expected, atol=1e-5)


# Whatever the timing


class Lagging(gym.Wrapper[Any, Any, Any, Any]):
    """Every step takes some milliseconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return super().step(action)


def learn(collector: Collector, timing: str, policy: Any) -> list[dict[str, Any]]:
    """Return all that five rollouts gave, with a learner that is fast or slow.

    A fast one publishes before the head has answered a pull for the next rollout; a slow one only
    when all fragments of the next rollout have arrived.
    """
    found: list[dict[str, Any]] = []
    for version in range(1, 6):
        following = changed(policy, 0.1, seed=version)
        if timing == "fast" and version > 1:
            assert has_arrived(collector)
            with collector._roster.lock:  # nothing is received until it is released
                found.append(seen(collector, collector.rollout()))
                collector.publish(following, epsilon=version / 10)
        else:
            batches = collector.rollout()
            assert timing == "any" or has_arrived(collector)
            found.append(seen(collector, batches))
            collector.publish(following, epsilon=version / 10)
        found[-1]["divergences"] = dict(collector._publisher.announced.divergences)
        policy = following
    return found


def seen(collector: Collector, batches: list[Batch]) -> dict[str, Any]:
    stats = {name: v for name, v in vars(collector.stats()).items() if name not in TIMED}
    rows = tuple({name: batch[name] for name in batch.names} for batch in batches)
    return {"rows": rows, "versions": versions(batches), "stats": stats}


@pytest.mark.parametrize(
    ("rule", "acted"),
    [
        (EveryVersion(), [0, 0, 1, 2, 3]),
        (Every(2), [0, 0, 0, 2, 2]),
        (Divergence(0.0022), [0, 0, 1, 2, 2]),
        (Never(), [0, 0, 0, 0, 0]),
    ],
    ids=["every-version", "every-2", "divergence", "never"],
)
def test_the_same_seed_gives_the_same_rollouts_whatever_the_timing(
    client: Client, rule: Any, acted: list[int]
) -> None:
    runs = []
    for timing, seconds in (("slow", (0.0, 0.0)), ("fast", (0.0, 0.0)), ("any", (0.01, 0.0))):
        envs = [functools.partial(Lagging, seconds[env // 3]) for env in range(5)]
        with overlapping(client, env=envs, sync=rule) as collector:
            runs.append(learn(collector, timing, cartpole_policy()))
    for timing, run in zip(("fast", "with a slow shard"), runs[1:], strict=True):
        assert_same(tuple(run), tuple(runs[0]), timing)
    assert [part["versions"] for part in runs[0]] == [{version} for version in acted]


@pytest.mark.parametrize("relay", ["100 B", None], ids=["relayed", "by the head"])
def test_a_pull_is_answered_with_the_version_of_its_rollout_though_a_newer_one_was_published(
    client: Client, relay: str | None
) -> None:
    policies = [cartpole_policy(seed) for seed in range(10)]
    with (
        dask.config.set({"clusterenv.channel.relay": relay}),
        overlapping(client, policies[0], num_envs=6, shards=3) as collector,
    ):
        collector.rollout()
        collector.publish(policies[1])
        for rollout in range(2, 6):
            assert wait_until(lambda: collector.ready == 3)
            with collector._roster.lock:  # no pull is answered until it is released
                batches = collector.rollout()
                for policy in policies[2 * rollout - 2 : 2 * rollout]:
                    collector.publish(policy)
            assert versions(batches) == {max(0, 2 * rollout - 5)}  # the newest at its request
            for batch in batches:
                assert_acted(policies[batch.policy_version], batch)
        nbytes = collector._publisher.newest.buffer.nbytes
        stats = collector.stats()
        assert stats.weight_bytes + stats.relayed_bytes == stats.pulls * nbytes


def test_shards_of_one_process_share_a_download_of_the_version_of_their_rollout() -> None:
    policies = [cartpole_policy(seed) for seed in range(5)]
    with (
        clusterenv.connect("local", n_workers=1) as client,
        overlapping(client, policies[0], num_envs=2, shards=1) as collector,
    ):
        collector.scale(2)
        assert wait_until(lambda: [shard.state for shard in collector.shards] == ["running"] * 2)
        collector.rollout()
        collector.publish(policies[1])
        for version in range(2, 5):
            assert has_arrived(collector)
            with collector._roster.lock:
                batches = collector.rollout()
                assert collector.publish(policies[version]) == version
            assert versions(batches) == {version - 2}
            for batch in batches:
                assert_acted(policies[version - 2], batch)
        nbytes = collector._publisher.newest.buffer.nbytes
        assert (collector.stats().pulls, collector.stats().weight_bytes) == (4, 2 * nbytes)


class FirstAction(torch.nn.Module):
    """Values of which the second is the larger."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, 1.0]).expand(len(obs), 2)


def test_a_hint_newer_than_the_credit_changes_neither_version_nor_scalars(client: Client) -> None:
    def heard(dask_worker: Any) -> list[int]:
        streams = [actor._streaming for actor in dask_worker.state.actors.values()]
        return [stream._client._heard.version for stream in streams]

    policy = EpsilonGreedy(FirstAction(), epsilon=0.0)
    with overlapping(client, policy) as collector:
        assert wait_until(lambda: len(client.get_events(collector.topic)) > 0)
        told = client.get_events(collector.topic)[0][1]
        newer = {**told, "version": 50, "same_since": 50, "scalars": {"epsilon": 1.0}}
        client.log_event(collector.topic, newer)
        assert wait_until(
            lambda: [v for found in client.run(heard).values() for v in found] == [50] * SHARDS
        )
        for rollout in range(1, 4):
            batches = collector.rollout()
            assert versions(batches) == {max(0, rollout - 2)}
            assert all((batch["action"] == 1).all() for batch in batches)
            collector.publish(policy, epsilon=0.0)
        assert (collector.stats().lag_max, collector.stats().pulls) == (0, 0)


def test_scalars_are_those_of_the_request(client: Client) -> None:
    policy = EpsilonGreedy(FirstAction(), epsilon=0.0)
    with overlapping(client, policy, horizon=40) as collector:
        exploring = []
        for epsilon in (1.0, 0.0, 0.0, 0.0):
            batches = collector.rollout()
            exploring.append(not all((batch["action"] == 1).all() for batch in batches))
            collector.publish(policy, epsilon=epsilon)
        assert exploring == [False, False, True, False]


# Shards that leave, errors and the end


class Held(Counts):
    """Waits at a step of its first incarnation while a file is there; another shows that."""

    def __init__(self, gate: Path, index: int, at: int) -> None:
        super().__init__()
        self.gate, self.sign, self.at, self.taken = gate, gate.with_name(f"held-{index}"), at, 0

    def step(self, action: int) -> Any:
        self.taken += 1
        while self.taken > self.at and self.gate.exists():
            self.sign.touch()
            time.sleep(0.005)
        return super().step(action)


@pytest.fixture
def fragile() -> Iterator[Client]:
    client = clusterenv.connect("local", n_workers=2)
    yield client
    client.close()


def counting_policy() -> Any:
    return clusterenv.policies.Categorical(torch.nn.Linear(3, 2))


def test_a_shard_lost_in_a_requested_rollout_is_restarted_with_its_version(
    fragile: Client, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    envs = [functools.partial(Held, gate, env, at=16) for env in range(4)]
    policy, batches = counting_policy(), list[Batch]()
    options = {"num_envs": 4, "horizon": 16, "env": envs}
    with (
        dask.config.set({"clusterenv.watch": "1h"}),  # no shard moves when the worker is back
        overlapping(fragile, policy, **options) as collector,
    ):
        batches += collector.rollout()
        assert wait_until((tmp_path / "held-2").exists)  # in the second rollout
        for version in (1, 2):
            assert collector.publish(changed(policy, 0.5, version)) == version
        worker = collector.shards[1].worker
        os.kill(fragile.run(os.getpid, workers=[worker])[worker], signal.SIGKILL)
        assert wait_until(lambda: collector.ready == 1, 60)  # from the next incarnation
        gate.unlink()
        second = collector.rollout()
        assert [(batch.shard, batch.incarnation) for batch in second] == [(0, 0), (1, 1)]
        assert versions(second) == {0}  # the newest when it was requested
        batches += second
        for version in (3, 4):
            assert collector.publish(changed(policy, 0.5, version)) == version
            third = collector.rollout()
            assert versions(third) == {version - 1}
            batches += third
        assert collector.stats().restarts == 1
    check(batches)


def test_workers_killed_at_any_time_cost_no_rollout(fragile: Client) -> None:
    policy, batches = counting_policy(), list[Batch]()
    with collecting(fragile, overlap=True) as collector:
        for rollout in range(1, 7):
            batches += (found := collector.rollout())
            assert [batch.shard for batch in found] == [0, 1]
            assert versions(found) == {max(0, rollout - 2)}
            if rollout in (1, 4):
                os.kill(next(iter(fragile.run(os.getpid).values())), signal.SIGKILL)
            assert collector.publish(changed(policy, 0.1, rollout)) == rollout
            assert wait_until(lambda: len(fragile.nthreads()) == 2, 60)
    check(batches)


def test_a_shard_that_moves_delivers_its_part_of_the_requested_rollout_first(
    client: Client,
) -> None:
    batches: list[Batch] = []
    with collecting(client, overlap=True) as collector:
        batches += collector.rollout()
        collector._receiver._drain(collector._roster[1])
        while collector.stats().moves == 0:
            batches += collector.rollout()
        batches += collector.rollout()
        assert {batch.incarnation for batch in batches if batch.shard == 1} == {0, 1}
        assert collector.stats().rows == sum(batch.num_rows for batch in batches)
    check(batches)


def test_an_error_of_a_shard_shows_at_the_next_rollout(client: Client) -> None:
    policy = Bad("raise", after=8)
    with overlapping(client, policy) as collector:
        assert len(collector.rollout()) == SHARDS
        assert wait_until(lambda: collector.ready > 0)
        assert collector.publish(policy) == 1  # the learner goes on meanwhile
        with pytest.raises(errors.PolicyError, match="matrix is singular"):
            collector.rollout()
        assert collector.closed


class Tiring(Counts):
    """Takes its time after some steps."""

    def step(self, action: int) -> Any:
        self.taken = getattr(self, "taken", 0) + 1
        time.sleep(0.05 if self.taken > 1000 else 0.0)
        return super().step(action)


def test_closing_does_not_wait_for_the_requested_rollout(client: Client) -> None:
    collector = overlapping(client, counting_policy(), env=Tiring, num_envs=2, horizon=1000)
    collector.rollout()
    collector.close()  # the next rollout would take 50 seconds
    stats = collector.stats()
    assert (stats.rows, stats.dropped_rows, collector.ready) == (2000, 0, 0)


def test_closing_drops_and_counts_a_rollout_that_nobody_took(client: Client) -> None:
    with overlapping(client) as collector:
        collector.rollout()
        assert has_arrived(collector)
        assert (collector.stats().rows, collector.stats().dropped_rows) == (ROWS, 0)
    stats = collector.stats()
    assert (stats.rows, stats.dropped_rows) == (ROWS, ROWS)
    with pytest.raises(errors.ClosedError):
        collector.rollout()


def test_closing_wakes_a_reader_that_waits_for_the_requested_rollout(client: Client) -> None:
    collector = overlapping(client, counting_policy(), env=Tiring, num_envs=2, horizon=1000)
    collector.rollout()
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            collector.rollout()
        except errors.ClosedError as error:
            caught.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert wait_until(collector._rolling.locked)
    collector.close()
    for thread in threads:
        thread.join(30)
    assert len(caught) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_threads_that_take_rollouts_at_once_get_whole_ones(client: Client, overlap: bool) -> None:
    found: list[list[Batch]] = []
    with collecting(client, overlap=overlap) as collector:

        def take() -> None:
            found.extend(collector.rollout() for _ in range(5))

        threads = [threading.Thread(target=take) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [[batch.shard for batch in rollout] for rollout in found] == [[0, 1]] * 15
    check([batch for rollout in found for batch in rollout])


def test_iterating_is_refused_with_the_right_call(client: Client) -> None:
    message = r"overlap=True returns rollouts only: batches = collector\.rollout\(\)"
    with overlapping(client) as collector:
        for wrong in (lambda: next(iter(collector)), lambda: collector.collect(100)):
            with pytest.raises(errors.ConfigError, match=message):
                wrong()
        assert len(collector.rollout()) == SHARDS
