"""Who gives weights to whom, with no cluster."""

from __future__ import annotations

import random

import pytest

from clusterenv.sync.distribution import HEAD, Distribution, Order


def rounds(shards: int) -> list[int]:
    """Return how many transfers go on at once, round by round, until all have the weights."""
    distribution = Distribution()
    going = [order for shard in range(shards) for order in distribution.ask(shard, newest=1)]
    counts = []
    while going:
        counts.append(len(going))
        going = [
            order
            for shard in [order.shard for order in going]
            for order in distribution.held(shard, version=1, newest=1)
        ]
    return counts


def test_sources_double_until_all_have_it() -> None:
    assert rounds(1) == [1]
    assert rounds(15) == [1, 2, 4, 8]
    assert rounds(100) == [1, 2, 4, 8, 16, 32, 37]


def test_a_new_version_comes_from_the_head_first() -> None:
    distribution = Distribution()
    assert distribution.ask(0, newest=1) == [Order(0, HEAD)]
    assert distribution.held(0, version=1, newest=1) == []
    assert distribution.ask(1, newest=2) == [Order(1, HEAD)]  # shard 0 has the one before
    assert distribution.ask(0, newest=2) == []
    assert distribution.held(1, version=2, newest=2) == [Order(0, 1)]


def test_what_arrived_while_a_newer_version_came_is_not_handed_on() -> None:
    distribution = Distribution()
    distribution.ask(0, newest=1)
    distribution.ask(1, newest=1)
    assert distribution.held(0, version=1, newest=2) == [Order(1, HEAD)]


def test_a_source_that_failed_serves_no_more_and_the_head_does() -> None:
    distribution = Distribution()
    distribution.ask(0, newest=1)
    distribution.held(0, version=1, newest=1)
    assert distribution.ask(1, newest=1) == [Order(1, 0)]
    assert distribution.failed(1, newest=1) == []
    assert distribution.ask(2, newest=1) == []  # the head is busy with shard 1
    assert distribution.held(1, version=1, newest=1) == [Order(2, 1)]


def test_a_shard_that_is_gone_frees_its_source_and_is_none() -> None:
    distribution = Distribution()
    distribution.ask(0, newest=1)
    distribution.ask(1, newest=1)
    distribution.ask(2, newest=1)
    assert distribution.gone(1, newest=1) == []  # it waited
    assert distribution.gone(0, newest=1) == [Order(2, HEAD)]  # the head was giving it to shard 0
    distribution.held(2, version=1, newest=1)
    distribution.gone(2, newest=1)
    assert distribution.ask(3, newest=1) == [Order(3, HEAD)]


def test_asking_twice_while_waiting_is_asking_once() -> None:
    distribution = Distribution()
    distribution.ask(0, newest=1)
    distribution.ask(1, newest=1)
    distribution.ask(1, newest=1)
    assert distribution.held(0, version=1, newest=1) == [Order(1, 0)]
    assert distribution.held(1, version=1, newest=1) == []


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_everybody_who_asks_is_served(seed: int) -> None:
    """Versions, failures and losses at random; no source serves two, and nobody waits forever."""
    draw = random.Random(seed)
    distribution, newest = Distribution(), 1
    wants, getting = set[int](), dict[int, tuple[int, int]]()  # shard: source, version

    def take(orders: list[Order]) -> None:
        for shard, source in orders:
            assert shard in wants
            assert shard not in getting
            busy = [other for other, _ in getting.values()]
            assert source not in busy
            getting[shard] = source, newest

    for _ in range(400):
        event = draw.random()
        shard = draw.randrange(8)
        if event < 0.3 and shard not in wants:
            wants.add(shard)
            take(distribution.ask(shard, newest))
        elif event < 0.4:
            newest += 1
        elif event < 0.5:
            wants.discard(shard)
            getting.pop(shard, None)
            take(distribution.gone(shard, newest))
        elif getting:
            shard = draw.choice(sorted(getting))
            source, version = getting.pop(shard)
            if source != HEAD and draw.random() < 0.3:
                orders = distribution.failed(shard, newest)  # the head gives it now
                take([order for order in orders if order.shard != shard])
                version = newest
            wants.discard(shard)
            take(distribution.held(shard, newest, version))
    while getting:
        shard, (_, version) = getting.popitem()
        wants.discard(shard)
        take(distribution.held(shard, newest, version))
    assert not wants
