"""A shard that collects by itself: the policy acts beside the environments.

Three threads: one steps the environments, one reads the head's messages, one sends fragments. The
head grants credits; each is worth one fragment. Without a credit the env loop waits: that is all
the backpressure there is. The reader only dispatches messages and never waits for anything else,
so heartbeats and credits are never late.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from clusterenv.data.fragment import Fragment
from clusterenv.data.fragment_encoder import FragmentEncoder
from clusterenv.data.pickling import dumps
from clusterenv.data.processes import this_process
from clusterenv.data.record_batch import Origin
from clusterenv.data.seeds import env_seeds
from clusterenv.data.spaces import Array
from clusterenv.errors import ConfigError, ConnectionClosed
from clusterenv.simulation.engines.base import Engine
from clusterenv.simulation.fragment_builder import Interrupted
from clusterenv.simulation.groups import EnvGroups, GroupedLoop
from clusterenv.simulation.head_policy import HeadPolicy
from clusterenv.simulation.loop import EnvLoop
from clusterenv.simulation.policy_rng import PolicyRNG
from clusterenv.simulation.policy_runner import Acting
from clusterenv.sync.announcement import Announcement
from clusterenv.sync.subscriber import Subscriber
from clusterenv.sync.weights import Weights, load, manifest_of
from clusterenv.transport.connection import BlockingConnection
from clusterenv.transport.framing import Header
from clusterenv.transport.messages import (
    ActionsMeta,
    Credit,
    FragmentMeta,
    MessageKind,
    Pong,
    WeightsMeta,
)
from clusterenv.worker.action_requests import ActionRequests
from clusterenv.worker.failures import failure_of
from clusterenv.worker.specs import ShardSpec, StreamSpec
from clusterenv.worker.weight_transfer import Fetch, WeightPuller, weight_cache_of

__all__ = ["Stream"]

Order = Announcement | Literal["stream", "drain"] | None
"""To make a fragment: in lock-step, with the version that the rule chooses by this announcement; or
with the version that the shard has. Or to drain the shard, or to stop."""


class Outgoing(NamedTuple):
    """A message that is queued for the head."""

    kind: MessageKind
    blob: bytes
    body: Sequence[Array] = ()
    fragment: Fragment | None = None
    """To be recycled when it is sent."""


class Stream:
    """A collecting shard; made before the head connects, so that faults show early.

    ``fetch`` downloads weights from another worker, if workers pass them on. The environments are
    in groups if the policy acts at the head.
    """

    def __init__(
        self,
        engine: Engine | EnvGroups,
        shard: ShardSpec,
        spec: StreamSpec,
        fetch: Fetch | None = None,
    ) -> None:
        first = self._first = shard.first
        seeds = env_seeds(spec.seed, shard.incarnation, first, engine.num_envs)
        rng = None
        if shard.head != this_process():  # there, the random numbers are the learner's
            # The random numbers of policies are reproducible too, for the same sharding.
            rng = PolicyRNG(seeds[0], restore=False)
        self._by_step = spec.switch == "step"
        self._policy = spec.policy.eval()
        self._manifest = manifest_of(self._policy)
        self._client = Subscriber(spec.rule, spec.version)
        self._requests: ActionRequests | None = None
        self._loop: EnvLoop | GroupedLoop
        faults, text = spec.env_faults, spec.text
        if isinstance(engine, EnvGroups):
            assert isinstance(spec.policy, HeadPolicy)
            self._requests = requests = ActionRequests(engine.spans, self._send_message)
            choosers = [requests.chooser(group) for group in range(len(engine.spans))]
            self._loop = GroupedLoop(
                engine, spec.policy, spec.horizon, seeds, choosers, faults, text
            )
        else:
            self._loop = EnvLoop(
                engine, self._policy, first, spec.horizon, seeds, faults, rng, text
            )
        origin = int(shard.fleet), shard.index, shard.incarnation, engine.num_envs, first
        self._encoder = FragmentEncoder(Origin(*origin))
        self._credits: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self.cache = weight_cache_of(shard.fleet)
        """The weights that shards of this fleet have received in this process."""
        self._relays = fetch is not None
        self._puller = WeightPuller(self.cache, fetch, self._manifest.nbytes, self._deliver, first)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._arrived: Weights | None = None
        self._promised = False  # whether weights were announced that have not arrived
        self._closed = False
        self._busy = False  # whether a fragment is being made

    def run(self, connection: BlockingConnection) -> None:
        """Collect until the head closes the connection."""
        self._connection = connection
        helpers = [
            threading.Thread(target=target, name=f"clusterenv-{name}-{self._first}", daemon=True)
            for name, target in (("reader", self._read), ("sender", self._send))
        ]
        for helper in helpers:
            helper.start()
        try:
            while (order := self._credits.get()) is not None:
                if order == "drain":  # all credits before it are used up, all fragments are sent
                    self._tell(MessageKind.DRAINED, self._loop.waiting_rows)
                    self._wait_for_close()
                    break
                pinned = order if isinstance(order, Announcement) else None
                fresh = pinned is not None
                self._client.pin(pinned)
                self._synchronize(wait=fresh)
                self._busy = True
                newest = max(self._client.newest.version, self._client.version)
                divergence = self._client.divergence
                between = self._between if self._by_step and not fresh else None
                fragment = self._loop.fragment(self._acting(), fresh, between)
                self._busy = False
                schema, body = self._encoder.encode(fragment)
                if schema is not None:
                    self._outbox.put(Outgoing(MessageKind.SCHEMA, schema))
                blob = self._meta(fragment, newest, divergence).pack()
                self._outbox.put(Outgoing(MessageKind.FRAGMENT, blob, body, fragment))
        except Interrupted:
            pass
        except (Exception, SystemExit) as error:
            if not self._closed:
                self._tell(MessageKind.FAILED, failure_of(error, self._first, "collect"))
                self._wait_for_close()
        finally:
            self._outbox.put(None)
            connection.close()
            for helper in helpers:
                helper.join()

    def hint(self, announcement: Announcement) -> None:
        """Take up an announcement that came by the run's topic, which may be late or missing."""
        self._client.announced(announcement, hint=True)

    def _wait_for_close(self) -> None:
        """Wait until the head has read everything and closes the connection."""
        while self._credits.get() is not None:
            pass

    @property
    def _steps_envs(self) -> bool:
        """Whether environments are being stepped now."""
        return self._busy and (self._requests is None or not self._requests.all_wait)

    def _acting(self) -> Acting:
        return Acting(self._client.version, self._client.newest.scalars)

    def _between(self) -> Acting:
        """Between steps: load weights that have arrived, without waiting for any."""
        if self._arrived is not None or self._client.undecided:
            self._synchronize(wait=False)
        return self._acting()

    def _synchronize(self, wait: bool) -> None:
        """Load weights that have arrived; pull if the rule says so, and perhaps wait for them.

        A restarted shard first waits for the weights that the head has sent it.
        """
        if self._promised and not self._loop.steps:
            self._wait_for_weights()
        while True:
            self._load()
            if self._client.decide():
                self._tell(MessageKind.PULL, False)
            if not wait or self._client.wanted is None:
                return
            self._wait_for_weights()

    def _wait_for_weights(self) -> None:
        with self._changed:
            while self._arrived is None:
                if self._closed:
                    raise Interrupted
                self._changed.wait()

    def _load(self) -> None:
        """Load the newest weights that have arrived, if any."""
        with self._changed:
            weights, self._arrived = self._arrived, None
        if weights is not None:
            load(self._policy, self._manifest, weights)
            self._client.pulled(weights.version)

    def _tell(self, kind: MessageKind, blob: Any) -> None:
        """Queue a message for the head.

        The sender thread writes it to the connection. If the reader did and had to wait for the
        head to read, while the head waits for this reader, both would wait forever.
        """
        self._outbox.put(Outgoing(kind, dumps(blob)))

    def _meta(self, fragment: Fragment, newest: int, divergence: float | None) -> FragmentMeta:
        version = int(fragment.columns["version"][: fragment.num_envs].min())
        return FragmentMeta(
            version,
            max(newest, version),
            divergence,
            fragment.returns,
            fragment.lengths,
            fragment.dropped,
            self._client.checks,
            self._client.pulls,
            fragment.cuts,
        )

    def _send(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._send_message(message.kind, message.blob, message.body)
                if message.fragment is not None:
                    self._loop.recycle(message.fragment)
        except ConnectionClosed:
            self._stop()
        except ConfigError as error:  # a message larger than allowed
            failure = failure_of(error, self._first, "collect")
            self._send_message(MessageKind.FAILED, dumps(failure))

    def _send_message(self, kind: MessageKind, blob: bytes, body: Sequence[Array] = ()) -> None:
        """Send a message at once; any thread may, but not the reader."""
        with self._sending:
            self._connection.send(kind, blob, body)

    def _read(self) -> None:
        try:
            while True:
                header = self._connection.recv_header()
                blob = self._connection.recv_blob(header)
                if header.kind == MessageKind.CREDIT:
                    credit = Credit(*blob)
                    newest = Announcement(*credit.newest)
                    if not credit.fresh:
                        self._client.announced(newest)
                    self._credits.put(newest if credit.fresh else "stream")
                elif header.kind == MessageKind.WEIGHTS:
                    self._receive_weights(header, WeightsMeta(*blob))
                elif header.kind == MessageKind.ACTIONS and self._requests is not None:
                    self._requests.receive(self._connection, header, ActionsMeta(*blob))
                elif header.kind == MessageKind.DRAIN:
                    self._credits.put("drain")
                elif header.kind == MessageKind.PING:
                    self._tell(MessageKind.PONG, tuple(Pong(self._loop.steps, self._steps_envs)))
        except ConnectionClosed:
            self._stop()

    def _receive_weights(self, header: Header, meta: WeightsMeta) -> None:
        self._promised = True
        if meta.source is None:
            buffer = np.empty(self._manifest.nbytes, np.uint8)
            self._connection.recv_body(header, [buffer])
            self._puller.received(meta, Weights(meta.version, buffer))
        else:
            self._puller.pull(meta)

    def _deliver(self, weights: Weights | None, downloaded: bool) -> None:
        """Hand weights to the env loop; if they did not arrive, ask the head for all of them.

        The env loop goes on with the weights that it has meanwhile.
        """
        if weights is None:
            self._tell(MessageKind.PULL, True)
            return
        if downloaded and self._relays:
            self._tell(MessageKind.HELD, weights.version)
        with self._changed:
            self._promised = False
            if self._arrived is None or weights.version >= self._arrived.version:
                self._arrived = weights
            self._changed.notify()

    def _stop(self) -> None:
        self._closed = True
        self._loop.interrupt()
        if self._requests is not None:
            self._requests.close()
        self._puller.close()
        self._credits.put(None)
        with self._changed:
            self._changed.notify()
