"""Places shards on workers, opens their environments, connects to them and closes them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from distributed import Actor, Client, Future, wait

from clusterenv import config
from clusterenv.cluster.connect import wait_for_workers
from clusterenv.cluster.plugins import protect_shards
from clusterenv.data.observation_mode import check_same_spaces
from clusterenv.data.seeds import new_run_id
from clusterenv.errors import ClosedError, NoWorkers, SchedulerLost, WorkerLost
from clusterenv.head.fleet.env_errors import env_error
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.head.fleet.placement import Share, about_to_leave, choose_worker, place
from clusterenv.head.fleet.roster import Reason, Roster, ShardRecord
from clusterenv.simulation.engines.base import EnvDescription
from clusterenv.transport.messages import Failure
from clusterenv.worker.actor import Shard
from clusterenv.worker.specs import Opened, ShardSpec

__all__ = ["Fleet", "await_taken"]

logger = logging.getLogger("clusterenv")

_KEY = "clusterenv-shard"
_GRACE_SECONDS = 0.5
_LOOK_SECONDS = 2.0


class Fleet:
    """Does the I/O of the shards of a ``ClusterEnv`` or ``Collector``; the roster decides."""

    def __init__(
        self, client: Client, recipe: bytes, shares: Sequence[Share], stream: bytes | None = None
    ) -> None:
        self.client = client
        self._recipe, self._stream = recipe, stream
        self.run = new_run_id()
        """Distinguishes these shards from those of all other fleets, also in rows on disk."""
        self.name = str(self.run)
        self.roster = Roster(shares)
        self.closing = threading.Event()
        """Set as soon as the fleet is to be closed; it ends the waits for placement."""
        self._ends: dict[str, float] = {}  # of workers with a lifetime, by the monotonic clock
        protect_shards(client)
        placed: list[ShardHandle] = []
        try:
            count = len(shares)
            workers = wait_for_workers(client, count, config.seconds("timeout.workers"))
            for record, worker in zip(self.roster, place(self.load(workers), count), strict=True):
                placed.append(self._submit(record, worker))
                self.roster.opening(record.index, placed[-1])
            opened = self._open(placed)
            spaces = tuple(space for shard in opened for space in shard.observation_spaces)
            self.description = replace(opened[0], observation_spaces=spaces)
            for handle in placed:
                self.roster.admit(handle.index)
        except BaseException:
            self.closing.set()
            self.roster.close()
            self.stop(placed)
            raise

    @property
    def handles(self) -> Sequence[ShardHandle]:
        """The head's ends of all shards, by index."""
        return self.roster.handles

    def load(self, workers: Iterable[str]) -> dict[str, int]:
        """Return how many shards each of these workers has, ours and others'."""
        held = self.client.has_what()
        return {
            worker: sum(str(key).startswith(_KEY) for key in held.get(worker, ()))
            for worker in workers
        }

    def _submit(self, record: ShardRecord, worker: str) -> ShardHandle:
        ports = config.get("channel.ports")
        spec = ShardSpec(
            index=record.index,
            first=record.share.first,
            count=record.share.count,
            ports=tuple(ports) if ports else None,
            accept_timeout=config.seconds("timeout.connect"),
            local=config.get("channel.local"),
            message_limit=config.nbytes("channel.message"),
            incarnation=record.incarnation,
            fleet=self.name,
            tune=config.get("worker.tune"),
        )
        future = self.client.submit(
            Shard,
            spec,
            key=f"{_KEY}-{self.name}-{spec.index}-{spec.incarnation}",
            workers=[worker],
            allow_other_workers=False,
            actor=True,
            pure=False,
        )
        return ShardHandle(spec, worker, future)

    def place(self, record: ShardRecord) -> ShardHandle:
        """Place a shard and open its environments, on another worker than before if it can.

        Raises ``ClosedError`` if the fleet is closed meanwhile, another ``ClusterEnvError`` if no
        worker came in time, and what was raised on the worker.
        """
        if self.closing.is_set():
            raise _closed_meanwhile()
        avoid: set[str] = set()
        if record.handle is not None:
            self.await_scheduler()
            self.release(record.handle)
            if record.because is not Reason.SCALE:
                avoid.add(record.handle.worker)
        handle = self._submit(record, self._find_worker(avoid))
        try:
            self.roster.opening(record.index, handle)
            self._open([handle])
        except WorkerLost:
            self.release(handle)
            raise
        except BaseException:
            self.stop([handle])
            raise
        return handle

    def _find_worker(self, avoid: Collection[str]) -> str:
        """Return the least loaded worker; wait for one that is not about to leave."""
        timeout = config.seconds("timeout.workers")
        deadline = time.monotonic() + timeout
        while True:
            workers = set(wait_for_workers(self.client, 1, timeout)) - self.leaving()
            worker = choose_worker(self.load(workers), avoid)
            if worker is not None:
                return worker
            if time.monotonic() > deadline:
                raise NoWorkers(
                    f"waited {timeout:g} s for a worker that is not about to leave; none came. "
                    "Workers with a lifetime need --lifetime-restart, or a cluster that replaces "
                    "them (cluster.adapt)"
                )
            if self.closing.wait(_GRACE_SECONDS):
                raise _closed_meanwhile()

    def leaving(self) -> set[str]:
        """Return the workers whose lifetime or job is about to end."""
        return about_to_leave(self._ends, time.monotonic(), config.seconds("timeout.leave"))

    @property
    def connected(self) -> bool:
        """Whether the scheduler can be reached, as far as Dask's client knows."""
        return bool(self.client.status == "running")

    def await_scheduler(self) -> None:
        """Wait for a scheduler that cannot be reached; raise ``SchedulerLost`` in the end."""
        timeout = config.seconds("timeout.scheduler")
        deadline = time.monotonic() + timeout
        while not self.connected:
            if time.monotonic() > deadline or self.client.status in ("closed", "closing"):
                raise SchedulerLost(
                    f"the scheduler has been gone for {timeout:g} s: no shard can be placed any "
                    "more. Start a cluster and go on from what was saved"
                )
            if self.closing.wait(0.1):
                raise _closed_meanwhile()

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

    def _open(self, handles: Sequence[ShardHandle]) -> list[EnvDescription]:
        timeout = config.seconds("timeout.workers")
        for handle in handles:
            try:
                with self.client.as_current():  # not Dask's default client
                    await_taken(self.client, handle.future, handle.worker, timeout)
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
        context = self.client.security.get_connection_args("client").get("ssl_context")
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
            handle.connect(opened, context if handle.worker.startswith("tls://") else None)
        check_same_spaces(
            descriptions[0].observation_mode,
            [str(handle) for handle in handles],
            [each.observation_space for each in descriptions],
            [each.action_space for each in descriptions],
        )
        return descriptions

    def gone(self) -> list[ShardHandle]:
        """Return the active shards that Dask knows to be lost.

        A machine that vanishes closes no connection.
        """
        if not self.connected:  # then Dask takes all futures for cancelled
            return []
        handles = [record.handle for record in self.roster.active]
        ended = ("lost", "cancelled", "error")
        return [handle for handle in handles if handle and handle.future.status in ended]

    def lost(self, handle: ShardHandle) -> WorkerLost:
        """Return the error for a shard whose connection broke."""
        return WorkerLost(
            f"{handle} is gone: its process ended or cannot be reached. "
            "The worker's log says why (often: out of memory, walltime, a crash in native code)."
        )

    def close(self, timeout: float) -> None:
        """Stop all shards; environments that do not stop in time are named in the log."""
        self.closing.set()
        active, lost = self.roster.close()
        self.stop(active, timeout)
        for handle in lost:
            self.release(handle)

    def release(self, handle: ShardHandle) -> None:
        """Disconnect from a shard that was drained or lost, and let its actor go."""
        handle.disconnect()
        if self.connected:
            # Handles of an actor hold futures of their own and may live on in cycles.
            self.client.cancel([handle.future], force=True)

    def stop(self, handles: Sequence[ShardHandle], timeout: float | None = None) -> None:
        """Stop shards that were placed and are not needed any more."""
        timeout = config.seconds("timeout.close", timeout)
        for handle in handles:
            handle.disconnect()
        if not self.connected:
            return
        opened = [h for h in handles if h.actor is not None and h.future.status == "finished"]
        closing = [(handle, handle.actor.close(timeout)) for handle in opened]
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
        self.client.cancel([handle.future for handle in handles], force=True)


def await_taken(client: Client, future: Future, worker: str, timeout: float) -> None:
    """Wait until a worker has taken an actor; raise ``WorkerLost`` if it leaves before."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            wait(future, min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
            return
        except TimeoutError:
            if worker not in client.nthreads():
                raise WorkerLost(f"{worker} left before it took {future.key}.") from None
            if time.monotonic() >= deadline:
                raise


def _closed_meanwhile() -> ClosedError:
    return ClosedError("closed while a shard was being placed")
