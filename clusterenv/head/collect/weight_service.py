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
from clusterenv.sync.weights import Weights
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
                self._carry_out(self._distribution.failed(handle.index, self._version))
            elif self._is_cached(record):
                self.answer(record)
            else:
                self._carry_out(self._distribution.ask(handle.index, self._version))

    def held(self, handle: ShardHandle, version: int) -> None:
        """Record that weights have reached a shard."""
        if self._distribution is None:
            return
        with self._roster.lock:
            self._cache(handle, version)
            record = self._roster[handle.index]
            if record.relayed:
                record.relayed = False
                self._tally.sent(self._publisher.newest.buffer.nbytes, relayed=True)
            self._carry_out(self._distribution.held(handle.index, self._version, version))

    def forget(self, handle: ShardHandle) -> None:
        """Forget a shard that is lost or was drained."""
        self._cached.pop(handle.worker, None)  # its process may have ended
        if self._distribution is not None:
            self._carry_out(self._distribution.gone(handle.index, self._version))

    def due(self, record: ShardRecord) -> Weights:
        """Return the weights that a shard gets now: the newest, or those of its rollout.

        The credit for a lock-step fragment names the version that was the newest then. Another may
        have been published before the shard pulls, or is restarted.
        """
        requested = self._publisher.requested
        if record.owes and requested is not None:
            return self._publisher.weights(requested.version)
        return self._publisher.newest

    @property
    def _version(self) -> int:
        """The version that shards pull now."""
        return (self._publisher.requested or self._publisher.announced).version

    def _is_cached(self, record: ShardRecord) -> bool:
        assert record.handle is not None
        return self._cached.get(record.handle.worker) == self.due(record).version

    def _cache(self, handle: ShardHandle, version: int) -> None:
        """Record that a process gets a version; its cache never replaces a newer one."""
        self._cached[handle.worker] = max(version, self._cached.get(handle.worker, version))

    def _carry_out(self, decided: list[Order]) -> None:
        assert self._distribution is not None
        orders = deque(decided)
        while orders:
            shard, source = orders.popleft()
            record = self._roster[shard]
            if record.handle is None or not record.active:
                orders.extend(self._distribution.gone(shard, self._version))
            elif self._is_cached(record):  # another shard of the process was first
                self.answer(record)
                orders.extend(self._distribution.gone(shard, self._version))
            else:
                holder = None if source == HEAD else self._roster[source].handle
                self.answer(record, relay=holder.relay if holder else None)

    def answer(
        self, record: ShardRecord, whole: bool = False, relay: Endpoint | None = None
    ) -> None:
        """Send a shard the weights that are due, or name the worker that has them."""
        handle, weights = record.handle, self.due(record)
        assert handle is not None
        cached = not whole and self._is_cached(record)
        record.version = weights.version
        if relay is None:
            self._cache(handle, weights.version)
        else:
            record.relayed = True
        source = FROM_CACHE if cached else relay and tuple(relay)
        if source is None:
            self._tally.sent(weights.buffer.nbytes)
        blob = dumps(tuple(WeightsMeta(weights.version, weights.digest, source)))
        self._send(handle, MessageKind.WEIGHTS, blob, [] if source else [weights.buffer])
