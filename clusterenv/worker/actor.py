"""The Dask actor: a group of environments in a thread of its own on a worker.

Dask calls the ``async`` methods on the worker's event loop; they only start, watch and stop the
thread. The thread makes the environments, steps them and exchanges messages with the head, so
nothing slow runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from distributed import get_client, get_worker
from distributed.comm import get_address_host

from clusterenv.data.pickling import loads
from clusterenv.errors import ConfigError, ConnectionClosed
from clusterenv.simulation.engines import build
from clusterenv.simulation.engines.base import Engine
from clusterenv.simulation.groups import EnvGroups
from clusterenv.simulation.head_policy import HeadPolicy
from clusterenv.sync.announcement import from_message, topic_of
from clusterenv.sync.topics import subscribe
from clusterenv.transport.connection import BlockingConnection
from clusterenv.transport.endpoint import Listener
from clusterenv.transport.messages import Failure
from clusterenv.worker.failures import failure_of
from clusterenv.worker.lifetime import seconds_left
from clusterenv.worker.specs import Opened, ShardSpec, StreamSpec
from clusterenv.worker.step_server import StepServer
from clusterenv.worker.streamer import Stream
from clusterenv.worker.tuning import may_tune, tune_process
from clusterenv.worker.weight_transfer import WeightRelay, fetch

__all__ = ["Shard"]

logger = logging.getLogger("clusterenv")


class Shard:
    """The actor: the environments of one share, in a thread of a worker's process."""

    def __init__(self, spec: ShardSpec) -> None:
        worker = get_worker()
        self._spec = spec
        # Workers of LocalCluster(processes=False) have no address of their own.
        in_process = worker.address.startswith("inproc://")
        self._host = "127.0.0.1" if in_process else get_address_host(worker.address)
        self._tls = self._to_workers = None
        if worker.address.startswith("tls://"):
            self._tls = worker.security.get_listen_args("worker")["ssl_context"]
            self._to_workers = worker.security.get_connection_args("worker")["ssl_context"]
        self._lifetime = worker.lifetime
        self._closing = threading.Event()
        self._opened: Future[Opened | Failure] = Future()
        self._ended: Future[None] = Future()
        self._listener: Listener | None = None
        self._connection: BlockingConnection | None = None
        self._relay: WeightRelay | None = None
        self._streaming: Stream | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"clusterenv-shard-{spec.index}", daemon=True
        )

    async def open(self, recipe: bytes, stream: bytes | None) -> Opened | Failure:
        """Make the environments of a pickled ``Recipe`` and begin to listen.

        ``stream`` is a pickled ``StreamSpec``, if the shard collects by itself. It may be large, so
        it does not go through the scheduler.
        """
        self._recipe, self._stream = recipe, stream
        if stream is not None:
            self._subscribe()
        self._thread.start()
        return await asyncio.wrap_future(self._opened)

    async def close(self, timeout: float) -> bool:
        """Stop the thread; return whether it ended in time."""
        self._closing.set()
        if self._thread.ident is None:
            return True  # never opened
        self._close_ends()
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._ended)), timeout)
        except TimeoutError:
            return False
        return True

    def _subscribe(self) -> None:
        """Listen to the run's topic; without it, versions are known from credits, a little later.

        All shards of a process share its client, and one subscription.
        """
        try:
            topic = topic_of(self._spec.fleet)
            self._unsubscribe = subscribe(get_client(), topic, self._hint)
        except Exception as error:
            logger.info("shard %d does not follow announcements: %s", self._spec.index, error)

    def _hint(self, message: Any) -> None:
        stream = self._streaming
        if stream is None or not isinstance(message, Mapping) or message.get("kind") != "version":
            return
        try:
            stream.hint(from_message(message))
        except ConfigError as error:
            logger.warning("shard %d ignores an announcement: %s", self._spec.index, error)

    def _run(self) -> None:
        engine: Engine | EnvGroups | None = None
        try:
            try:
                if may_tune(self._spec.tune, self._spec.head):
                    tune_process()  # in this thread: other threads keep their torch threads
                spec = None if self._stream is None else loads(self._stream)
                recipe, first, count = loads(self._recipe), self._spec.first, self._spec.count
                if spec is not None and isinstance(spec.policy, HeadPolicy):
                    engine = EnvGroups(recipe, first, count, spec.groups)
                else:
                    engine = build(recipe, first, count)
                stream = None if spec is None else self._make_stream(engine, spec)
                self._listener = self._listen()
            except BaseException as error:
                self._opened.set_result(failure_of(error, self._spec.first, "make"))
                return
            self._opened.set_result(
                Opened(
                    self._listener.endpoint,
                    None if self._relay is None else self._relay.endpoint,
                    engine.description,
                    seconds_left(self._lifetime),
                )
            )
            if self._closing.is_set():  # while the environments were made
                return
            self._connection = self._listener.accept(self._spec.accept_timeout)
            self._listener.close()
            if stream is not None:
                self._streaming = stream
                stream.run(self._connection)
            elif not isinstance(engine, EnvGroups):
                StepServer(engine, self._connection, self._spec.first).run()
        except ConnectionClosed:
            pass  # the head has ended or closed the connection
        finally:
            try:
                self._close_ends()
                if engine is not None:
                    engine.close()
            except Exception:
                logger.exception("shard %d: an environment raised in close()", self._spec.index)
            finally:
                # Here: a shard that was drained, or whose head was killed, is never closed.
                if self._unsubscribe is not None:
                    self._unsubscribe()
                self._ended.set_result(None)

    def _close_ends(self) -> None:
        for end in (self._connection, self._listener, self._relay):
            if end is not None:
                end.close()

    def _make_stream(self, engine: Engine | EnvGroups, spec: StreamSpec) -> Stream:
        fetcher = partial(fetch, context=self._to_workers, timeout=self._spec.accept_timeout)
        stream = Stream(engine, self._spec, spec, fetcher if spec.relays else None)
        if spec.relays:
            self._relay = WeightRelay(stream.cache, self._listen())
        return stream

    def _listen(self) -> Listener:
        spec = self._spec
        return Listener(self._host, self._tls, spec.ports, spec.local, spec.message_limit)
