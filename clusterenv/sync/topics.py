"""Subscribes to a Dask topic once per client, however many handlers there are.

Dask has one handler per topic and client, and a process may need several: that of each shard, and
that of a follower in the same process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

__all__ = ["Handler", "subscribe"]

Handler = Callable[[Any], None]
"""Called with each message, on the event loop of the client: it must not wait."""


class _Client(Protocol):
    """What is needed of a Dask client."""

    status: str

    def subscribe_topic(self, topic: str, handler: Callable[[Any], None]) -> None: ...

    def unsubscribe_topic(self, topic: str) -> None: ...


_lock = threading.RLock()  # garbage collection may end a follower within these functions
_handlers: weakref.WeakKeyDictionary[Any, dict[str, list[Handler]]] = weakref.WeakKeyDictionary()


def subscribe(client: _Client, topic: str, handler: Handler) -> Callable[[], None]:
    """Have a handler called with each message on a topic; return a function that ends it."""
    with _lock:
        topics = _handlers.setdefault(client, {})
        first = topic not in topics
        topics.setdefault(topic, []).append(handler)
        if first:
            client.subscribe_topic(topic, partial(_dispatch, topics, topic))
    return partial(_unsubscribe, client, topic, handler)


def _dispatch(topics: dict[str, list[Handler]], topic: str, event: tuple[float, Any]) -> None:
    for handler in tuple(topics.get(topic, ())):
        handler(event[1])


def _unsubscribe(client: _Client, topic: str, handler: Handler) -> None:
    with _lock:
        topics = _handlers.get(client, {})
        if handler in topics.get(topic, ()):
            topics[topic].remove(handler)
            if not topics[topic]:
                del topics[topic]
                if client.status == "running":
                    client.unsubscribe_topic(topic)
