"""Places shards on workers, connects to them, and notices when one is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from distributed import Actor, Client, wait

from clusterenv import config
from clusterenv.cluster.connect import wait_for_workers
from clusterenv.cluster.plugins import protect_shards
from clusterenv.data.observation_mode import check_same_spaces
from clusterenv.data.seeds import new_run_id
from clusterenv.errors import (
    ClosedError,
    NoWorkers,
    SchedulerLost,
    WorkerLost,
)
from clusterenv.head.fleet.env_errors import env_error
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.head.fleet.placement import Share, about_to_leave, choose_worker, place
from clusterenv.simulation.engines.base import EnvDescription
from clusterenv.transport.endpoint import connect
from clusterenv.transport.messages import Failure
from clusterenv.transport.nonblocking import NonBlockingConnection
from clusterenv.worker.actor import Shard
from clusterenv.worker.specs import Opened, ShardSpec

__all__ = ["Fleet"]

logger = logging.getLogger("clusterenv")

_KEY = "clusterenv-shard"
_GRACE_SECONDS = 0.5
_LOOK_SECONDS = 2.0


class Fleet:
    """The shards of a ``ClusterEnv`` or ``Collector``, and the way to talk to them."""

    def __init__(
        self,
        client: Client,
        recipe: bytes,
        shares: Sequence[Share],
        stream: bytes | None = None,
    ) -> None:
        self.client = client
        self._recipe, self._stream = recipe, stream
        self.run = new_run_id()
        """Tells these shards from those of all other fleets, also in rows on disk."""
        self.name = str(self.run)
        self.handles: list[ShardHandle] = []
        self._closed = False
        self._closing = threading.Lock()
        self._ends: dict[str, float] = {}  # of workers with a lifetime, by the monotonic clock
        protect_shards(client)
        try:
            self._place(shares)
            self.description = _joined(self._open(self.handles))
        except BaseException:
            self.close(config.seconds("timeout.close"))
            raise

    def _place(self, shares: Sequence[Share]) -> None:
        workers = wait_for_workers(self.client, len(shares), config.seconds("timeout.workers"))
        placed = place(self._load(workers), len(shares))
        for index, (share, worker) in enumerate(zip(shares, placed, strict=True)):
            self.handles.append(self._submit(index, share, worker, incarnation=0))

    def _load(self, workers: Iterable[str]) -> dict[str, int]:
        """Return how many shards each worker has, ours and others'."""
        held = self.client.has_what()
        return {
            worker: sum(str(key).startswith(_KEY) for key in held.get(worker, ()))
            for worker in workers
        }

    def _submit(self, index: int, share: Share, worker: str, incarnation: int) -> ShardHandle:
        ports = config.get("channel.ports")
        spec = ShardSpec(
            index=index,
            first=share.first,
            count=share.count,
            ports=tuple(ports) if ports else None,
            accept_timeout=config.seconds("timeout.connect"),
            local=config.get("channel.local"),
            message_limit=config.nbytes("channel.message"),
            incarnation=incarnation,
            fleet=self.name,
            tune=config.get("worker.tune"),
        )
        future = self.client.submit(
            Shard,
            spec,
            key=f"{_KEY}-{self.name}-{index}-{incarnation}",
            workers=[worker],
            allow_other_workers=False,
            actor=True,
            pure=False,
        )
        return ShardHandle(spec, worker, future)

    def place_again(self, lost: ShardHandle, incarnation: int) -> ShardHandle:
        """Open a lost shard's environments anew, on another worker if there is one.

        The new handle is not among :attr:`handles` until :meth:`replace`.

        Raises
        ------
        ClusterEnvError
            If no worker came in time, or what was raised on it.
        """
        if self._closed:
            raise _closed_meanwhile(lost)
        self.await_scheduler()
        self.client.cancel([lost.future], force=True)
        return self._place_one(lost.index, lost.share, incarnation, avoid={lost.worker})

    def place_more(self, index: int, incarnation: int) -> ShardHandle:
        """Open one shard more, behind the last, as large as the first; as :meth:`place_again`."""
        share = Share(self.handles[-1].span.stop, self.handles[0].share.count)
        return self._place_one(index, share, incarnation, avoid=())

    def _place_one(
        self, index: int, share: Share, incarnation: int, avoid: Collection[str]
    ) -> ShardHandle:
        worker = self._find_worker(avoid)
        handle = self._submit(index, share, worker, incarnation)
        try:
            self._open([handle])
        except BaseException:
            self._close([handle], config.seconds("timeout.close"))
            raise
        return handle

    def _find_worker(self, avoid: Collection[str]) -> str:
        """Return the best worker, and wait for one that is not to leave."""
        timeout = config.seconds("timeout.workers")
        deadline = time.monotonic() + timeout
        while True:
            workers = set(wait_for_workers(self.client, 1, timeout)) - self.leaving()
            worker = choose_worker(self._load(workers), avoid)
            if worker is not None:
                return worker
            if time.monotonic() > deadline:
                raise NoWorkers(
                    f"waited {timeout:g} s for a worker that is not about to leave; none came. "
                    "Workers with a lifetime need --lifetime-restart, or a cluster that replaces "
                    "them (cluster.adapt)"
                )
            time.sleep(_GRACE_SECONDS)

    def load(self) -> dict[str, int]:
        """Return how many shards each worker has, ours and others'; asks the scheduler."""
        return self._load(self.client.nthreads())

    def leaving(self) -> set[str]:
        """Return the workers whose lifetime or job is about to end."""
        return about_to_leave(self._ends, time.monotonic(), config.seconds("timeout.leave"))

    @property
    def connected(self) -> bool:
        """Whether the scheduler can be reached, as far as anybody has noticed."""
        return bool(self.client.status == "running")

    def await_scheduler(self) -> None:
        """Wait for a scheduler that cannot be reached.

        Raises
        ------
        SchedulerLost
            If it is not there in time.
        """
        timeout = config.seconds("timeout.scheduler")
        deadline = time.monotonic() + timeout
        while not self.connected:
            if time.monotonic() > deadline or self.client.status in ("closed", "closing"):
                raise SchedulerLost(
                    f"the scheduler has been gone for {timeout:g} s: no shard can be placed any "
                    "more. Start a cluster and go on from what was saved"
                )
            time.sleep(0.1)

    def end_process(self, handle: ShardHandle) -> None:
        """End the process of a worker that does not answer; its nanny starts another."""
        try:
            # As client.restart_workers, which would wait until the new process is there.
            self.client.sync(
                self.client.scheduler.restart_workers,
                workers=[handle.worker],
                timeout=config.seconds("timeout.close"),  # a nanny that is cut off never answers
                wait_for_workers=False,
                on_error="return",
                stimulus_id=f"clusterenv-end-{handle.worker}",
            )
        except Exception as error:  # no nanny, or it is gone already
            logger.warning("the process of %s could not be ended: %s", handle, error)

    def replace(self, handle: ShardHandle) -> None:
        """Put a shard into its predecessor's position, or after all others.

        Raises
        ------
        ClosedError
            If the fleet was closed meanwhile; the shard is closed, too.
        """
        with self._closing:
            if not self._closed:
                self.handles[handle.index : handle.index + 1] = [handle]
                return
        self.discard(handle, config.seconds("timeout.close"))
        raise _closed_meanwhile(handle)

    def remove_last(self) -> None:
        """Forget the last shard, which has been drained."""
        self.handles.pop()

    def _await_taken(self, handle: ShardHandle, timeout: float) -> None:
        """Wait until a worker has taken a shard; one that has left never will."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                wait(handle.future, min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
                return
            except TimeoutError:
                if handle.worker not in self.client.nthreads():
                    raise WorkerLost(f"{handle.worker} left before it took {handle}.") from None
                if time.monotonic() >= deadline:
                    raise

    def _open(self, handles: Sequence[ShardHandle]) -> list[EnvDescription]:
        timeout = config.seconds("timeout.workers")
        for handle in handles:
            try:
                with self.client.as_current():  # not Dask's default client
                    self._await_taken(handle, timeout)
                    handle.actor = Actor(Shard, handle.worker, handle.future.key)
            except TimeoutError as error:
                raise NoWorkers(
                    f"{handle.worker} did not take {handle} within {timeout:g} s: it is busy with "
                    "other tasks, or gone. Give the environments workers of their own"
                ) from error
            if handle.future.status != "finished":
                handle.future.result()  # raises what went wrong
        # Environments of all shards are made at the same time.
        opening = [(handle, handle.actor.open(self._recipe, self._stream)) for handle in handles]
        descriptions = []
        for handle, future in opening:
            try:
                opened: Opened | Failure = future.result()
            except OSError as error:
                raise self.lost(handle) from error
            if isinstance(opened, Failure):
                raise env_error(handle, opened)
            descriptions.append(opened.description)
            if opened.seconds_left is not None:
                self._ends[handle.worker] = time.monotonic() + opened.seconds_left
            self._connect(handle, opened)
        check_same_spaces(
            descriptions[0].observation_mode,
            [str(handle) for handle in handles],
            [each.observation_space for each in descriptions],
            [each.action_space for each in descriptions],
        )
        return descriptions

    def _connect(self, handle: ShardHandle, opened: Opened) -> None:
        context = None
        if handle.worker.startswith("tls://"):
            context = self.client.security.get_connection_args("client")["ssl_context"]
        timeout = config.seconds("timeout.connect")
        try:
            limit = config.nbytes("channel.message")
            sock = connect(opened.endpoint, context, timeout)
            handle.connected(NonBlockingConnection(sock, limit))
            handle.relay = opened.relay
        except OSError as error:
            where = f"{opened.endpoint.host}:{opened.endpoint.port}"
            raise WorkerLost(
                f"cannot reach {handle} at {where}: {error}. Steps travel "
                "directly between this process and the workers: if a firewall leaves only some "
                "ports open, name them: dask.config.set({'clusterenv.channel.ports': [9000, 9100]})"
            ) from error

    def gone(self) -> list[ShardHandle]:
        """Return the shards that Dask knows to be lost, and nobody had noticed.

        A machine that vanishes closes no connection.
        """
        if not self.connected:  # then Dask takes all futures for cancelled
            return []
        ended = ("lost", "cancelled", "error")
        return [
            handle for handle in self.handles if not handle.lost and handle.future.status in ended
        ]

    def lost(self, handle: ShardHandle) -> WorkerLost:
        """Remember that a shard is lost, and return the error that says so."""
        handle.lost = True
        return WorkerLost(
            f"{handle} is gone: its process ended or cannot be reached. "
            "The worker's log says why (often: out of memory, walltime, a crash in native code)."
        )

    def close(self, timeout: float) -> None:
        """Stop all shards; environments that do not stop in time are named in the log."""
        with self._closing:
            self._closed = True
        self._close(self.handles, timeout)
        self.handles.clear()

    def discard(self, handle: ShardHandle, timeout: float) -> None:
        """Stop a shard that was placed again and is not needed any more."""
        self._close([handle], timeout)

    def _close(self, handles: Sequence[ShardHandle], timeout: float) -> None:
        for handle in handles:
            handle.disconnect()
        if self.client.status == "running":
            closing = [
                (handle, handle.actor.close(timeout)) for handle in handles if handle.running
            ]
            for handle, future in closing:
                try:
                    ended = future.result(timeout=timeout + _GRACE_SECONDS)
                except (OSError, RuntimeError, TimeoutError):
                    ended = handle.future.status != "finished"  # a lost worker runs nothing
                if not ended:
                    logger.warning(
                        "%s did not stop within %g s: an environment hangs. To end its process: "
                        "client.restart_workers([%r])",
                        handle,
                        timeout,
                        handle.worker,
                    )
            # Handles of an actor hold futures of their own and may live on in cycles.
            self.client.cancel([handle.future for handle in handles], force=True)


def _closed_meanwhile(handle: ShardHandle) -> ClosedError:
    return ClosedError(f"closed while {handle} was being placed again")


def _joined(shards: Sequence[EnvDescription]) -> EnvDescription:
    """Return the description of all environments of a fleet."""
    spaces = tuple(space for shard in shards for space in shard.observation_spaces)
    return replace(shards[0], observation_spaces=spaces)
