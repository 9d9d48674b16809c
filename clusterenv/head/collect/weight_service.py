"""Answers the pulls of shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from clusterenv.data.pickling import dumps
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.head.fleet.roster import Roster, ShardRecord
from clusterenv.head.monitor.stats import Tally
from clusterenv.sync.distribution import HEAD, Distribution, Order
from clusterenv.sync.publisher import Publisher
from clusterenv.transport.endpoint import Endpoint
from clusterenv.transport.messages import FROM_CACHE, MessageKind, WeightsMeta

__all__ = ["WeightService"]


class _Send(Protocol):
    def __call__(
        self, peer: ShardHandle, kind: int, blob: bytes, body: Sequence[Any] = ()
    ) -> bool: ...


class WeightService:
    """Answers pulls: from the head, from another worker, or from the process's weight cache.

    With ``relays`` workers send weights to each other, because they are too large for the head to
    send to all. The roster's lock guards its state; callers of ``forget`` and ``answer`` hold it.
    """

    def __init__(
        self, roster: Roster, publisher: Publisher, tally: Tally, send: _Send, relays: bool
    ) -> None:
        self._roster = roster
        self._publisher = publisher
        self._tally = tally
        self._send = send
        self._distribution = Distribution() if relays else None
        self._cached: dict[str, int] = {}  # version in the weight cache of each worker process

    def pull(self, handle: ShardHandle, whole: bool = False) -> None:
        """Answer a pull; with ``whole`` from the head, as no other source had the weights."""
        with self._roster.lock:
            record = self._roster[handle.index]
            if self._distribution is None:
                self.answer(record, whole)
            elif whole:
                record.relayed = False
                self.answer(record, whole=True)
                self._carry_out(self._distribution.failed(handle.index, self._publisher.version))
            elif self._is_cached(handle):
                self.answer(record)
            else:
                self._carry_out(self._distribution.ask(handle.index, self._publisher.version))

    def held(self, handle: ShardHandle, version: int) -> None:
        """Record that weights have reached a shard."""
        if self._distribution is None:
            return
        with self._roster.lock:
            self._cached[handle.worker] = version
            record = self._roster[handle.index]
            if record.relayed:
                record.relayed = False
                self._tally.relayed_bytes += self._publisher.newest.buffer.nbytes
            newest = self._publisher.version
            self._carry_out(self._distribution.held(handle.index, newest, version))

    def forget(self, handle: ShardHandle) -> None:
        """Forget a shard that is lost or was drained."""
        self._cached.pop(handle.worker, None)  # its process may have ended
        if self._distribution is not None:
            self._carry_out(self._distribution.gone(handle.index, self._publisher.version))

    def _is_cached(self, handle: ShardHandle) -> bool:
        return self._cached.get(handle.worker) == self._publisher.version

    def _carry_out(self, decided: list[Order]) -> None:
        assert self._distribution is not None
        newest = self._publisher.version
        orders = deque(decided)
        while orders:
            shard, source = orders.popleft()
            record = self._roster[shard]
            if record.handle is None or not record.active:
                orders.extend(self._distribution.gone(shard, newest))
            elif self._is_cached(record.handle):  # another shard of the process was first
                self.answer(record)
                orders.extend(self._distribution.gone(shard, newest))
            else:
                holder = None if source == HEAD else self._roster[source].handle
                self.answer(record, relay=holder.relay if holder else None)

    def answer(
        self, record: ShardRecord, whole: bool = False, relay: Endpoint | None = None
    ) -> None:
        """Send a shard the newest weights, or name the worker that has them."""
        handle, weights = record.handle, self._publisher.newest
        assert handle is not None
        cached = not whole and self._is_cached(handle)
        record.version = weights.version
        if relay is None:
            self._cached[handle.worker] = weights.version
        else:
            record.relayed = True
        source = FROM_CACHE if cached else relay and tuple(relay)
        if source is None:
            self._tally.weight_bytes += weights.buffer.nbytes
        blob = dumps(tuple(WeightsMeta(weights.version, weights.digest, source)))
        self._send(handle, MessageKind.WEIGHTS, blob, [] if source else [weights.buffer])
