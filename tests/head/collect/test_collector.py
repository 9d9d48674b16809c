"""``Collector`` on real clusters: rows, versions, pulls, backpressure and faults."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import dask
import gymnasium as gym
import numpy as np
import pytest
import torch
from agents import (
    Annotating,
    Bad,
    BadState,
    Counter,
    Cycle,
    Reassigning,
    Recalls,
    cartpole_policy,
    changed,
)
from compare import assert_same
from conftest import footprint, left_behind, wait_until
from distributed import Client
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from worlds import Faulty, Slow, World

import clusterenv
from clusterenv import Divergence, Every, EveryVersion, Never, errors
from clusterenv.policies import Categorical, EpsilonGreedy

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def cartpole(client: Client, policy: Any = None, **kwargs: Any) -> clusterenv.Collector:
    options: dict[str, Any] = {"num_envs": 5, "horizon": 8, "shards": 2, "seed": 3, **kwargs}
    return clusterenv.Collector(
        "CartPole-v1", policy or cartpole_policy(), cluster=client, **options
    )


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_rows_equal_sync_vector_env_for_any_sharding(client: Client, shards: int) -> None:
    with clusterenv.Collector(
        World, Cycle(5, start=2), num_envs=5, horizon=6, shards=shards, cluster=client, seed=4
    ) as collector:
        rollouts = [collector.rollout() for _ in range(4)]
    reference = SyncVectorEnv([World] * 5, autoreset_mode=AutoresetMode.SAME_STEP)
    now, _ = reference.reset(seed=4)
    for step in range(24):
        batches, t = rollouts[step // 6], step % 6

        def row(name: str, batches: Any = batches, t: int = t) -> Any:
            return np.concatenate([batch[name][t] for batch in batches])

        actions = 2 + (np.arange(5) + step) % 5
        assert_same(row("obs"), now)
        assert_same(row("action"), actions)
        assert row("env").tolist() == [0, 1, 2, 3, 4]
        now, reward, terminated, truncated, _ = reference.step(actions)
        assert_same(row("reward"), reward.astype(np.float32))
        assert_same(row("terminated"), terminated)
        assert_same(row("truncated"), truncated)


def test_a_rollout_is_one_fragment_per_shard_of_one_version(client: Client) -> None:
    policy = cartpole_policy()
    with cartpole(client, policy, sync=EveryVersion()) as collector:
        for version in range(5):
            batches = collector.rollout()
            assert [batch.shard for batch in batches] == [0, 1]
            assert [batch["obs"].shape for batch in batches] == [(8, 3, 4), (8, 2, 4)]
            for batch in batches:
                assert batch.policy_version == version
                assert (batch["version"] == version).all()
            policy = changed(policy, 0.1, seed=version)
            assert collector.publish(policy) == version + 1
        stats = collector.stats()
    assert stats.rows == 5 * 8 * 5
    assert stats.pulls == 4 * 2
    assert (stats.lag_min, stats.lag_max) == (0, 0)


def test_shards_are_listed_with_worker_state_and_version(client: Client) -> None:
    with cartpole(client) as collector:
        collector.rollout()
        collector.publish(cartpole_policy(1))
        collector.rollout()
        shards = collector.shards
        assert all(isinstance(shard, clusterenv.ShardInfo) for shard in shards)
        assert {shard.worker for shard in shards} <= set(client.nthreads())
        assert [(s.index, s.state, s.incarnation, s.version) for s in shards] == [
            (0, "running", 0, 1),
            (1, "running", 0, 1),
        ]
        assert [shard.host for shard in shards] == ["127.0.0.1"] * 2
        assert [shard.envs for shard in shards] == [range(3), range(3, 5)]
    assert collector.shards == ()


def test_the_same_seed_gives_the_same_rows(client: Client) -> None:
    runs = []
    for _ in range(2):
        with cartpole(client) as collector:
            runs.append(
                [batch["action"].tolist() for _ in range(3) for batch in collector.rollout()]
            )
    assert runs[0] == runs[1]


def test_another_collector_on_the_same_workers_changes_no_row() -> None:
    def rows(client: Client, beside: bool) -> list[Any]:
        with cartpole(client) as collector:
            found = [batch["action"].tolist() for batch in collector.rollout()]
            if beside:
                with cartpole(client, seed=None) as other, cartpole(client, seed=9) as another:
                    other.collect(500)
                    another.collect(500)
                    found += [batch["action"].tolist() for batch in collector.rollout()]
            else:
                found += [batch["action"].tolist() for batch in collector.rollout()]
        return found

    with clusterenv.connect("local", n_workers=2) as two:
        assert rows(two, beside=False) == rows(two, beside=True)


def test_workers_in_the_heads_own_process_do_not_seed_it_anew() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=None) as own:
        policy, drawn = cartpole_policy(), []
        for seed in (10, 11):
            torch.manual_seed(seed)
            with cartpole(own, policy, shards=1) as collector:
                collector.rollout()
                drawn.append(torch.rand(1).item())
        assert drawn[0] != drawn[1]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_the_published_weights_act(client: Client) -> None:
    """The log-probabilities of the rows are those of the published version."""
    policy = cartpole_policy()
    with cartpole(client, policy) as collector:
        collector.rollout()
        policy = changed(policy, 0.5)
        collector.publish(policy)
        for batch in collector.rollout():
            columns = batch.torch()
            with torch.no_grad():
                net = torch.distributions.Categorical(logits=policy.module(columns["obs"]))
                expected = net.log_prob(columns["action"])
            assert torch.allclose(columns["log_prob"], expected, atol=1e-5)


def test_iteration_never_ends_and_delivers_each_row_once(client: Client) -> None:
    seen: dict[int, list[tuple[int, int]]] = {env: [] for env in range(5)}
    with cartpole(client) as collector:
        for count, batch in enumerate(collector):
            for env, episode, step in zip(
                *(batch[name].T.reshape(-1).tolist() for name in ("env", "episode", "step")),
                strict=True,
            ):
                seen[env].append((episode, step))
            if count == 40:
                break
        stats = collector.stats()
    for rows in seen.values():
        assert len(set(rows)) == len(rows)
        episode, step = 0, -1
        for at_episode, at_step in rows:
            expected = [(episode, step + 1), (episode + 1, 0)]
            assert (at_episode, at_step) in expected
            episode, step = at_episode, at_step
    assert stats.episodes > 10
    assert stats.returns == [float(length) for length in stats.lengths]


def test_collect_gives_at_least_the_rows_asked_for(client: Client) -> None:
    with cartpole(client) as collector:
        batches = collector.collect(100)
        assert 100 <= sum(batch.num_rows for batch in batches) < 100 + 24
        with pytest.raises(errors.ConfigError, match=r"got 0: collect\(4096\)"):
            collector.collect(0)
        with pytest.raises(errors.ConfigError, match="Use one way per collector"):
            collector.rollout()


def test_a_slow_reader_slows_simulation_instead_of_filling_memory(client: Client) -> None:
    with cartpole(client, credits=3) as collector:
        first = next(iter(collector))
        # All credits are used, also the one granted for the first batch; then the shards wait.
        rows = 3 * 8 * 5 + 8 * first.num_envs
        assert wait_until(lambda: collector.stats().rows == rows)
        assert not wait_until(lambda: collector.stats().rows > rows, seconds=0.5)
        assert collector.stats().queued == 6
        assert collector.stats().queued_by_shard == [3, 3]


# Synchronization


def test_nobody_pulls_below_the_threshold_and_no_weights_move(client: Client) -> None:
    policy = cartpole_policy()
    with cartpole(client, policy, sync=Divergence(10.0)) as collector:
        collector.rollout()
        for seed in range(5):
            collector.publish(changed(policy, 0.1, seed))
            batches = collector.rollout()
        stats = collector.stats()
        assert {batch.policy_version for batch in batches} == {0}
        assert (stats.pulls, stats.weight_bytes) == (0, 0)
        assert (stats.announcements, stats.checks, stats.lag_max) == (5, 10, 5)
        assert wait_until(lambda: 0 < collector.stats().announced_bytes < 6 * 2 * 300)
        assert all(0 < value < 10 for value in stats.divergences if value is not None)


def test_all_pull_above_the_threshold(client: Client) -> None:
    policy = cartpole_policy()
    with cartpole(client, policy, sync=Divergence(1e-6)) as collector:
        collector.rollout()
        version = collector.publish(changed(policy, 0.5))
        assert {batch.policy_version for batch in collector.rollout()} == {version}
        stats = collector.stats()
        assert stats.pulls == 2
        assert stats.weight_bytes == 2 * collector._publisher.newest.buffer.nbytes
        # The same weights again: nothing has diverged, no shard pulls.
        collector.publish(changed(policy, 0.5))
        collector.rollout()
        assert collector.stats().pulls == 2


def test_max_lag_pulls_in_the_end(client: Client) -> None:
    policy = cartpole_policy()
    versions = []
    with cartpole(client, policy, sync=Divergence(10.0, max_lag=2)) as collector:
        for _ in range(7):
            versions.append(collector.rollout()[0].policy_version)
            collector.publish(changed(policy, 0.01, seed=len(versions)))
    assert versions == [0, 0, 0, 3, 3, 3, 6]


def test_every_n_and_never(client: Client) -> None:
    policy = cartpole_policy()
    for rule, expected in ((Every(3), [0, 0, 0, 3, 3, 3, 6]), (Never(), [0] * 7)):
        versions = []
        with cartpole(client, policy, sync=rule) as collector:
            for _ in range(7):
                versions.append(collector.rollout()[1].policy_version)
                collector.publish(changed(policy, 0.01, seed=len(versions)))
        assert versions == expected


@pytest.mark.parametrize("rule", [EveryVersion(), Every(2), Divergence(0.0, max_lag=1)])
def test_a_version_with_the_same_weights_is_pulled_by_nobody(client: Client, rule: Any) -> None:
    policy = cartpole_policy()
    with cartpole(client, policy, sync=rule) as collector:
        for version in range(5):
            assert {batch.policy_version for batch in collector.rollout()} == {version}
            collector.publish(policy, epsilon=np.float32(version / 10))
        assert (collector.stats().pulls, collector.stats().weight_bytes) == (0, 0)
        for seed in range(2):
            collector.publish(changed(policy, 0.5, seed))
        collector.publish(changed(policy, 0.5, 1), epsilon=np.int64(1))
        assert {batch.policy_version for batch in collector.rollout()} == {8}
        assert collector.stats().pulls == 2


def test_a_publish_that_fails_is_no_version(client: Client) -> None:
    class Moody(Categorical):
        angry = False

        def distribution(self, obs: Any, context: Any) -> Any:
            if self.angry:
                raise ValueError("not today")
            return super().distribution(obs, context)

    policy = Moody(nn.Linear(4, 2))
    with cartpole(client, policy, sync=Divergence(0.0)) as collector:
        collector.rollout()
        collector._publisher._scratch.angry = True
        with pytest.raises(ValueError, match="not today"):
            collector.publish(changed(policy, 0.5))
        assert (collector.stats().version, collector.stats().announcements) == (0, 0)
        collector._publisher._scratch.angry = False
        assert collector.publish(changed(policy, 0.5)) == 1
        assert {batch.policy_version for batch in collector.rollout()} == {1}


def test_scalars_travel_with_the_announcement_and_need_no_pull(client: Client) -> None:
    class Values(nn.Module):
        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return torch.tensor([0.0, 1.0]).expand(len(obs), 2)

    policy = EpsilonGreedy(Values(), epsilon=0.0)
    with cartpole(client, policy, sync=Never(), horizon=40) as collector:
        assert all((batch["action"] == 1).all() for batch in collector.rollout())
        collector.publish(policy, epsilon=1.0)
        mean = np.mean([batch["action"].mean() for batch in collector.rollout()])
        assert 0.3 < mean < 0.7
        collector.publish(policy, epsilon=0.0)
        assert all((batch["action"] == 1).all() for batch in collector.rollout())
        assert collector.stats().pulls == 0
        with pytest.raises(errors.ConfigError, match=r"epsilon='high'.*scalars are finite"):
            collector.publish(policy, epsilon="high")  # type: ignore[arg-type]
        collector.publish(policy, epsilon=7)
        with pytest.raises(
            errors.PolicyError, match=r"epsilon=7\.0 was published; it is from 0 to"
        ):
            collector.rollout()


def test_versions_that_cannot_be_compared_are_pulled(client: Client) -> None:
    policy = cartpole_policy()
    with cartpole(client, policy, sync=Divergence(0.1)) as collector:
        collector.rollout()
        with torch.no_grad():
            next(policy.parameters()).fill_(float("inf"))  # its actions are NaN
        collector.publish(policy)
        with pytest.raises(errors.PolicyError):  # a shard that had not pulled would act as before
            collector.rollout()


def test_a_temperature_that_divides_by_zero_is_refused_where_it_is_published(
    client: Client,
) -> None:
    policy = EpsilonGreedy(nn.Linear(4, 2))
    with cartpole(client, policy, sync=Divergence(0.1)) as collector:
        collector.rollout()
        with pytest.raises(errors.ConfigError, match=r"temperature=0\.0 was published"):
            collector.publish(policy, temperature=0)
        collector.rollout()


def test_a_burst_of_versions_faster_than_anyone_pulls_stops_nothing(client: Client) -> None:
    policy = cartpole_policy()
    with cartpole(client, policy, sync=EveryVersion()) as collector:
        batches = iter(collector)
        next(batches)
        for seed in range(100):
            policy = changed(policy, 0.01, seed)
            collector.publish(policy)
        newest: dict[int, int] = {}

        def all_newest() -> bool:
            batch = next(batches)
            assert newest.get(batch.shard, 0) <= batch.policy_version
            newest[batch.shard] = batch.policy_version
            return newest == {0: 100, 1: 100}

        assert wait_until(all_newest, 30)
        assert collector.stats().pulls < 20  # not one for each version and shard


class Gated(Categorical):
    """Its evaluation at the head ends when the test says so."""

    begun, may_end = threading.Event(), threading.Event()

    def distribution(self, obs: Any, context: Any) -> Any:
        self.begun.set()
        assert self.may_end.wait(60)
        return super().distribution(obs, context)


def test_batches_arrive_while_a_version_is_evaluated(client: Client) -> None:
    policy = Gated(nn.Linear(4, 2))
    with cartpole(client, policy, sync=Divergence(1e-9)) as collector:
        collector.collect(100)
        publishing = threading.Thread(target=collector.publish, args=(changed(policy, 1.0),))
        publishing.start()
        assert Gated.begun.wait(30)
        rows = sum(batch.num_rows for batch in collector.collect(2000))
        assert collector.stats().rows >= rows
        assert collector.stats().version == 0
        Gated.may_end.set()
        publishing.join()
        assert wait_until(lambda: collector.collect(1)[0].policy_version == 1, 30)


def test_a_shard_changes_its_policy_between_steps_if_asked(client: Client) -> None:
    policies = [cartpole_policy()]
    with clusterenv.Collector(
        Slow, policies[0], num_envs=2, horizon=60, shards=2, cluster=client, switch="step"
    ) as collector:
        batches = [next(iter(collector))]
        while not any(len(np.unique(batch["version"])) > 1 for batch in batches):
            policies.append(changed(policies[-1], 0.5, seed=len(policies)))
            collector.publish(policies[-1])
            batches.append(next(iter(collector)))
            assert len(batches) < 60
    for batch in batches:
        versions = batch["version"][:, 0]
        assert batch.policy_version == versions[0]
        assert (np.diff(versions) >= 0).all()
        columns = batch.torch()
        for version in np.unique(versions):
            at = torch.from_numpy(versions == version)
            with torch.no_grad():
                logits = policies[version].module(columns["obs"][at])
                expected = torch.distributions.Categorical(logits=logits)
                found = expected.log_prob(columns["action"][at])
            assert torch.allclose(columns["log_prob"][at], found, atol=1e-5)


def test_in_lock_step_a_rollout_is_of_one_version_whatever_the_switch(client: Client) -> None:
    with cartpole(client, switch="step") as collector:
        for version in range(3):
            for batch in collector.rollout():
                assert (batch["version"] == version).all()
            collector.publish(cartpole_policy(version))


@pytest.mark.parametrize(("relay", "from_head"), [(None, 2), ("4 MiB", 1)])
def test_weights_too_large_for_one_message_arrive(
    client: Client, relay: str | None, from_head: int
) -> None:
    """40 MB, many times what a socket takes at once: from the head, or from worker to worker."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5_000_000 // 4), nn.Tanh(), nn.Linear(5_000_000 // 4, 2))
    policy = Categorical(net)
    with (
        dask.config.set({"clusterenv.channel.relay": relay}),
        cartpole(client, policy, horizon=2, num_envs=2) as collector,
    ):
        batches = iter(collector)
        next(batches)
        collector.publish(changed(policy, 1e-4))
        versions = {}

        def both_have_it() -> bool:
            batch = next(batches)
            versions[batch.shard] = batch.policy_version
            return versions == {0: 1, 1: 1}

        assert wait_until(both_have_it, seconds=30)
        stats = collector.stats()
        nbytes = collector._publisher.newest.buffer.nbytes
        assert nbytes > 30_000_000
        assert stats.weight_bytes == from_head * nbytes
        assert stats.relayed_bytes == (2 - from_head) * nbytes


def test_shards_go_on_while_weights_are_on_their_way(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = cartpole_policy()
    with cartpole(client, policy) as collector:
        serving = collector._receiver._weights
        pull, asked = serving.pull, []
        monkeypatch.setattr(serving, "pull", lambda *args, **options: asked.append((args, options)))
        collector.publish(changed(policy, 0.5))
        assert wait_until(lambda: bool(collector.collect(1)) and len(asked) == 2)
        batches = collector.collect(40 * 8 * 5)  # many times what was under way
        assert {batch.policy_version for batch in batches} == {0}
        monkeypatch.undo()
        for args, options in asked:
            pull(*args, **options)
        newest: dict[int, int] = {}

        def arrived() -> bool:
            batch = next(iter(collector))
            newest[batch.shard] = batch.policy_version
            return newest == {0: 1, 1: 1}

        assert wait_until(arrived)


def test_recurrent_state_and_extras_reach_the_head(client: Client) -> None:
    with cartpole(client, Counter(), horizon=16) as collector:
        for _ in range(3):
            for batch in collector.rollout():
                assert (batch["value"] == batch["step"]).all()
                assert (batch.state["count"][:, 0] == batch["value"][0]).all()


def test_a_recurrent_policy_has_diverged_where_it_acts_not_where_it_begins(client: Client) -> None:
    policy = Recalls()
    with cartpole(client, policy, sync=Divergence(0.01)) as collector:
        collector.rollout()  # begins with episodes, which have no memory yet
        collector.rollout()
        with torch.no_grad():
            policy.read.weight.add_(torch.tensor([[5.0], [-5.0]]))
        version = collector.publish(policy)
        assert {batch.policy_version for batch in collector.rollout()} == {version}


def test_annotations_reach_the_head(client: Client) -> None:
    with cartpole(client, Annotating()) as collector:
        for batch in collector.rollout():
            expected = np.abs(1 + 0.02 * batch["obs"][..., 1])
            assert np.allclose(batch["priority"], expected, atol=1e-5)
            assert "priority" in batch.record_batch.schema.names
    with pytest.raises(errors.PolicyError, match=r"'priority' of shape .* \(shard \d"):
        cartpole(client, Annotating("length")).rollout()


@pytest.mark.parametrize("engine", ["native", "envpool"])
def test_other_engines_stream_real_rows_only(client: Client, engine: str) -> None:
    if engine == "envpool":
        pytest.importorskip("envpool")
    with cartpole(client, engine=engine, num_envs=8, horizon=16) as collector:
        batches = collector.collect(1500)
        assert all((batch["reward"] == 1).all() for batch in batches)
    with cartpole(client, engine=engine, num_envs=8, horizon=16) as collector:
        for version in range(3):
            for batch in collector.rollout():
                assert (batch["version"] == version).all()
            collector.publish(cartpole_policy(version))
        assert collector.stats().dropped_rows > 0


# Bad input and bad luck


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"horizon": 0}, "horizon must be an integer, at least 1.*got 0: horizon=128"),
        ({"horizon": True}, "horizon must be an integer.*got True"),
        ({"horizon": 10**30}, "horizon must be an integer.*at most 1,048,576, got 1000"),
        ({"credits": 1}, "credits must be an integer, at least 2.*got 1: credits=2"),
        ({"credits": 2.5}, "credits must be an integer, at least 2.*got 2.5"),
        ({"credits": 10**9}, "credits must be .*at most 1,024 .*in the head's memory.*: credits=2"),
        ({"overlap": "yes"}, r"True or False, got 'yes': Collector\(…, overlap=True\)"),
        ({"seed": -1}, "seed must be an integer, at least 0, got -1: seed=1"),
        ({"sync": SimpleNamespace(should_pull=len)}, "is no rule, which has should_pull"),
        ({"sync": Divergence}, "sync=<class .*Divergence'> is no rule"),
        ({"sync": Divergence(0.1), "policy": Cycle()}, "Cycle has none: define distribution"),
        ({"sync": 0.05}, r"sync=0.05 is no rule.*: sync=clusterenv.Divergence\(0.05\)"),
        ({"policy": nn.Linear(4, 2)}, r"policy is a Linear; wrap it: clusterenv.policies"),
        ({"version": -1}, "version must be an integer, at least 0.*got -1: version=0"),
        ({"version": 10**30}, "version must be an integer.*at most 1,073,741,824 .*32 bits"),
        ({"num_envs": None}, "num_envs must be an integer, at least 1.*got None"),
        ({"shards": "2", "max_shards": 4}, "shards must be an integer, at least 1.*got '2'"),
        ({"switch": "row"}, "switch='row' is unknown; .*switch='fragment'.*switch='step'"),
        ({"shards": 9}, "num_envs=5 is less than shards=9"),
    ],
)
def test_bad_arguments(client: Client, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        cartpole(client, **arguments)


def test_a_horizon_that_no_worker_has_memory_for_is_no_loss(
    client: Client, leaves_nothing: None
) -> None:
    pixels = gym.spaces.Box(0, 255, (1024, 1024), np.uint8)

    def draws(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
        blank = np.zeros(pixels.shape, np.uint8)
        return gym.wrappers.TransformObservation(env, lambda _: blank, pixels)

    message = (
        r"horizon=1,048,576 with 2 environments .* takes 2,199\.0 GB, and the worker has .* GB"
    )
    with pytest.raises(errors.ConfigError, match=message):
        cartpole(client, num_envs=4, shards=2, horizon=2**20, wrappers=(draws,))


def test_wrong_calls_leave_a_collector_as_it_is(client: Client) -> None:
    with cartpole(client) as collector:
        for rows in (0, "x", 10**30):
            with pytest.raises(errors.ConfigError, match=r"collect\(rows\) needs a number from 1"):
                collector.collect(rows)  # type: ignore[arg-type]
        with pytest.raises(errors.ConfigError, match=r"shards must be .*: collector\.scale\(4\)"):
            collector.scale(10**9)
        with pytest.raises(errors.ConfigError, match="timeout='soon' is no time: 10, '10s'"):
            collector.close(timeout="soon")  # type: ignore[arg-type]
        assert len(collector.rollout()) == 2


def test_only_a_policy_can_be_published(client: Client) -> None:
    policy = cartpole_policy()
    with (
        cartpole(client, policy) as collector,
        pytest.raises(errors.ConfigError, match=r"publish\(\) got a OrderedDict"),
    ):
        collector.publish(policy.state_dict())  # type: ignore[arg-type]


def test_a_policy_that_cannot_be_pickled(client: Client) -> None:
    policy = cartpole_policy()
    policy.lock = threading.Lock()  # type: ignore[assignment]
    before = footprint()["processes"]
    with pytest.raises(errors.ConfigError, match="the policy cannot be sent to a worker"):
        cartpole(client, policy)
    assert footprint()["processes"] == before


def test_nan_in_the_statistics_of_observations_is_refused(client: Client) -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.linear = nn.Linear(4, 2)

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(obs - self.mean)
            return out

    policy = Categorical(Normalised())
    with cartpole(client, policy, sync=Divergence(0.01)) as collector:
        collector.rollout()
        policy.module.mean[0] = float("nan")
        with pytest.raises(errors.ConfigError, match=r"'module.mean' holds NaN.*version 0"):
            collector.publish(policy)


def test_publishing_what_has_become_nan_leaves_the_workers_as_they_are(client: Client) -> None:
    policy = cartpole_policy()
    with cartpole(client, policy) as collector:
        collector.publish(policy)
        broken = changed(policy, 0.1)
        name, parameter = next(broken.named_parameters())
        with torch.no_grad():
            parameter.view(-1)[-1] = float("nan")
        message = rf"'{name}' holds NaN: the learner has diverged.* go on with version 1"
        with pytest.raises(errors.ConfigError, match=message):
            collector.publish(broken)
        assert {batch.policy_version for batch in collector.rollout()} == {1}
        with torch.no_grad():
            parameter.view(-1)[-1] = float("inf")  # a choice of one's own
        assert collector.publish(broken) == 2


def test_publishing_a_module_that_does_not_match(client: Client) -> None:
    with cartpole(client) as collector:
        with pytest.raises(errors.ConfigError, match=r"'module.0.weight' is missing"):
            collector.publish(Bad("none"))
        collector.rollout()


@pytest.mark.parametrize("how", ["rollout", "iterate"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"matrix is singular \(shard \d \(environments"),
        ("range", r"chose 7 for environment \d at step \d"),
        ("nan", "log_prob is nan for environment"),
    ],
)
def test_a_faulty_policy_is_an_error_with_its_place(
    client: Client, fault: str, message: str, how: str
) -> None:
    collector = cartpole(client, Bad(fault))
    with pytest.raises(errors.PolicyError, match=message):
        collector.rollout() if how == "rollout" else collector.collect(10_000)
    assert collector.closed
    with pytest.raises(errors.ClosedError, match="after PolicyError"):
        collector.rollout()


class Features(Categorical):
    """Gives a wide column of its own with every action."""

    def act(self, obs: Any, context: Any) -> Any:
        decision = super().act(obs, context)
        return decision._replace(extras={"feature": torch.zeros(len(obs), 1000)})


def test_columns_of_a_policy_that_are_wider_than_allowed_end_the_run_with_the_setting(
    client: Client,
) -> None:
    with (
        dask.config.set({"clusterenv.channel.extras": "10 B"}),
        cartpole(client, Features(nn.Linear(4, 2))) as collector,
        pytest.raises(
            errors.ConfigError, match=r"10 bytes for text and the policy's .*channel\.extras"
        ),
    ):
        collector.rollout()


def test_a_policy_whose_state_cannot_be_made_is_refused_before_anything_runs(
    client: Client,
) -> None:
    with pytest.raises(errors.PolicyError, match=r"raised ValueError in initial_state\(\d\)"):
        cartpole(client, BadState("raise"))


def test_a_policy_may_make_its_tensors_anew_while_it_acts(client: Client) -> None:
    policy = Reassigning()
    with cartpole(client, policy, restarts=clusterenv.Restarts(0)) as collector:
        for version in range(4):
            assert {batch.policy_version for batch in collector.rollout()} == {version}
            policy = changed(policy, 0.1)
            collector.publish(policy)


def test_a_policy_that_remembers_what_it_computed_can_be_sent(client: Client) -> None:
    """Torch does not copy such tensors, but pickles them."""
    policy = cartpole_policy()
    policy.last = policy.module(torch.zeros(1, 4))
    with cartpole(client, policy) as collector:
        assert collector.rollout()


def test_a_fault_after_the_shards_were_placed_leaves_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise MemoryError("no room for another copy")

    before = footprint()
    monkeypatch.setattr("clusterenv.head.collect.collector.Publisher", fails)
    with pytest.raises(MemoryError):
        clusterenv.Collector("CartPole-v1", cartpole_policy(), num_envs=2, horizon=8, shards=1)
    assert wait_until(lambda: not left_behind(before)), left_behind(before)


@pytest.mark.parametrize("how", ["rollout", "iterate"])
def test_close_wakes_those_that_wait(client: Client, how: str) -> None:
    collector = clusterenv.Collector(
        Slow, Cycle(2), num_envs=2, horizon=10_000, shards=2, cluster=client
    )
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            collector.rollout() if how == "rollout" else next(iter(collector))
        except errors.ClosedError as error:
            caught.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    roster = collector._fleet.roster  # they have asked for batches
    assert wait_until(lambda: roster.limit is not None or any(record.owes for record in roster))
    collector.close()
    for thread in threads:
        thread.join(10)
    assert len(caught) == 2


def test_without_a_seed_every_shard_draws_numbers_of_its_own(client: Client) -> None:
    """On workers that are forked from one process, and in the next collector too."""
    drawn = []
    policy = Categorical(nn.Linear(4, 2))
    for _ in range(2):
        options = {"num_envs": 8, "horizon": 64, "shards": 2}
        with clusterenv.Collector("CartPole-v1", policy, **options) as collector:
            drawn += [batch["action"].tobytes() for batch in collector.rollout()]
    assert len(set(drawn)) == 4


def test_a_reader_that_never_waits_sees_the_error_that_ends_the_run(client: Client) -> None:
    collector = cartpole(client, Bad("raise", after=20))
    batches = iter(collector)

    def fails() -> bool:
        try:
            while collector.ready:
                next(batches)
        except errors.PolicyError:
            return True
        return False

    next(batches)
    assert wait_until(fails)


def test_an_environment_that_raises_is_named(client: Client) -> None:
    factories = [functools.partial(Faulty, "raise" if i == 3 else "none") for i in range(4)]
    collector = clusterenv.Collector(
        factories,
        Cycle(5, start=2),
        num_envs=4,
        horizon=8,
        shards=2,
        cluster=client,
        env_faults=clusterenv.EnvFaults(0),
    )
    with pytest.raises(errors.EnvError, match=r"environment 3 of shard 1(.|\n)*diverged"):
        collector.rollout()
    assert collector.closed


def test_a_forgotten_collector_is_closed_when_it_is_collected(
    client: Client, leaves_nothing: None
) -> None:
    collector = cartpole(client)
    assert next(iter(collector)).num_rows
    del collector  # `leaves_nothing` looks for what is left on the workers


def test_iterating_a_closed_collector(client: Client) -> None:
    collector = cartpole(client)
    collector.close()
    collector.close()
    with pytest.raises(errors.ClosedError, match="make a new one"):
        next(iter(collector))
    with pytest.raises(errors.ClosedError):
        collector.publish(cartpole_policy())


@pytest.fixture
def fragile() -> Iterator[Client]:
    client = clusterenv.connect("local", n_workers=2)
    yield client
    client.close()


@pytest.mark.parametrize("how", ["rollout", "iterate", "publish"])
def test_a_lost_worker_is_noticed_within_five_seconds(fragile: Client, how: str) -> None:
    collector = cartpole(fragile, restarts=clusterenv.Restarts(0))
    collector.rollout()
    os.kill(next(iter(fragile.run(os.getpid).values())), signal.SIGKILL)
    began = time.monotonic()

    def go_on() -> None:
        while True:
            if how == "publish":
                collector.publish(cartpole_policy())
            if how == "iterate":
                collector.collect(100)
            else:
                collector.rollout()

    with pytest.raises(errors.WorkerLost, match="shard"):
        go_on()
    assert time.monotonic() - began < 5
    assert wait_until(lambda: collector.closed)


def test_its_own_cluster_leaves_nothing() -> None:
    before = footprint()
    with clusterenv.Collector(
        "CartPole-v1", cartpole_policy(), num_envs=4, horizon=8, shards=2
    ) as collector:
        collector.collect(200)
    assert wait_until(lambda: not left_behind(before)), left_behind(before)


def test_action_masks_reach_the_rows(client: Client) -> None:
    class Half(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
        action_space = gym.spaces.Discrete(4)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.odd = (seed or 0) % 2
            return self._now()

        def _now(self) -> Any:
            mask = (np.arange(4) % 2 == self.odd).astype(np.int8)
            return np.zeros(2, np.float32), {"action_mask": mask}

        def step(self, action: Any) -> Any:
            assert action % 2 == self.odd
            self.odd = 1 - self.odd
            obs, info = self._now()
            return obs, 0.0, False, False, info

    with clusterenv.Collector(
        Half, Categorical(nn.Linear(2, 4)), num_envs=4, horizon=8, shards=2, cluster=client, seed=1
    ) as collector:
        for batch in collector.rollout():
            taken = np.take_along_axis(batch["action_mask"], batch["action"][..., None], 2)
            assert taken.all()


def test_the_last_episodes_are_in_the_order_of_shards_whoever_came_first(client: Client) -> None:
    """A shard whose environments are slow delivers last; its episodes count first all the same."""
    lengths = []
    for slow in (0, 2):
        factories = [
            functools.partial(Slow, 0.01 if env // 2 == slow else 0.0, length=3 + env)
            for env in range(6)
        ]
        with clusterenv.Collector(
            factories, Cycle(2), num_envs=6, horizon=12, shards=3, cluster=client
        ) as collector:
            for _ in range(3):
                collector.rollout()
            lengths.append(collector.stats().lengths)
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0])) == 6
