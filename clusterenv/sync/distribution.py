"""Decides which worker sends the newest weights to which, if the head cannot send to all."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

__all__ = ["HEAD", "Distribution", "Order"]

HEAD = -1
"""The head, as the source of weights."""


class Order(NamedTuple):
    """A transfer of the newest weights to a shard."""

    shard: int
    source: int
    """A shard that has them, or :data:`HEAD`."""


class Distribution:
    """Shards that want the newest version, that are getting it, and that have it.

    Each source, the head too, serves one shard at a time, and a shard that was served becomes a
    source: the number of sources doubles with each transfer. All methods return the transfers
    that start now.

    >>> distribution = Distribution()
    >>> distribution.ask(0, newest=1), distribution.ask(1, newest=1)
    ([Order(shard=0, source=-1)], [])
    >>> distribution.held(0, newest=1, version=1)
    [Order(shard=1, source=0)]
    """

    def __init__(self) -> None:
        self._version = -1
        self._holders: dict[int, None] = {}  # in the order in which they got it
        self._serving: dict[int, int] = {}  # the source of each shard that is being served
        self._waiting: deque[int] = deque()

    def ask(self, shard: int, newest: int) -> list[Order]:
        """Record that a shard wants the newest version, and has what it was getting before."""
        self._serving.pop(shard, None)
        if shard not in self._waiting:
            self._waiting.append(shard)
        return self._assign(newest)

    def held(self, shard: int, newest: int, version: int) -> list[Order]:
        """Record that a version has reached a shard."""
        self._serving.pop(shard, None)
        if version == self._version:
            self._holders[shard] = None
        return self._assign(newest)

    def failed(self, shard: int, newest: int) -> list[Order]:
        """Record that a transfer to a shard failed, and that the head serves it now."""
        self._holders.pop(self._serving.pop(shard, HEAD), None)
        self._serving[shard] = HEAD
        return self._assign(newest)

    def gone(self, shard: int, newest: int) -> list[Order]:
        """Forget a shard; those that it was serving will report a failure."""
        self._holders.pop(shard, None)
        self._serving.pop(shard, None)
        if shard in self._waiting:
            self._waiting.remove(shard)
        return self._assign(newest)

    def _assign(self, newest: int) -> list[Order]:
        if newest != self._version:
            self._version, self._holders = newest, {}
        busy = {*self._serving.values()}
        free = [source for source in (*self._holders, HEAD) if source not in busy]
        orders = [Order(self._waiting.popleft(), source) for source in free[: len(self._waiting)]]
        self._serving.update(orders)
        return orders
