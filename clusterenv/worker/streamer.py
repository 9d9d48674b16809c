"""A shard that collects by itself: policy beside the simulation, whole fragments to the head.

Three threads: one steps the environments, one reads what the head says, one sends fragments.
The head grants tickets; a ticket is worth one fragment. With no ticket left the env loop
waits: that is all the backpressure there is, and all the memory it needs.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from clusterenv.data.codec import Parts, encode
from clusterenv.data.fragment import Fragment
from clusterenv.data.pickling import dumps
from clusterenv.data.seeds import env_seeds
from clusterenv.data.spaces import Array
from clusterenv.errors import ConfigError, ConnectionClosed
from clusterenv.simulation.engines.base import Engine
from clusterenv.simulation.fragment_builder import Interrupted
from clusterenv.simulation.loop import EnvLoop
from clusterenv.simulation.policy_rng import PolicyRNG, this_process
from clusterenv.simulation.policy_runner import Acting
from clusterenv.sync.subscriber import Announcement, Subscriber
from clusterenv.sync.weight_cache import weight_cache_of
from clusterenv.sync.weights import Weights, load, manifest_of
from clusterenv.transport.connection import Connection, Header
from clusterenv.transport.endpoint import Endpoint
from clusterenv.transport.messages import ON_SHELF, FragmentMeta, MessageKind
from clusterenv.worker.failures import failure_of
from clusterenv.worker.specs import StreamSpec

__all__ = ["Fetch", "Stream"]

logger = logging.getLogger("clusterenv")

_SHELF_SECONDS = 5.0

Ticket = bool | Literal["drain"] | None
"""Whether a fragment shall be fresh; or to hand the shard over, or to stop."""


Fetch = Callable[[Endpoint, int, int], Weights]
"""Gets weights from a worker: where, which version, and how many bytes."""


class Note(NamedTuple):
    """A frame without a body, on its way to the head."""

    kind: MessageKind
    blob: bytes


class Stream:
    """The collecting shard; made before the head connects, so that faults show early."""

    def __init__(
        self,
        engine: Engine,
        spec: StreamSpec,
        first: int,
        incarnation: int = 0,
        fleet: str = "",
        fetch: Fetch | None = None,
    ) -> None:
        rng = None
        if spec.head != this_process():  # there, threads and random numbers are the learner's
            torch.set_num_threads(1)  # the shards are the parallelism
            # What policies draw repeats too, for the same sharding.
            (seed,) = env_seeds(spec.seed, incarnation, first, 1)
            rng = PolicyRNG(seed, restore=False)
        self._first = first
        self._by_step = spec.switch == "step"
        self._policy = spec.policy.eval()
        self._manifest = manifest_of(self._policy)
        self._client = Subscriber(spec.rule, spec.version)
        self._loop = EnvLoop(
            engine,
            self._policy,
            first,
            spec.horizon,
            env_seeds(spec.seed, incarnation, first, engine.num_envs),
            spec.env_faults,
            rng,
            spec.text,
        )
        self._tickets: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[tuple[Fragment, FragmentMeta, list[Array]] | Note | None]
        self._outbox = queue.SimpleQueue()
        self.shelf = weight_cache_of(fleet)
        self._fetch = fetch
        self._changed = threading.Condition()
        self._arrived: Weights | None = None
        self._closed = False
        self._busy = False  # whether environments are being stepped

    def run(self, connection: Connection) -> None:
        """Collect until the head closes the connection."""
        self._connection = connection
        helpers = [
            threading.Thread(target=target, name=f"clusterenv-{name}-{self._first}", daemon=True)
            for name, target in (("reader", self._read), ("sender", self._send))
        ]
        for helper in helpers:
            helper.start()
        try:
            while (fresh := self._tickets.get()) is not None:
                if fresh == "drain":  # every ticket before it was good for a fragment
                    self._hand_over()
                    break
                self._synchronize(wait=fresh)
                self._busy = True
                newest, divergence = self._client.newest.version, self._client.divergence
                between = self._between if self._by_step and not fresh else None
                fragment = self._loop.fragment(self._acting(), fresh, between)
                self._busy = False
                parts, body = encode(fragment)
                meta = self._meta(fragment, newest, divergence, parts)
                self._outbox.put((fragment, meta, body))
        except Interrupted:
            pass
        except (Exception, SystemExit) as error:
            if not self._closed:
                self._tell(MessageKind.FAILED, failure_of(error, self._first, "collect"))
                while self._tickets.get() is not None:  # until the head has read it and closes
                    pass
        finally:
            self._outbox.put(None)
            connection.close()
            for helper in helpers:
                helper.join()

    def _hand_over(self) -> None:
        """Deliver all that is finished, say so, and wait until the head closes."""
        self._tell(MessageKind.DRAINED, self._loop.waiting_rows)
        while self._tickets.get() is not None:
            pass

    def _acting(self) -> Acting:
        return Acting(self._client.version, self._client.newest.scalars)

    def _between(self) -> Acting:
        """Between steps: take up what is new, and never wait."""
        if self._arrived is not None or self._client.undecided:
            self._synchronize(wait=False)
        return self._acting()

    def _synchronize(self, wait: bool) -> None:
        """Load what has arrived, ask for weights if the rule says so, and perhaps wait for them."""
        self._load()
        if self._client.decide():
            self._tell(MessageKind.PULL, False)
        while wait and self._client.wanted is not None:
            with self._changed:
                while self._arrived is None:
                    if self._closed:
                        raise Interrupted
                    self._changed.wait()
            self._load()

    def _load(self) -> None:
        """Act with what has arrived."""
        with self._changed:
            weights, self._arrived = self._arrived, None
        if weights is not None:
            load(self._policy, self._manifest, weights)
            self._client.pulled(weights.version)

    def _tell(self, kind: MessageKind, what: Any) -> None:
        """Say something to the head, after what was said before.

        Only the sender's thread writes: a reader that waited until the head reads, while the head
        waits until this reader does, would wait forever.
        """
        self._outbox.put(Note(kind, dumps(what)))

    def _meta(
        self, fragment: Fragment, newest: int, divergence: float | None, parts: Parts
    ) -> FragmentMeta:
        return FragmentMeta(
            int(fragment.columns["version"][: fragment.num_envs].min()),
            newest,
            divergence,
            parts,
            fragment.returns,
            fragment.lengths,
            fragment.dropped,
            self._client.checks,
            self._client.pulls,
            fragment.cuts,
        )

    def _send(self) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                if isinstance(item, Note):
                    self._connection.send(item.kind, item.blob)
                    continue
                fragment, meta, body = item
                self._connection.send(MessageKind.FRAGMENT, dumps(tuple(meta)), body)
                self._loop.recycle(fragment)
        except ConnectionClosed:
            self._stop()
        except ConfigError as error:  # a message larger than allowed
            self._connection.send(
                MessageKind.FAILED, dumps(failure_of(error, self._first, "collect"))
            )

    def _read(self) -> None:
        try:
            while True:
                header = self._connection.recv_header()
                blob = self._connection.recv_blob(header)
                if header.kind == MessageKind.TICKET:
                    self._tickets.put(blob)
                elif header.kind == MessageKind.ANNOUNCE:
                    self._client.newest = Announcement(*blob)
                elif header.kind == MessageKind.WEIGHTS:
                    self._receive(header, blob)
                elif header.kind == MessageKind.DRAIN:
                    self._tickets.put("drain")
                elif header.kind == MessageKind.PING:
                    self._tell(MessageKind.PONG, (self._loop.steps, self._busy))
        except ConnectionClosed:
            self._stop()

    def _receive(self, header: Header, blob: Any) -> None:
        version, digest, source = blob
        if source == ON_SHELF:
            self._arrive(self.shelf.take(version, _SHELF_SECONDS))
        elif source is None:
            buffer = np.empty(self._manifest.nbytes, np.uint8)
            self._connection.recv_body(header, [buffer])
            weights = Weights(version, buffer)
            if weights.digest != digest:
                logger.warning("the weights of version %d arrived damaged", version)
                self._arrive(None)
            else:
                self._arrive(weights, here=True)
        else:  # tickets and pings come meanwhile
            threading.Thread(
                target=self._get,
                args=(Endpoint(*source), version),
                name=f"clusterenv-fetch-{self._first}",
                daemon=True,
            ).start()

    def _get(self, source: Endpoint, version: int) -> None:
        """Get weights from another worker."""
        try:
            assert self._fetch is not None
            weights = self._fetch(source, version, self._manifest.nbytes)
        except OSError as error:
            logger.info("another worker did not hand on version %d: %s", version, error)
            self._arrive(None)
        else:
            self._arrive(weights, here=True)

    def _arrive(self, weights: Weights | None, here: bool = False) -> None:
        """Take up weights, and tell the head if they came ``here``; if none came, ask for all.

        A worker that did not get any goes on with what it has meanwhile.
        """
        if weights is None:
            self._tell(MessageKind.PULL, True)
            return
        if here:
            self.shelf.put(weights)
            if self._fetch is not None:
                self._tell(MessageKind.HELD, weights.version)
        with self._changed:
            if self._arrived is None or weights.version >= self._arrived.version:
                self._arrived = weights
            self._changed.notify()

    def _stop(self) -> None:
        self._closed = True
        self._loop.interrupt()
        self._tickets.put(None)
        with self._changed:
            self._changed.notify()
