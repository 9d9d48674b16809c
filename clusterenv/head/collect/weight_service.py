"""The head's answers to shards that pull: from the head, from another worker, or from the shelf."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from clusterenv.data.pickling import dumps
from clusterenv.head.fleet.fleet import Fleet
from clusterenv.head.fleet.handle import ShardHandle
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
    """Gives each worker process the newest weights once, whoever of its shards asks.

    Parameters
    ----------
    relays
        Whether workers hand the weights on: for those that are too large for the head to give
        to all.
    """

    def __init__(
        self, fleet: Fleet, publisher: Publisher, tally: Tally, send: _Send, relays: bool
    ) -> None:
        self._fleet = fleet
        self._publisher = publisher
        self._tally = tally
        self._send = send
        self._distribution = Distribution() if relays else None
        self._shelved: dict[str, int] = {}  # the version that each worker has, and all shards on it
        self._relayed: set[int] = set()  # shards that are getting weights from a worker

    def pull(self, handle: ShardHandle, whole: bool = False) -> None:
        """Answer a shard that asks: for all of them, if it did not get what it was promised."""
        weights = self._newest()
        if self._distribution is None:
            self._answer(handle, weights, whole)
        elif whole:
            self._relayed.discard(handle.index)
            self._answer(handle, weights, whole=True)
            self._carry_out(self._distribution.failed, handle.index, weights)
        elif self._is_shelved(handle, weights):
            self._answer(handle, weights)
        else:
            self._carry_out(self._distribution.ask, handle.index, weights)

    def give(self, handle: ShardHandle) -> None:
        """Bring a shard that was placed again up to date."""
        self._answer(handle, self._newest())

    def held(self, handle: ShardHandle, version: int) -> None:
        """Note that weights have reached a shard."""
        if self._distribution is not None:
            self._shelved[handle.worker] = version
            if handle.index in self._relayed:
                self._relayed.discard(handle.index)
                with self._tally.lock:
                    self._tally.relayed_bytes += self._publisher.newest.buffer.nbytes
            held = partial(self._distribution.held, version=version)
            self._carry_out(held, handle.index, self._newest())

    def parted(self, handle: ShardHandle) -> None:
        """Forget a shard that is lost or moves."""
        self._shelved.pop(handle.worker, None)  # its process may have ended
        self._relayed.discard(handle.index)
        if self._distribution is not None:
            self._carry_out(self._distribution.gone, handle.index, self._newest())

    def _newest(self) -> Weights:
        with self._tally.lock:
            return self._publisher.newest

    def _is_shelved(self, handle: ShardHandle, weights: Weights) -> bool:
        return self._shelved.get(handle.worker) == weights.version

    def _carry_out(
        self, decide: Callable[[int, int], list[Order]], shard: int, weights: Weights
    ) -> None:
        assert self._distribution is not None
        orders = deque(decide(shard, weights.version))
        handles = self._fleet.handles
        while orders:
            shard, source = orders.popleft()
            handle = handles[shard] if shard < len(handles) else None
            if handle is None or handle.lost:
                orders.extend(self._distribution.gone(shard, weights.version))
            elif self._is_shelved(handle, weights):  # another shard of the process was first
                self._answer(handle, weights)
                orders.extend(self._distribution.gone(shard, weights.version))
            else:
                self._answer(
                    handle, weights, relay=None if source == HEAD else handles[source].relay
                )

    def _answer(
        self,
        handle: ShardHandle,
        weights: Weights,
        whole: bool = False,
        relay: Endpoint | None = None,
    ) -> None:
        shelved = not whole and self._is_shelved(handle, weights)
        with self._tally.lock:
            self._publisher.in_use[handle.index] = weights.version
            if relay is None and not shelved:
                self._tally.weight_bytes += weights.buffer.nbytes
        if relay is None:
            self._shelved[handle.worker] = weights.version
        else:
            self._relayed.add(handle.index)
        source = FROM_CACHE if shelved else relay and tuple(relay)
        blob = dumps(tuple(WeightsMeta(weights.version, weights.digest, source)))
        self._send(handle, MessageKind.WEIGHTS, blob, [] if source else [weights.buffer])
