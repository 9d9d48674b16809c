"""A collecting shard over a socket pair, without a cluster."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from agents import cartpole_policy

from clusterenv import EveryVersion
from clusterenv.data.buffer_pool import BufferPool
from clusterenv.data.pickling import dumps
from clusterenv.data.seeds import new_run_id
from clusterenv.errors import ConnectionClosed
from clusterenv.simulation.engines import Recipe, build
from clusterenv.sync.announcement import Announcement
from clusterenv.sync.weights import Weights, manifest_of, pack
from clusterenv.transport.connection import BlockingConnection
from clusterenv.transport.endpoint import Endpoint
from clusterenv.transport.messages import (
    FROM_CACHE,
    Credit,
    FragmentMeta,
    MessageKind,
    Pong,
    WeightsMeta,
)
from clusterenv.worker.specs import ShardSpec, StreamSpec
from clusterenv.worker.streamer import Stream

pytestmark = pytest.mark.timeout(30)
FRESH, ANY = True, False


class Shard:
    """A stream in a thread, and the head's end of its connection."""

    def __init__(self, fetch: Any = None) -> None:
        ours, theirs = socket.socketpair()
        self.head = BlockingConnection(ours)
        spec = StreamSpec(cartpole_policy(), EveryVersion(), horizon=4, seed=1, version=0)
        engine = build(Recipe(gym.spec("CartPole-v1")), 0, 2)
        shard = ShardSpec(0, 0, 2, None, accept_timeout=10, fleet=str(new_run_id()))
        self.stream = Stream(engine, shard, spec, fetch)
        self._thread = threading.Thread(
            target=self.stream.run, args=(BlockingConnection(theirs),), daemon=True
        )
        self._thread.start()

    def send(self, kind: MessageKind, blob: bytes = b"", body: Any = ()) -> None:
        self.head.send(kind, blob, body)

    def grant(self, fresh: bool, version: int = 0) -> None:
        """Send a credit, which tells of the newest version."""
        newest = Announcement(version, {}, {}, version).told_to(None)
        self.send(MessageKind.CREDIT, dumps(tuple(Credit(fresh, newest))))

    def weights(self, version: int, source: Any, body: Any = (), digest: int = 0) -> None:
        self.send(
            MessageKind.WEIGHTS, dumps(tuple(WeightsMeta(version, digest, source))), list(body)
        )

    def next(self) -> tuple[MessageKind, Any]:
        """The next message, without its body."""
        header = self.head.recv_header()
        blob = self.head.recv_blob(header)
        self.head.recv_body(header, [np.empty(header.body, np.uint8)])
        return MessageKind(header.kind), blob

    def until(self, kind: MessageKind) -> Any:
        """The blob of the next message of a kind."""
        while (received := self.next())[0] != kind:
            pass
        return received[1]

    def close(self) -> None:
        self.head.close()
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def shard() -> Iterator[Shard]:
    shard = Shard()
    yield shard
    shard.close()


def weights(version: int) -> Weights:
    policy = cartpole_policy(version)
    return pack(policy, manifest_of(policy), version, BufferPool())


def pull(shard: Shard, version: int) -> None:
    """Have the shard ask for a version."""
    shard.grant(ANY, version)
    assert shard.until(MessageKind.PULL) is False
    shard.until(MessageKind.FRAGMENT)


def test_a_restarted_shard_waits_for_the_weights_that_it_was_sent(shard: Shard) -> None:
    shard.weights(7, FROM_CACHE)  # which another shard of the process is still downloading
    shard.grant(ANY, 7)
    shard.send(MessageKind.PING, dumps(None))
    assert Pong(*shard.until(MessageKind.PONG)).steps == 0
    shard.stream.cache.put(weights(7))
    assert FragmentMeta.unpack(shard.until(MessageKind.FRAGMENT)).version == 7


def test_pings_and_credits_are_served_while_another_shard_downloads_the_weights(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterenv.worker.weight_transfer._CACHE_SECONDS", 3600.0)
    pull(shard, 1)
    shard.weights(1, FROM_CACHE)
    shard.send(MessageKind.PING, dumps(None))
    assert Pong(*shard.until(MessageKind.PONG)).steps == 4
    shard.grant(ANY)
    assert FragmentMeta.unpack(shard.until(MessageKind.FRAGMENT)).version == 0
    shard.grant(FRESH)  # waits for the weights, and the reader does not
    shard.send(MessageKind.PING, dumps(None))
    assert Pong(*shard.until(MessageKind.PONG)).steps == 8
    shard.stream.cache.put(weights(1))
    assert FragmentMeta.unpack(shard.until(MessageKind.FRAGMENT)).version == 1


def test_weights_in_the_cache_act_in_the_next_fragment(shard: Shard) -> None:
    shard.stream.cache.put(weights(1))
    pull(shard, 1)
    shard.weights(1, FROM_CACHE)
    shard.grant(FRESH)
    assert FragmentMeta.unpack(shard.until(MessageKind.FRAGMENT)).version == 1


def test_a_shard_asks_the_head_for_weights_that_another_did_not_get(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterenv.worker.weight_transfer._CACHE_SECONDS", 0.05)
    pull(shard, 1)
    shard.weights(1, FROM_CACHE)
    assert shard.until(MessageKind.PULL) is True
    whole = weights(1)
    shard.weights(1, None, [whole.buffer], whole.digest)
    shard.grant(FRESH)
    assert FragmentMeta.unpack(shard.until(MessageKind.FRAGMENT)).version == 1
    assert shard.stream.cache.get(1) is not None  # for the other shards


def test_a_hint_newer_than_the_credit_changes_no_lock_step_fragment(shard: Shard) -> None:
    shard.stream.hint(Announcement(5, {}, {}, 5))
    shard.grant(FRESH, 0)
    first = FragmentMeta.unpack(shard.until(MessageKind.FRAGMENT))
    assert (first.version, first.newest, first.checks) == (0, 0, 0)
    shard.grant(FRESH, 1)
    assert shard.until(MessageKind.PULL) is False
    shard.stream.hint(Announcement(6, {}, {}, 6))
    whole = weights(1)
    shard.weights(1, None, [whole.buffer], whole.digest)
    second = FragmentMeta.unpack(shard.until(MessageKind.FRAGMENT))
    assert (second.version, second.newest, second.checks, second.pulls) == (1, 1, 1, 1)
    shard.grant(ANY, 1)  # a credit to run ahead: what was heard counts again
    assert shard.until(MessageKind.PULL) is False


def test_a_newer_version_in_the_cache_is_not_the_one_that_was_sent(shard: Shard) -> None:
    shard.stream.cache.put(weights(2))  # another shard of the process was restarted meanwhile
    shard.grant(FRESH, 1)
    assert shard.until(MessageKind.PULL) is False
    shard.weights(1, FROM_CACHE)
    assert shard.until(MessageKind.PULL) is True
    whole = weights(1)
    shard.weights(1, None, [whole.buffer], whole.digest)
    assert FragmentMeta.unpack(shard.until(MessageKind.FRAGMENT)).version == 1


def test_damaged_weights_are_asked_for_again(shard: Shard) -> None:
    pull(shard, 1)
    shard.weights(1, None, [weights(1).buffer], weights(2).digest)
    assert shard.until(MessageKind.PULL) is True
    assert shard.stream.cache.get(1) is None


def test_pings_are_answered_while_weights_come_from_another_worker() -> None:
    go_on = threading.Event()

    def fetch(endpoint: Endpoint, version: int, nbytes: int) -> Weights:
        assert endpoint.host == "elsewhere"
        assert go_on.wait(20)
        if version == 2:
            raise ConnectionClosed("it has none")
        return weights(version)

    shard = Shard(fetch)
    pull(shard, 1)
    source = tuple(Endpoint("elsewhere", 1, None, b""))
    shard.weights(1, source)
    shard.send(MessageKind.PING, dumps(None))
    shard.until(MessageKind.PONG)
    go_on.set()
    assert shard.until(MessageKind.HELD) == 1  # it can pass them on
    pull(shard, 2)
    shard.weights(2, source)
    assert shard.until(MessageKind.PULL) is True
    shard.close()


def test_closing_ends_a_wait_for_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clusterenv.worker.weight_transfer._CACHE_SECONDS", 3600.0)
    shard = Shard()
    pull(shard, 1)
    shard.weights(1, FROM_CACHE)
    shard.send(MessageKind.PING, dumps(None))
    shard.until(MessageKind.PONG)
    before = [thread for thread in threading.enumerate() if "pull" in thread.name]
    assert len(before) == 1
    shard.close()
    before[0].join(10)
    assert not before[0].is_alive()
