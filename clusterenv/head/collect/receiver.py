"""Receives fragments from all shards in one thread, and grants them credits."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clusterenv import config
from clusterenv.data.batch import Batch
from clusterenv.data.buffer_pool import BufferPool
from clusterenv.data.fragment_decoder import ExpectedRows, FragmentDecoder, largest_fragment
from clusterenv.data.pickling import dumps
from clusterenv.data.record_batch import Origin
from clusterenv.data.spaces import Array, Layout
from clusterenv.errors import (
    ClosedError,
    ClusterEnvError,
    ConfigError,
    ConnectionClosed,
    EnvError,
    PolicyError,
    WorkerLost,
)
from clusterenv.head.collect.inference import Inference
from clusterenv.head.collect.weight_service import WeightService
from clusterenv.head.fleet.env_errors import env_error
from clusterenv.head.fleet.fleet import Fleet
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.head.fleet.launch import StreamSpec
from clusterenv.head.fleet.roster import Reason, ShardRecord, ShardState
from clusterenv.head.fleet.supervisor import Supervisor
from clusterenv.head.monitor.stats import Stats, Tally
from clusterenv.head.monitor.telemetry import Telemetry
from clusterenv.sync.announcement import Announcement
from clusterenv.sync.publisher import Prepared, Publisher
from clusterenv.transport.framing import Header, Message
from clusterenv.transport.messages import Credit, FragmentMeta, MessageKind, ObservationsMeta
from clusterenv.transport.multiplexer import Multiplexer

if TYPE_CHECKING:
    from clusterenv.head.collect.options import CollectorOptions

__all__ = ["Receiver"]

logger = logging.getLogger("clusterenv")

_WATCH_SECONDS = 0.5
# What reading a message that was not sealed by a shard may raise: JSON may be nested too deeply.
_MALFORMED = (ValueError, OverflowError, RecursionError)


class Receiver:
    """Receives fragments in a thread of its own, grants credits, and notices lost shards.

    Lost and drained shards leave it. The supervisor returns them once they are open again. The
    roster's lock guards the publisher and the tally, too.
    """

    def __init__(
        self,
        fleet: Fleet,
        spec: StreamSpec,
        options: CollectorOptions,
        publisher: Publisher,
        tally: Tally,
        telemetry: Telemetry,
        inference: Inference | None,
    ) -> None:
        self._fleet, self._roster = fleet, fleet.roster
        self._publisher, self._tally, self._telemetry = publisher, tally, telemetry
        self._horizon, self._credits = spec.horizon, options.credits
        self._obs = Layout(fleet.description.observation_space)
        self._action = Layout(fleet.description.action_space)
        self._keeps_text = spec.text == "keep"
        self._decoders: dict[ShardHandle, FragmentDecoder] = {}
        self._extras = config.nbytes("channel.extras")
        self._pool = BufferPool()
        self._opened: queue.SimpleQueue[ShardHandle] = queue.SimpleQueue()
        self._received: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._multiplexer = Multiplexer(self._place)
        self._looked = time.monotonic()
        self._deadlines = config.seconds("timeout.silence"), config.seconds("timeout.step")
        self._send = self._multiplexer.send
        self._inference = inference
        self._weights = WeightService(fleet.roster, publisher, tally, self._send, spec.relays)
        for record in fleet.roster:
            record.version = spec.version
            _handle(record).heartbeat.progress(self._looked)  # opening may take long
            self._multiplexer.add(_handle(record))
        most = options.max_shards or len(fleet.roster)
        self.supervisor = Supervisor(
            fleet, options.restarts, most, self._return, self._drain, self._received.put
        )
        self._thread = threading.Thread(target=self._run, name="clusterenv-receiver", daemon=True)
        self._thread.start()

    # Calls of the reader

    @property
    def streaming(self) -> bool:
        """Whether shards run ahead of the reader."""
        return self._roster.limit is not None

    @property
    def ready(self) -> int:
        """Batches that can be taken without waiting, and the error after them, if there is one."""
        if self._roster.closed:  # without the error that wakes waiting readers
            return sum(record.waiting for record in self._roster)
        return self._received.qsize()

    def stats(self) -> Stats:
        """Return the statistics."""
        with self._roster.lock:
            self._count()
            return self._tally.stats(self._roster, self._publisher, self._telemetry.announced_bytes)

    def take(self) -> Batch | BaseException:
        """Wait for the next batch, or for the error that ends the run."""
        item = self._received.get()
        if isinstance(item, Batch):
            with self._roster.lock:
                self._roster.taken(item.shard)
                self._grant(self._roster[item.shard])
        else:
            self._received.put(item)  # for other readers that wait
        return item

    def stream(self) -> None:
        """Let all shards run ahead, from now on."""
        with self._roster.lock:
            self._roster.limit = self._credits
            for record in self._roster:
                self._grant(record)

    def request_rollout(self) -> int:
        """Ask every shard for one fragment, unless that was done; return how many to take."""
        with self._roster.lock:
            if asked := self._roster.outstanding:
                return asked
            asked = self._roster.request()
            self._publisher.request()
            for record in self._roster:
                self._grant(record)
            return asked

    def complete_rollout(self) -> None:
        """Count the fragments of the rollout that was requested, now that all were taken."""
        with self._roster.lock:
            self._publisher.release()
            self._count()

    def publish(self, prepared: Prepared) -> Announcement:
        """Make a version the newest, of which every credit tells from now on."""
        with self._roster.lock:
            announcement = self._publisher.commit(prepared)
            self._count()
            return self._tally.described(announcement, self._roster)

    def close(self, timeout: float) -> None:
        """Stop receiving, and close the shards."""
        self._fleet.closing.set()
        self._multiplexer.wake()
        try:
            self.supervisor.close(timeout)
            self._fleet.close(timeout)
        finally:
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=5.0)
            while not self._opened.empty():
                self._fleet.stop([self._opened.get()])
            self._multiplexer.close()
            with self._roster.lock:
                self._tally.discard()
            self._received.put(ClosedError("this Collector was closed while a reader waited"))

    # The thread

    def _run(self) -> None:
        try:
            while not self._fleet.closing.is_set():
                self._attend()
        except Exception as error:
            if not self._fleet.closing.is_set():
                self._received.put(error)

    def _attend(self) -> None:
        """Handle the messages that have arrived, shards that were restarted, and silent ones."""
        for handle, message in self._multiplexer.listen(self._infer()):
            try:
                if isinstance(message, ConnectionClosed):
                    raise self._fleet.lost(handle) from message
                if isinstance(message, ClusterEnvError):
                    raise message
                self._dispatch(handle, message)
            except (WorkerLost, EnvError, PolicyError, ConfigError) as error:
                self._lose(handle, error)
        while not self._opened.empty() and not self._fleet.closing.is_set():
            self._admit(self._opened.get())
        for gone in self._fleet.gone():
            self._lose(gone, self._fleet.lost(gone))
        now = time.monotonic()
        if now - self._looked >= _WATCH_SECONDS:
            held_up = now - self._looked > max(self._deadlines[0] / 2, 2 * _WATCH_SECONDS)
            self._looked = now
            self._watch(now, held_up)

    def _infer(self) -> float:
        """Answer the requests for actions that are due; return the seconds to listen for more."""
        if self._inference is None:
            return _WATCH_SECONDS
        most = self._inference.groups
        groups = sum(min(most, r.share.count) for r in self._roster.active if r.credits)
        while (left := self._inference.left(groups)) == 0:
            with self._roster.lock:
                weights, scalars = self._publisher.newest, self._publisher.announced.scalars
                if weights.version != self._inference.version:
                    for record in self._roster.active:
                        record.version = weights.version
            began = time.perf_counter()
            self._inference.use(weights, scalars)
            rows = self._inference.evaluate(self._send)
            self._tally.inferred(rows, time.perf_counter() - began)
        return _WATCH_SECONDS if left is None else min(left, _WATCH_SECONDS)

    def _watch(self, now: float, held_up: bool) -> None:
        """Drop shards that do not answer, and ping the others."""
        if self._telemetry.due(now):
            self._telemetry.send(now, self.stats())
        for handle in map(_handle, self._roster.active):
            if held_up:  # this thread did not listen, so silence proves nothing
                handle.heartbeat.progress(now)
            fault = handle.heartbeat.fault(now, *self._deadlines)
            if fault is not None:
                self._lose(handle, WorkerLost(f"{handle} {fault}."), end_process=True)
            else:
                self._send(handle, MessageKind.PING, dumps(None))

    def _place(self, handle: ShardHandle, header: Header, blob: Any) -> Sequence[Array]:
        """Return memory for a message's body, if these spaces allow one of that size."""
        if header.kind == MessageKind.OBSERVATIONS and self._inference is not None:
            try:
                return self._inference.place(handle, ObservationsMeta.unpack(blob or b""))
            except _MALFORMED as error:
                raise WorkerLost(
                    f"{handle} sent observations that are not its own: {error}."
                ) from error
        if header.kind != MessageKind.FRAGMENT:
            return ()
        nbytes = header.body
        rows = self._horizon * handle.share.count
        largest = largest_fragment(rows, self._obs, self._action, self._extras)
        if nbytes > largest:
            raise ConfigError(
                f"a fragment of {handle} has {nbytes:,} bytes; {rows:,} rows of these spaces, with "
                f"{self._extras:,} bytes for text and the policy's own columns in each, have at "
                f"most {largest:,}. If there is more: "
                "dask.config.set({'clusterenv.channel.extras': '1 MiB'})"
            )
        return [self._pool.empty((nbytes,), np.dtype(np.uint8))]

    def _dispatch(self, handle: ShardHandle, message: Message) -> None:
        kind, blob, body = message
        if kind == MessageKind.OBSERVATIONS and self._inference is not None:
            self._inference.add(handle, ObservationsMeta.unpack(blob), body)
        elif kind == MessageKind.FRAGMENT:
            handle.heartbeat.progress(time.monotonic())
            self._receive(handle, body[0], blob)
        elif kind == MessageKind.SCHEMA:
            self._begin(handle, blob)
        elif kind == MessageKind.PULL:
            self._weights.pull(handle, whole=blob)
        elif kind == MessageKind.HELD:
            self._weights.held(handle, blob)
        elif kind == MessageKind.PONG:
            handle.heartbeat.pong(time.monotonic(), *blob)
        elif kind == MessageKind.DRAINED:
            self._drained(handle, blob)
        elif kind == MessageKind.FAILED:
            raise env_error(handle, blob)

    def _begin(self, handle: ShardHandle, schema: bytes) -> None:
        """Check the schema of the fragments that a shard is going to send."""
        share = handle.share
        origin = self._fleet.run, handle.index, handle.incarnation, share.count, share.first
        spaces = self._obs, self._action
        expected = ExpectedRows(Origin(*origin), self._horizon, *spaces, self._keeps_text)
        try:
            self._decoders[handle] = FragmentDecoder(schema or b"", expected)
        except _MALFORMED as error:
            raise WorkerLost(f"{handle} sent a schema that is not its own: {error}.") from error

    def _receive(self, handle: ShardHandle, body: Array, blob: bytes) -> None:
        """Make a batch of a fragment, and queue it for the reader."""
        try:
            meta = FragmentMeta.unpack(blob or b"")
            if handle not in self._decoders:
                raise ValueError("its schema did not come before it")
            batch = self._decoders[handle].decode(body, meta.version, meta.cuts)
        except _MALFORMED as error:
            raise WorkerLost(f"{handle} sent a fragment that cannot be read: {error}.") from error
        if self._inference is not None:
            batch = self._inference.annotate(batch)
        for cut in meta.cuts:
            logger.warning("environment %d of %s was rebuilt: %s", cut.env, handle, cut.reason)
        with self._roster.lock:
            arrival = self._roster.received(handle.index, batch.num_rows, meta)
            self._tally.add(arrival, body.nbytes)
            self._count()
            self._received.put(batch)

    def _count(self) -> None:
        """Count what has arrived, unless it belongs to a rollout that is not complete."""
        if self._publisher.requested is None:
            self._tally.settle(self._roster)

    def _grant(self, record: ShardRecord) -> None:
        """Send a shard the credits that it may have now; in lock-step, for fresh fragments."""
        more = self._roster.grant(record.index)
        if more:
            newest = self._publisher.requested or self._publisher.announced
            blob = dumps(tuple(Credit(not self.streaming, newest.told_to(record.version))))
            for _ in range(more):
                self._send(_handle(record), MessageKind.CREDIT, blob)

    # Shards that leave and return

    def _lose(self, handle: ShardHandle, error: Exception, end_process: bool = False) -> None:
        """Drop a shard's connection and schedule a restart."""
        with self._roster.lock:
            delivered = self._roster[handle.index].delivered
            steps = handle.heartbeat.steps * handle.share.count
            self._tally.lost_rows += max(0, steps - delivered)
        state = self._leave(handle, self._roster.lost)
        if state is ShardState.LOST:
            self.supervisor.restart(handle.index, error, end_process)

    def _drain(self, record: ShardRecord) -> None:
        """Have a shard deliver what it has begun and no more."""
        with self._roster.lock:
            if record.state is ShardState.RUNNING:
                self._roster.drain(record.index)
                self._send(_handle(record), MessageKind.DRAIN, dumps(None))

    def _drained(self, handle: ShardHandle, rows: int) -> None:
        """Move a shard that has delivered everything, or end it."""
        with self._roster.lock:
            self._tally.dropped_rows += rows
        state = self._leave(handle, self._roster.drained)
        if state is ShardState.PLACING:
            logger.info("%s moves to another worker.", handle)
            self.supervisor.restart(handle.index)

    def _leave(self, handle: ShardHandle, change: Callable[[int], ShardState]) -> ShardState:
        """Stop listening to a shard, and return the state that it changes to."""
        self._multiplexer.remove(handle)
        handle.disconnect()
        self._decoders.pop(handle, None)
        if self._inference is not None:
            self._inference.forget(handle)
        with self._roster.lock:
            state = change(handle.index)
            self._weights.forget(handle)
        if state is ShardState.ENDED:
            self.supervisor.release(handle)
        return state

    def _return(self, handle: ShardHandle) -> None:
        """Hand a shard that was placed to the thread, unless everything was closed meanwhile."""
        with self._roster.lock:
            closed = self._roster.closed
            if not closed:
                self._opened.put(handle)
        if closed:
            self._fleet.stop([handle])
        else:
            self._multiplexer.wake()

    def _admit(self, handle: ShardHandle) -> None:
        """Listen to a shard that was placed; send it the policy, then credits."""
        with self._roster.lock:
            if self._roster.closed:
                self._opened.put(handle)  # for close() to discard
                return
            version = self._weights.due(self._roster[handle.index]).version
            record = self._roster.admit(handle.index, version)
            self._tally.moves += record.because is Reason.MOVE
            self._tally.restarts += record.because is Reason.LOSS
            if self._publisher.announcements and self._inference is None:
                self._weights.answer(record)
            handle.heartbeat.progress(time.monotonic())  # opening may take long
            self._multiplexer.add(handle)
            self._grant(record)
            if record.index >= self._roster.wanted:
                self._drain(record)  # fewer are wanted by now, or it had to deliver a fragment
        level = logging.WARNING if record.because is Reason.LOSS else logging.INFO
        logger.log(level, "%s is open, incarnation %d.", handle, handle.incarnation)


def _handle(record: ShardRecord) -> ShardHandle:
    assert record.handle is not None
    return record.handle
