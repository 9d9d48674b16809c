"""The Dask actor: a group of environments in a thread of its own on a worker.

Dask calls the ``async`` methods on the worker's event loop; they only start, watch and
stop the thread. The thread makes the environments, steps them and talks to the head
over its channel, so nothing that takes long ever runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from distributed import get_worker
from distributed.comm import get_address_host
from gymnasium.vector import AutoresetMode

from clusterenv.data.pickling import dumps, loads
from clusterenv.data.spaces import Column, Layout
from clusterenv.errors import ConnectionClosed
from clusterenv.simulation.engines import Engine, EnvDescription, Infos, Slot, build
from clusterenv.simulation.local_policy import LocalPolicy
from clusterenv.simulation.masks import InfoMask
from clusterenv.simulation.random_stream import RandomStream
from clusterenv.transport.connection import MESSAGE_LIMIT, Connection, Header
from clusterenv.transport.endpoint import Endpoint, Listener
from clusterenv.transport.messages import (
    ActRequest,
    CallRequest,
    Failure,
    MessageKind,
    ResetRequest,
    StepRequest,
)
from clusterenv.worker.failures import failure_of
from clusterenv.worker.lifetime import seconds_left
from clusterenv.worker.memory import keep_freed_memory
from clusterenv.worker.streamer import Stream
from clusterenv.worker.weight_relay import WeightRelay, fetch

__all__ = ["Opened", "Shard", "ShardSpec"]

logger = logging.getLogger("clusterenv")


@dataclass(frozen=True)
class ShardSpec:
    """One shard's share of the environments."""

    index: int
    first: int
    count: int
    ports: tuple[int, int] | None
    accept_timeout: float
    local: bool = True
    """Whether a head on the same machine may come by a Unix socket."""
    message_limit: int = MESSAGE_LIMIT
    """Largest message of its connections, in bytes."""
    incarnation: int = 0
    """How often the shard was placed before."""
    fleet: str = ""
    """To which other shards it belongs."""


class Opened(NamedTuple):
    """A shard that is ready: where its channel listens and what its environments are."""

    endpoint: Endpoint
    relay: Endpoint | None
    """Where other workers get weights from it, if they do."""
    description: EnvDescription
    seconds_left: float | None
    """Until the worker's lifetime or job ends, if that is known."""


class Shard:
    """The actor: the environments of one share, in a thread of a worker's process."""

    def __init__(self, spec: ShardSpec) -> None:
        worker = get_worker()
        keep_freed_memory()
        self._spec = spec
        self._host = _bindable_host(worker.address)
        self._tls = self._to_workers = None
        if worker.address.startswith("tls://"):
            self._tls = worker.security.get_listen_args("worker")["ssl_context"]
            self._to_workers = worker.security.get_connection_args("worker")["ssl_context"]
        self._lifetime = worker.lifetime
        self._closing = threading.Event()
        self._opened: Future[Opened | Failure] = Future()
        self._ended: Future[None] = Future()
        self._listener: Listener | None = None
        self._channel: Connection | None = None
        self._relay: WeightRelay | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"clusterenv-shard-{spec.index}", daemon=True
        )

    async def open(self, recipe: bytes, stream: bytes | None) -> Opened | Failure:
        """Make the environments and begin to listen.

        Parameters
        ----------
        recipe
            A pickled ``Recipe``, unpickled in the shard's thread.
        stream
            A pickled ``StreamSpec``, if the shard is to collect by
            itself. It may be large, so it comes here and not through the scheduler.
        """
        self._recipe, self._stream = recipe, stream
        self._thread.start()
        return await asyncio.wrap_future(self._opened)

    async def close(self, timeout: float) -> bool:
        """Stop the thread; return whether it ended in time."""
        self._closing.set()
        if self._thread.ident is None:
            return True  # never opened
        for end in (self._channel, self._listener, self._relay):
            if end is not None:
                end.close()
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._ended)), timeout)
        except TimeoutError:
            return False
        return True

    def _run(self) -> None:
        engine: Engine | None = None
        try:
            try:
                engine = build(loads(self._recipe), self._spec.first, self._spec.count)
                stream = None if self._stream is None else self._make_stream(engine, self._stream)
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
            self._channel = self._listener.accept(self._spec.accept_timeout)
            self._listener.close()
            if stream is not None:
                stream.run(self._channel)
            else:
                _Server(engine, self._channel, self._spec.first).run()
        except ConnectionClosed:
            pass  # the head is gone or has closed us
        finally:
            try:
                for end in (self._channel, self._listener, self._relay):
                    if end is not None:
                        end.close()
                if engine is not None:
                    engine.close()
            except Exception:
                logger.exception("shard %d: an environment raised in close()", self._spec.index)
            finally:
                self._ended.set_result(None)

    def _make_stream(self, engine: Engine, pickled: bytes) -> Stream:
        spec = loads(pickled)
        fetcher = partial(fetch, context=self._to_workers, timeout=self._spec.accept_timeout)
        stream = Stream(
            engine,
            spec,
            self._spec.first,
            self._spec.incarnation,
            self._spec.fleet,
            fetcher if spec.relays else None,
        )
        if spec.relays:
            self._relay = WeightRelay(stream.shelf, self._listen())
        return stream

    def _listen(self) -> Listener:
        spec = self._spec
        return Listener(self._host, self._tls, spec.ports, spec.local, spec.message_limit)


class _Server:
    """Answers the head's frames, in order."""

    def __init__(self, engine: Engine, channel: Connection, first: int) -> None:
        self._engine = engine
        self._channel = channel
        self._first = first
        self._layout = Layout(engine.description.observation_space)
        self._actions = Layout(engine.description.action_space)
        self._slot = Slot.empty(self._layout, engine.num_envs)
        self._whole = StepRequest(None, self._actions.dtypes, [])
        self._policy: LocalPolicy | None = None
        self._drawing = RandomStream(None)
        self._mask = InfoMask(engine.num_envs)
        self._began = np.ones(engine.num_envs, np.bool_)
        mode = engine.description.autoreset_mode
        self._spends_steps = mode is not AutoresetMode.SAME_STEP

    def run(self) -> None:
        """Serve until the channel closes."""
        while True:
            header = self._channel.recv_header()
            raw = self._channel.recv_raw(header)
            doing = MessageKind(header.kind).name.lower()
            try:
                if header.kind == MessageKind.STEP:
                    request = StepRequest(*loads(raw)) if raw else self._whole
                    self._step(request, self._read_actions(header, request))
                elif header.kind == MessageKind.RESET:
                    self._reset(ResetRequest(*loads(raw)))
                elif header.kind == MessageKind.ACT:
                    weights = np.empty(header.body, np.uint8)
                    self._channel.recv_body(header, [weights])
                    self._act(ActRequest(*loads(raw)), weights)
                else:
                    self._channel.send(MessageKind.VALUE, self._call(raw))
            except ConnectionClosed:
                raise
            except BaseException as error:  # some environments call sys.exit()
                self._channel.send(MessageKind.FAILED, dumps(failure_of(error, self._first, doing)))

    def _read_actions(self, header: Header, request: StepRequest) -> list[Column]:
        n = self._engine.num_envs if request.rows is None else len(_indices(request.rows))
        arrays = [
            np.empty((n, *self._actions.leaves[k].shape), dtype)
            for k, dtype in zip(
                self._actions.arrays, request.dtypes or self._actions.dtypes, strict=True
            )
        ]
        self._channel.recv_body(header, arrays)
        if not request.objects:
            return arrays
        columns: list[Column] = [np.empty(0)] * len(self._actions.leaves)
        for k, array in zip(self._actions.arrays, arrays, strict=True):
            columns[k] = array
        for k, column in zip(self._actions.objects, request.objects, strict=True):
            columns[k] = column
        return columns

    def _step(self, request: StepRequest, actions: list[Column]) -> None:
        rows = request.rows
        indices = None if rows is None else _indices(rows)
        began = self._over() if self._spends_steps else None
        infos = self._engine.step(actions, self._slot, indices)
        self._note(infos, slice(None) if rows is None else rows, indices, began)
        self._send_result(infos, slice(None) if rows is None else rows)

    def _reset(self, request: ResetRequest) -> None:
        if request.mask is None and request.seeds[0] is not None:  # what a policy draws repeats too
            self._drawing = RandomStream(request.seeds[0])
        infos = self._engine.reset(self._slot, request.seeds, request.options, request.mask)
        began = np.ones_like(self._began) if request.mask is None else request.mask
        self._mask.note(infos, began=began)
        self._began |= began
        self._send_result(infos, slice(None))

    def _act(self, request: ActRequest, weights: npt.NDArray[np.uint8]) -> None:
        if self._policy is None:
            self._policy = LocalPolicy(self._engine.description, self._first, self._engine.num_envs)
        self._policy.update(request.policy, request.version, weights)
        dead = self._over() if self._spends_steps else np.zeros_like(self._began)
        with self._drawing:
            chosen = self._policy.act(self._slot.obs, self._began, dead, self._mask.value)
        self._began[:] = False
        infos = self._engine.step([chosen["action"]], self._slot, None)
        self._note(infos, slice(None), None, dead if self._spends_steps else None)
        self._send_result(infos, slice(None), chosen)

    def _call(self, raw: bytes | bytearray) -> bytes:
        """Return what a method of the engine returned, or the failure: the environments go on."""
        doing = "call"
        try:
            request = CallRequest(*loads(raw))
            doing = request.method
            return dumps(getattr(self._engine, request.method)(*request.args))
        except BaseException as error:  # some environments call sys.exit()
            return dumps(failure_of(error, self._first, doing))

    def _over(self) -> npt.NDArray[np.bool_]:
        """Return whose last step said that the episode is over."""
        return self._slot.terminated | self._slot.truncated

    def _note(
        self,
        infos: Infos,
        rows: slice | npt.NDArray[np.intp],
        indices: Sequence[int] | None,
        resets: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Note which environments begin an episode, and the masks that a step has given.

        Parameters
        ----------
        resets
            Whom the step only reset; ``None`` if it does so in the step that ends an episode.
        """
        began = np.zeros_like(self._began)
        began[rows] = (self._over() if resets is None else resets)[rows]
        self._began |= began
        self._mask.note(infos, indices, began)

    def _send_result(
        self,
        infos: Infos,
        rows: slice | npt.NDArray[np.intp],
        chosen: dict[str, Column] | None = None,
    ) -> None:
        objects = [self._slot.obs[k][rows] for k in self._layout.objects]
        blob = dumps((infos, objects, chosen)) if infos or objects or chosen else b""
        self._channel.send(MessageKind.RESULT, blob, self._slot.buffers(self._layout, rows))


def _indices(rows: slice | npt.NDArray[np.intp]) -> Sequence[int]:
    if isinstance(rows, slice):
        return range(rows.start, rows.stop)
    indices: list[int] = rows.tolist()
    return indices


def _bindable_host(address: str) -> str:
    # Workers of LocalCluster(processes=False) have no address of their own.
    return "127.0.0.1" if address.startswith("inproc://") else get_address_host(address)
