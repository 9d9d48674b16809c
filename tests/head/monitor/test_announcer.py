"""The order of events on a run's topic: versions come before statistics, and before the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import wait_until
from distributed import Client

from clusterenv.data.seeds import new_run_id
from clusterenv.head.monitor.announcer import Announcer
from clusterenv.head.monitor.follower import follow
from clusterenv.head.monitor.runs import register
from clusterenv.head.monitor.telemetry import SECONDS, Telemetry
from clusterenv.sync.announcement import Announcement

STATS = {"kind": "stats", "rows": [1]}


@pytest.fixture
def announcer(client: Client) -> Iterator[Announcer]:
    entry = register(client, None, new_run_id(), "ordered")
    announcer = Announcer(client, entry, subscribers=lambda: 1)
    yield announcer
    announcer.close()


def version(number: int) -> Announcement:
    return Announcement(number, {}, {}, number)


def at_once(client: Client, send: Callable[[], None]) -> None:
    """Send while the client's event loop cannot: all that is sent waits together."""
    waits, go_on = threading.Event(), threading.Event()
    client.loop.add_callback(lambda: (waits.set(), go_on.wait(30)))
    assert waits.wait(30)
    try:
        send()
    finally:
        go_on.set()


def kinds(client: Client, announcer: Announcer) -> list[Any]:
    told = [message for _, message in client.get_events(announcer.entry.topic)]
    return [message.get("version", message["kind"]) for message in told]


def test_a_version_goes_before_statistics_that_were_sent_first(
    client: Client, announcer: Announcer
) -> None:
    def send() -> None:
        announcer.send(STATS)
        announcer.announce(version(1))
        announcer.send(STATS)
        announcer.announce(version(2))  # replaces the first

    at_once(client, send)
    assert wait_until(lambda: len(kinds(client, announcer)) == 2)
    assert kinds(client, announcer) == [2, "stats"]


def test_the_last_version_goes_before_the_end_and_statistics_do_not(
    client: Client, announcer: Announcer
) -> None:
    closing = threading.Thread(target=announcer.close)

    def send() -> None:
        announcer.send(STATS)
        announcer.announce(version(1))
        closing.start()
        assert wait_until(lambda: announcer._closed)

    at_once(client, send)
    closing.join(30)
    assert kinds(client, announcer) == [1, "end"]


def test_a_follower_passes_over_statistics_before_and_between_versions(
    client: Client, announcer: Announcer
) -> None:
    def told(*wanted: Any) -> None:
        assert wait_until(lambda: kinds(client, announcer) == list(wanted))

    announcer.announce(version(1))
    told(1)
    announcer.send(STATS)
    told(1, "stats")
    following = follow(client, announcer.entry.run)
    assert next(following).version == 1
    announcer.send(STATS)
    told(1, "stats", "stats")
    announcer.announce(version(2))
    assert next(following).version == 2
    announcer.close()
    assert list(following) == []


def test_statistics_are_at_most_one_of_five_events(client: Client) -> None:
    entry = register(client, None, new_run_id(), "many")
    many = Announcer(client, entry, subscribers=lambda: 10_000)
    telemetry = Telemetry(client, many)
    assert not telemetry.due(100.0)  # there is no page
    telemetry.link = "http://127.0.0.1:8787/clusterenv"
    telemetry._sent = 100.0
    assert many.seconds > SECONDS
    assert not telemetry.due(100.0 + 4.9 * many.seconds)
    assert telemetry.due(100.0 + 5.1 * many.seconds)
    many.close()
