"""One subscription per client and topic, for any number of handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clusterenv.sync.topics import subscribe


class Subscriptions:
    """What of a Dask client is used."""

    status = "running"

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[[Any], None]] = {}
        self.calls: list[str] = []

    def subscribe_topic(self, topic: str, handler: Callable[[Any], None]) -> None:
        self.calls.append(f"+{topic}")
        self.handlers[topic] = handler

    def unsubscribe_topic(self, topic: str) -> None:
        self.calls.append(f"-{topic}")


def test_handlers_share_a_subscription_that_ends_with_the_last() -> None:
    client, first, second = Subscriptions(), [], []
    ends = [subscribe(client, "a", each.append) for each in (first, second)]
    other = subscribe(client, "b", first.append)
    client.handlers["a"]((0.0, "x"))
    ends[0]()
    ends[0]()  # twice does no harm
    client.handlers["a"]((0.0, "y"))
    ends[1]()
    client.handlers["a"]((0.0, "z"))  # was on its way
    assert (first, second) == (["x"], ["x", "y"])
    assert client.calls == ["+a", "+b", "-a"]
    subscribe(client, "a", first.append)
    assert client.calls[-1] == "+a"
    client.status = "closed"
    other()
    assert client.calls[-1] == "+a"  # a closed client sends nothing
