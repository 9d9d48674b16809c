"""Weights from worker to worker: over real sockets, and between the workers of a real cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
import pytest
import torch
from agents import cartpole_policy
from conftest import wait_until
from distributed import Client
from distributed.security import Security

import clusterenv
from clusterenv import Collector, EveryVersion
from clusterenv.data.pickling import dumps
from clusterenv.errors import ConnectionClosed
from clusterenv.sync.weights import Weights
from clusterenv.transport.endpoint import Endpoint, Listener
from clusterenv.transport.messages import MessageKind, WeightsMeta
from clusterenv.worker.weight_transfer import WeightCache, WeightRelay, fetch

pytestmark = pytest.mark.usefixtures("leaves_nothing")
SIZE = 3_000_000


def weights(version: int) -> Weights:
    return Weights(version, np.random.default_rng(version).integers(0, 255, SIZE, np.uint8))


@pytest.fixture
def cache() -> WeightCache:
    return WeightCache()


@pytest.fixture(params=["plain", "tls", "local"])
def relay(request: pytest.FixtureRequest, cache: WeightCache) -> Iterator[tuple[Endpoint, Any]]:
    server = client = None
    if request.param == "tls":
        security = Security.temporary()
        server = security.get_listen_args("worker")["ssl_context"]
        client = security.get_connection_args("worker")["ssl_context"]
    relay = WeightRelay(cache, Listener("127.0.0.1", server, local=request.param == "local"))
    yield relay.endpoint, client
    relay.close()


def test_weights_are_handed_on(relay: tuple[Endpoint, Any], cache: WeightCache) -> None:
    endpoint, context = relay
    cache.put(weights(4))
    found = [fetch(endpoint, 4, SIZE, context, 10) for _ in range(3)]
    assert all(each.version == 4 and each.digest == weights(4).digest for each in found)
    cache.put(weights(5))
    with pytest.raises(ConnectionClosed, match="it has version 5, not 4"):
        fetch(endpoint, 4, SIZE, context, 10)


def test_one_that_has_no_weights_yet_sends_one_elsewhere(cache: WeightCache) -> None:
    relay = WeightRelay(cache, Listener("127.0.0.1"))
    with pytest.raises(ConnectionClosed):
        fetch(relay.endpoint, 2, SIZE, None, 10)
    relay.close()


def test_a_stranger_who_says_nothing_keeps_nobody_waiting(cache: WeightCache) -> None:
    cache.put(weights(1))
    relay = WeightRelay(cache, Listener("127.0.0.1", local=False))
    with socket.create_connection(("127.0.0.1", relay.endpoint.port)):
        began = time.monotonic()
        assert fetch(relay.endpoint, 1, SIZE, None, 10).version == 1
        assert time.monotonic() - began < 3
    relay.close()


def test_one_that_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint("127.0.0.1", silent.getsockname()[1], None, b"x" * 32)
        began = time.monotonic()
        with pytest.raises(ConnectionClosed):
            fetch(endpoint, 1, SIZE, None, 0.5)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("fault", ["damaged", "short", "closed"])
def test_what_is_not_as_it_should_be_is_refused(fault: str) -> None:
    listener = Listener("127.0.0.1")

    def answer() -> None:
        connection = listener.accept(10)
        connection.recv_raw(connection.recv_header())
        given = weights(1)
        with contextlib.suppress(ConnectionClosed):  # it may not wait for the end
            if fault == "damaged":
                connection.send(
                    MessageKind.WEIGHTS,
                    dumps(tuple(WeightsMeta(1, weights(2).digest))),
                    [given.buffer],
                )
            elif fault == "short":
                connection.send(
                    MessageKind.WEIGHTS,
                    dumps(tuple(WeightsMeta(1, given.digest))),
                    [given.buffer[:-1]],
                )
        connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ConnectionClosed):
        fetch(listener.endpoint, 1, SIZE, None, 10)
    thread.join()
    listener.close()


def test_a_closed_relay_leaves_nobody_waiting(cache: WeightCache) -> None:
    relay = WeightRelay(cache, Listener("127.0.0.1"))
    relay.close()
    with pytest.raises(ConnectionRefusedError):
        fetch(relay.endpoint, 1, SIZE, None, 5)


# On a cluster


@pytest.fixture(params=[True, False], ids=["local", "tls"])
def collector(request: pytest.FixtureRequest, client: Client) -> Iterator[Collector]:
    settings = {"clusterenv.channel.relay": "100 B", "clusterenv.channel.local": request.param}
    with (
        dask.config.set(settings),
        Collector(
            "CartPole-v1",
            cartpole_policy(),
            num_envs=6,
            horizon=4,
            shards=3,
            cluster=client,
            seed=3,
            sync=EveryVersion(),
        ) as collector,
    ):
        yield collector


def assert_acted_by(policy: Any, collector: Collector, version: int) -> None:
    for batch in collector.rollout():
        assert batch.policy_version == version
        columns = batch.torch()
        with torch.no_grad():
            logits = policy.module(columns["obs"])
            expected = torch.distributions.Categorical(logits=logits).log_prob(columns["action"])
        assert torch.allclose(columns["log_prob"], expected, atol=1e-5)


def test_the_head_gives_a_version_once_and_workers_the_rest(collector: Collector) -> None:
    collector.rollout()
    nbytes = collector._publisher.newest.buffer.nbytes
    for version in range(1, 6):
        policy = cartpole_policy(version)
        assert collector.publish(policy) == version
        assert "digest" in vars(collector._publisher.newest)  # the receiving thread need not
        assert_acted_by(policy, collector, version)
    stats = collector.stats()
    assert stats.pulls == 15
    assert stats.weight_bytes + stats.relayed_bytes == 15 * nbytes
    # The first of three comes from the head; it may have a hand free for the third.
    assert 5 * nbytes <= stats.weight_bytes <= 10 * nbytes


def test_a_worker_that_hands_nothing_on_costs_no_version(collector: Collector) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    for handle in collector._fleet.handles:
        handle.relay = Endpoint("127.0.0.1", port, None, b"x" * 32)
    collector.rollout()
    for version in range(1, 4):
        policy = cartpole_policy(version)
        collector.publish(policy)
        assert_acted_by(policy, collector, version)
    nbytes = collector._publisher.newest.buffer.nbytes
    assert collector.stats().weight_bytes == 3 * 3 * nbytes  # in the end all are the head's


def test_while_iterating_all_get_the_newest_version(collector: Collector) -> None:
    batches = iter(collector)
    next(batches)
    for version in range(1, 30):
        collector.publish(cartpole_policy(version))
        next(batches)
    newest: dict[int, int] = {}

    def all_have_it() -> bool:
        batch = next(batches)
        newest[batch.shard] = batch.policy_version
        return list(newest.values()) == [29, 29, 29]

    assert wait_until(all_have_it)


def test_a_lost_worker_holds_up_nobody() -> None:
    with (
        dask.config.set({"clusterenv.channel.relay": "100 B"}),
        clusterenv.connect("local", n_workers=3, set_as_default=False) as client,
        Collector(
            "CartPole-v1", cartpole_policy(), num_envs=6, horizon=4, shards=3, cluster=client
        ) as collector,
    ):
        batches = iter(collector)
        next(batches)
        for version in range(1, 40):
            collector.publish(cartpole_policy(version))
            next(batches)
            if version in (10, 20):
                worker = collector.shards[version // 10].worker
                os.kill(client.run(os.getpid, workers=[worker])[worker], signal.SIGKILL)
        seen: set[tuple[int, int]] = set()

        def all_have_it() -> bool:
            batch = next(batches)
            seen.add((batch.shard, batch.policy_version))
            return {(shard, 39) for shard in range(3)} <= seen

        assert wait_until(all_have_it, seconds=30)
        assert collector.stats().restarts >= 1


def test_small_policies_have_no_relay(client: Client) -> None:
    with Collector("CartPole-v1", cartpole_policy(), num_envs=2, horizon=4, cluster=client) as few:
        assert [handle.relay for handle in few._fleet.handles] == [None] * len(few._fleet.handles)


def test_a_stranger_without_the_token_gets_no_weights(cache: WeightCache) -> None:
    cache.put(weights(1))
    relay = WeightRelay(cache, Listener("127.0.0.1", local=False))
    with pytest.raises(ConnectionClosed):
        fetch(relay.endpoint._replace(token=b"x" * 32), 1, SIZE, None, 5)
    assert isinstance(fetch(relay.endpoint, 1, SIZE, None, 5), Weights)
    relay.close()
