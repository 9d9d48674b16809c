"""What runs beside whoever reads batches: shards are heard, answered, and looked after."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from clusterenv import config
from clusterenv.data.batch import Batch
from clusterenv.data.buffer_pool import BufferPool
from clusterenv.data.codec import Parts, decode, largest_fragment, nbytes_of
from clusterenv.data.fragment import Cut
from clusterenv.data.pickling import dumps
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
from clusterenv.head.collect.weight_service import WeightService
from clusterenv.head.fleet.env_errors import env_error
from clusterenv.head.fleet.fleet import Fleet
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.head.fleet.restarts import Restarts
from clusterenv.head.fleet.supervisor import Supervisor
from clusterenv.head.monitor.stats import Stats, Tally
from clusterenv.head.monitor.telemetry import Telemetry
from clusterenv.sync.publisher import Publisher
from clusterenv.transport.framing import Header, Message
from clusterenv.transport.messages import FragmentMeta, MessageKind
from clusterenv.transport.multiplexer import Multiplexer

__all__ = ["Receiver"]

logger = logging.getLogger("clusterenv")

_WATCH_SECONDS = 0.5


class Receiver:
    """Takes in the fragments of all shards, in a thread of its own, and gives them tickets.

    Shards that are lost, silent or drained leave it; the supervisor hands them back when they
    have been placed again.

    Parameters
    ----------
    fleet
        The shards.
    publisher, tally
        Which weights are the newest, and what is counted.
    telemetry
        Is told now and then how it goes.
    horizon
        Time rows of a fragment.
    credits
        Fragments that each shard may be ahead of the reader, once it streams.
    restarts, max_shards
        For the supervisor.
    relays
        Whether workers hand weights on to each other.
    """

    def __init__(
        self,
        fleet: Fleet,
        publisher: Publisher,
        tally: Tally,
        telemetry: Telemetry,
        *,
        horizon: int,
        credits: int,  # noqa: A002
        restarts: Restarts,
        max_shards: int,
        relays: bool,
    ) -> None:
        self._fleet = fleet
        self._publisher = publisher
        self._tally = tally
        self._telemetry = telemetry
        self._horizon = horizon
        self._credits = credits
        self._obs = Layout(fleet.description.observation_space)
        self._action = Layout(fleet.description.action_space)
        self._extras = config.nbytes("channel.extras")
        self._lender = BufferPool()  # of what bodies are made of
        self.streaming = False
        """Whether shards run ahead by themselves."""
        self.roster = threading.RLock()
        """Held by whoever changes which shards there are, have tickets, and have heard what."""
        self._closed = False
        self._waiting = [0] * len(fleet.handles)  # batches of each shard that were not taken yet
        self._awaited: set[int] = set()  # shards that owe a fragment that was asked for
        self._ending: set[int] = set()  # shards that are drained for good
        self._ended: set[int] = set()  # those of them that have been, behind others
        self._announced: bytes | None = None
        self._returning: queue.SimpleQueue[ShardHandle] = queue.SimpleQueue()
        self._received: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._multiplexer = Multiplexer(self._place)
        self._looked = time.monotonic()
        self._deadlines = config.seconds("timeout.silence"), config.seconds("timeout.step")
        self._send = self._multiplexer.send
        self._serving = WeightService(fleet, publisher, tally, self._send, relays=relays)
        self.supervisor = Supervisor(
            fleet, restarts, max_shards, self._back, self._drain, self._received.put
        )
        self._thread = threading.Thread(target=self._run, name="clusterenv-intake", daemon=True)
        self._thread.start()

    # What the reader asks for

    @property
    def ready(self) -> int:
        """Batches that can be taken without waiting, and the error behind them, if there is one."""
        # Once it is closed, what wakes those that wait lies there too.
        return sum(self._waiting) if self._closed else self._received.qsize()

    def stats(self) -> Stats:
        """Return what has been done so far."""
        with self._tally.lock:
            return self._tally.stats(self._publisher, sum(self._waiting), list(self._waiting))

    def take(self) -> Batch | BaseException:
        """Wait for the next batch, or for the error that ends the run.

        Once it streams, the shard may make another fragment in its place.
        """
        item = self._received.get()
        if isinstance(item, Batch):
            with self.roster:
                self._waiting[item.shard] -= 1
                if self.streaming and item.shard < len(self._fleet.handles):
                    self._give_tickets(self._fleet.handles[item.shard], 1)
        else:
            self._received.put(item)  # for others that wait
        return item

    def stream(self) -> None:
        """Let all shards run ahead, from now on."""
        with self.roster:
            self.streaming = True
            for handle in self._fleet.handles:
                self._give_tickets(handle, self._credits)

    def ask_all(self) -> int:
        """Have every shard make one fragment, and return how many there will be."""
        with self.roster:
            staying = [handle for handle in self._fleet.handles if handle.index not in self._ending]
            self._awaited = {handle.index for handle in staying}
            for handle in staying:
                self._send(handle, MessageKind.CREDIT, dumps(True))
        return len(staying)

    def announce(self, blob: bytes) -> None:
        """Tell all shards of a new version, and later those that come back."""
        with self.roster:
            self._announced = blob
            self._tally.announced_bytes += len(blob) * len(self._fleet.handles)
            for handle in self._fleet.handles:
                self._send(handle, MessageKind.ANNOUNCE, blob)

    def close(self, timeout: float) -> None:
        """Hear nothing more, and end the shards."""
        self._closed = True
        self._multiplexer.wake()
        try:
            self.supervisor.close(timeout)
            self._fleet.close(timeout)
        finally:
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=5.0)
            self._multiplexer.close()
            self._received.put(ClosedError("this Collector was closed while somebody waited"))

    # The thread

    def _run(self) -> None:
        try:
            for handle in self._fleet.handles:
                self._multiplexer.add(handle)
            while not self._closed:
                self._attend()
        except Exception as error:
            if not self._closed:
                self._received.put(error)

    def _attend(self) -> None:
        """Hear what has arrived, take in shards that are back, look after those that are quiet."""
        for handle, message in self._multiplexer.listen(_WATCH_SECONDS):
            try:
                if isinstance(message, ConnectionClosed):
                    raise self._fleet.lost(handle) from message
                if isinstance(message, ClusterEnvError):
                    raise message
                self._act_on(handle, message)
            except (WorkerLost, EnvError, PolicyError, ConfigError) as error:
                self._part(handle, error)
        while not self._returning.empty():
            self._admit(self._returning.get())
        for gone in self._fleet.gone():
            self._part(gone, self._fleet.lost(gone))
        now = time.monotonic()
        if now - self._looked >= _WATCH_SECONDS:
            held_up = now - self._looked > max(self._deadlines[0] / 2, 2 * _WATCH_SECONDS)
            self._looked = now
            self._look_after(now, held_up)

    def _look_after(self, now: float, held_up: bool) -> None:
        """Part from shards that do not answer, and ask all others whether they move."""
        if self._telemetry.due(now):
            self._telemetry.tell(now, self.stats())
        for handle in [handle for handle in self._fleet.handles if not handle.lost]:
            if held_up:  # this thread was: who was not listened to has not been silent
                handle.heartbeat.progress(now)
            fault = handle.heartbeat.fault(now, *self._deadlines)
            if fault is not None:
                self._part(handle, WorkerLost(f"{handle} {fault}."), end_process=True)
            else:
                self._send(handle, MessageKind.PING, dumps(None))

    def _place(self, handle: ShardHandle, header: Header, blob: Any) -> Sequence[Array]:
        """Return memory for a fragment, if the run can have such a one."""
        if header.kind != MessageKind.FRAGMENT:
            return ()
        try:
            nbytes = nbytes_of(Parts(*FragmentMeta(*blob).parts))
        except (TypeError, ValueError) as error:
            raise ConnectionClosed(
                f"{handle} sent a fragment that cannot be read: {error}"
            ) from error
        rows = self._horizon * handle.share.count
        largest = largest_fragment(rows, self._obs, self._action, self._extras)
        if nbytes > largest:
            raise ConfigError(
                f"a fragment of {handle} has {nbytes:,} bytes; {rows:,} rows of these spaces, with "
                f"{self._extras:,} bytes for text and the policy's own columns in each, have at "
                f"most {largest:,}. If there is more: "
                "dask.config.set({'clusterenv.channel.extras': '1 MiB'})"
            )
        return [self._lender.empty((nbytes,), np.dtype(np.uint8))]

    def _act_on(self, handle: ShardHandle, message: Message) -> None:
        kind, blob, body = message
        if kind == MessageKind.FRAGMENT:
            batch = self._batch(handle, body[0], FragmentMeta(*blob))
            handle.heartbeat.progress(time.monotonic())
            with self.roster:
                self._awaited.discard(handle.index)
                self._waiting[handle.index] += 1
                self._received.put(batch)
        elif kind == MessageKind.PULL:
            self._serving.pull(handle, whole=blob)
        elif kind == MessageKind.HELD:
            self._serving.held(handle, blob)
        elif kind == MessageKind.PONG:
            handle.heartbeat.pong(time.monotonic(), *blob)
        elif kind == MessageKind.DRAINED:
            self._drained(handle, blob)
        elif kind == MessageKind.FAILED:
            raise env_error(handle, blob)

    def _batch(self, handle: ShardHandle, body: Array, meta: FragmentMeta) -> Batch:
        columns, tails, state = decode(body, Parts(*meta.parts))
        tail_rows = tails.pop("")
        cuts = [Cut(*cut) for cut in meta.cuts]
        batch = Batch(
            columns,
            handle.share.count,
            tail_rows=tail_rows,
            tail=tails,
            state=state,
            run=self._fleet.run,
            shard=handle.index,
            incarnation=handle.incarnation,
            policy_version=meta.version,
            cuts=cuts,
        )
        for cut in cuts:
            logger.warning("environment %d of %s was rebuilt: %s", cut.env, handle, cut.reason)
        handle.delivered += batch.num_rows
        with self._tally.lock:
            self._tally.add(handle.index, batch.num_rows, body.nbytes, meta)
            if self.streaming:
                self._tally.settle()
        return batch

    def _give_tickets(self, handle: ShardHandle, count: int) -> None:
        """Let a shard make fragments as it likes."""
        for _ in range(count):
            self._send(handle, MessageKind.CREDIT, dumps(False))

    # Shards that leave and come

    def _part(self, handle: ShardHandle, error: BaseException, end_process: bool = False) -> None:
        """Hear nothing more of a shard, and have it placed again."""
        with self._tally.lock:
            self._tally.lost(max(0, handle.heartbeat.steps * handle.share.count - handle.delivered))
        if handle.index in self._ending and handle.index not in self._awaited:
            self._drained(handle, 0)
            return
        self._serving.parted(handle)
        self._multiplexer.remove(handle)
        self.supervisor.lost(handle, error, end_process)

    def _drain(self, handle: ShardHandle) -> None:
        """Have a shard deliver what it has in hand and no more."""
        with self.roster:
            handle.draining = True
            if handle.index >= self.supervisor.wanted:
                self._ending.add(handle.index)
            self._send(handle, MessageKind.DRAIN, dumps(None))

    def _drained(self, handle: ShardHandle, rows: int) -> None:
        """Hear nothing more of a shard that has delivered all, and have it placed elsewhere."""
        self._serving.parted(handle)
        self._multiplexer.remove(handle)
        with self.roster:
            with self._tally.lock:
                self._tally.left_behind(rows)
            ends = handle.index in self._ending and handle.index not in self._awaited
            if ends:
                self._ended.add(handle.index)
            while (last := self._fleet.handles[-1].index) in self._ended:
                self._fleet.remove_last()
                self._ending.discard(last)
                self._ended.discard(last)
                del self._publisher.in_use[last:]
        self.supervisor.drained(handle, remove=ends)

    def _back(self, handle: ShardHandle) -> None:
        """Hand a shard that was placed again to the thread."""
        self._returning.put(handle)
        self._multiplexer.wake()

    def _admit(self, handle: ShardHandle) -> None:
        """Take in a shard that was placed again: the newest policy, then tickets."""
        with self.roster:
            self._fleet.replace(handle)
            if handle.index == len(self._waiting):
                self._waiting.append(0)
            if handle.index == len(self._publisher.in_use):
                self._publisher.in_use.append(self._publisher.version)
            with self._tally.lock:
                self._tally.began(handle.index, handle.incarnation, handle.because)
            if self._announced is not None:
                self._serving.give(handle)
                self._send(handle, MessageKind.ANNOUNCE, self._announced)
            self._multiplexer.add(handle)
            if self.streaming:
                self._give_tickets(handle, self._credits - self._waiting[handle.index])
            elif handle.index in self._awaited:
                self._send(handle, MessageKind.CREDIT, dumps(True))
            if handle.index in self._ending or handle.index >= self.supervisor.wanted:
                self._drain(handle)  # it left while it owed a fragment, or fewer are wanted by now
        level = logging.WARNING if handle.because == "loss" else logging.INFO
        logger.log(level, "%s is there, incarnation %d.", handle, handle.incarnation)
