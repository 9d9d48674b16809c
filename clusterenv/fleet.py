"""Places shards on workers, connects to them, and notices when one is lost."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from distributed import Actor, Client, wait

from clusterenv import config
from clusterenv.channel import Channel, loads
from clusterenv.cluster import wait_for_workers
from clusterenv.env_errors import raised_by_env
from clusterenv.env_loop.faults import PolicyFault
from clusterenv.envs import EnvDescription
from clusterenv.errors import (
    ClosedError,
    ConfigError,
    EnvError,
    EnvGivenUp,
    NoWorkers,
    PolicyError,
    SchedulerLost,
    WorkerLost,
)
from clusterenv.frames import Failure
from clusterenv.keep import keep_shards
from clusterenv.observation_mode import check_same_spaces
from clusterenv.rendezvous import Endpoint, reach
from clusterenv.shard import Opened, Shard, ShardSpec
from clusterenv.supervision import Pulse, about_to_leave, choose_worker
from clusterenv.telemetry import Telemetry

__all__ = ["Fleet", "Link", "Share", "env_error", "place", "split"]

logger = logging.getLogger("clusterenv")

_KEY = "clusterenv-shard"
_GRACE_SECONDS = 0.5
_LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class Share:
    """The environments of one shard: ``count`` of them, from global index ``first``."""

    first: int
    count: int


def split(num_envs: int, shards: int) -> list[Share]:
    """Split environments over shards as evenly as possible, larger shares first.

    >>> split(7, 3)
    [Share(first=0, count=3), Share(first=3, count=2), Share(first=5, count=2)]
    """
    small, more = divmod(num_envs, shards)
    counts = [small + (index < more) for index in range(shards)]
    return [Share(sum(counts[:index]), count) for index, count in enumerate(counts)]


def place(load: dict[str, int], shards: int) -> list[str]:
    """Choose a worker for each shard: the least loaded ones, each once.

    >>> place({"a": 1, "b": 0, "c": 0}, 2)
    ['b', 'c']
    """
    return sorted(load, key=lambda worker: (load[worker], worker))[:shards]


class Link:
    """The head's end of one shard."""

    def __init__(self, spec: ShardSpec, worker: str, future: Any) -> None:
        self.index = spec.index
        self.incarnation = spec.incarnation
        self.share = Share(spec.first, spec.count)
        self.span = slice(spec.first, spec.first + spec.count)
        self.rows = np.arange(spec.first, spec.first + spec.count)
        self.rows.setflags(write=False)  # handed out as info["env_id"]
        self.worker = worker
        self.future = future  # holding the Actor alone can lose it
        self.actor: Any = None
        self._channel: Channel | None = None
        self.relay: Endpoint | None = None
        """Where other workers get weights from it, if they do."""
        self.lost = False
        self.draining = False
        self.delivered = 0
        """Rows that have arrived."""
        self.because = "scale"
        """Why it was placed: ``scale``, ``loss`` or ``move``."""
        self.pulse = Pulse(time.monotonic())

    def __str__(self) -> str:
        first, last = self.span.start, self.span.stop - 1
        return f"shard {self.index} (environments {first}–{last}) on {self.worker}"

    @property
    def channel(self) -> Channel:
        """The connection to the shard's thread."""
        assert self._channel is not None
        return self._channel

    def connected(self, channel: Channel) -> None:
        """Remember the connection."""
        self._channel = channel

    def disconnect(self) -> None:
        """Close the connection, if there is one."""
        if self._channel is not None:
            self._channel.close()

    @property
    def running(self) -> bool:
        """Whether the actor is there, as far as anybody has noticed."""
        return self.actor is not None and not self.lost and self.future.status == "finished"


class Fleet:
    """The shards of a ``ClusterEnv`` or ``Collector``, and the way to talk to them."""

    def __init__(
        self,
        client: Client,
        recipe: bytes,
        shares: Sequence[Share],
        stream: bytes | None = None,
    ) -> None:
        self._client = client
        self._recipe, self._stream = recipe, stream
        self._name = uuid.uuid4().hex
        self.links: list[Link] = []
        self._closed = False
        self._closing = threading.Lock()
        self._ends: dict[str, float] = {}  # of workers with a lifetime, by the monotonic clock
        keep_shards(client)
        try:
            self._place(shares)
            self.description = _joined(self._open(self.links))
        except BaseException:
            self.close(config.seconds("timeout.close"))
            raise

    def _place(self, shares: Sequence[Share]) -> None:
        workers = wait_for_workers(self._client, len(shares), config.seconds("timeout.workers"))
        placed = place(self._load(workers), len(shares))
        for index, (share, worker) in enumerate(zip(shares, placed, strict=True)):
            self.links.append(self._submit(index, share, worker, incarnation=0))

    def _load(self, workers: Iterable[str]) -> dict[str, int]:
        """Return how many shards each worker has, ours and others'."""
        held = self._client.has_what()
        return {
            worker: sum(str(key).startswith(_KEY) for key in held.get(worker, ()))
            for worker in workers
        }

    def _submit(self, index: int, share: Share, worker: str, incarnation: int) -> Link:
        ports = config.get("channel.ports")
        spec = ShardSpec(
            index=index,
            first=share.first,
            count=share.count,
            ports=tuple(ports) if ports else None,
            accept_timeout=config.seconds("timeout.connect"),
            local=config.get("channel.local"),
            incarnation=incarnation,
            fleet=self._name,
        )
        future = self._client.submit(
            Shard,
            spec,
            key=f"{_KEY}-{self._name}-{index}-{incarnation}",
            workers=[worker],
            allow_other_workers=False,
            actor=True,
            pure=False,
        )
        return Link(spec, worker, future)

    def telemetry(self, title: str) -> Telemetry:
        """Return what tells the dashboard of this fleet."""
        return Telemetry(self._client, self._name, title)

    def place_again(self, lost: Link, incarnation: int) -> Link:
        """Open a lost shard's environments anew, on another worker if there is one.

        The new link is not among :attr:`links` until :meth:`replace`.

        Raises
        ------
        ClusterEnvError
            If no worker came in time, or what was raised on it.
        """
        if self._closed:
            raise _closed_meanwhile(lost)
        self.await_scheduler()
        self._client.cancel([lost.future], force=True)
        return self._place_one(lost.index, lost.share, incarnation, avoid={lost.worker})

    def place_more(self, index: int, incarnation: int) -> Link:
        """Open one shard more, behind the last, as large as the first; as :meth:`place_again`."""
        share = Share(self.links[-1].span.stop, self.links[0].share.count)
        return self._place_one(index, share, incarnation, avoid=())

    def _place_one(
        self, index: int, share: Share, incarnation: int, avoid: Collection[str]
    ) -> Link:
        worker = self._find_worker(avoid)
        link = self._submit(index, share, worker, incarnation)
        try:
            self._open([link])
        except BaseException:
            self._close([link], config.seconds("timeout.close"))
            raise
        return link

    def _find_worker(self, avoid: Collection[str]) -> str:
        """Return the best worker, and wait for one that is not to leave."""
        timeout = config.seconds("timeout.workers")
        deadline = time.monotonic() + timeout
        while True:
            workers = set(wait_for_workers(self._client, 1, timeout)) - self.leaving()
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
        return self._load(self._client.nthreads())

    def leaving(self) -> set[str]:
        """Return the workers whose lifetime or job is about to end."""
        return about_to_leave(self._ends, time.monotonic(), config.seconds("timeout.leave"))

    @property
    def connected(self) -> bool:
        """Whether the scheduler can be reached, as far as anybody has noticed."""
        return bool(self._client.status == "running")

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
            if time.monotonic() > deadline or self._client.status in ("closed", "closing"):
                raise SchedulerLost(
                    f"the scheduler has been gone for {timeout:g} s: no shard can be placed any "
                    "more. Start a cluster and go on from what was saved"
                )
            time.sleep(0.1)

    def end_process(self, link: Link) -> None:
        """End the process of a worker that does not answer; its nanny starts another."""
        try:
            # As client.restart_workers, which would wait until the new process is there.
            self._client.sync(
                self._client.scheduler.restart_workers,
                workers=[link.worker],
                timeout=config.seconds("timeout.close"),  # a nanny that is cut off never answers
                wait_for_workers=False,
                on_error="return",
                stimulus_id=f"clusterenv-end-{link.worker}",
            )
        except Exception as error:  # no nanny, or it is gone already
            logger.warning("the process of %s could not be ended: %s", link, error)

    def replace(self, link: Link) -> None:
        """Put a shard into its predecessor's position, or after all others.

        Raises
        ------
        ClosedError
            If the fleet was closed meanwhile; the shard is closed, too.
        """
        with self._closing:
            if not self._closed:
                self.links[link.index : link.index + 1] = [link]
                return
        self.discard(link, config.seconds("timeout.close"))
        raise _closed_meanwhile(link)

    def remove_last(self) -> None:
        """Forget the last shard, which has been drained."""
        self.links.pop()

    def _await_taken(self, link: Link, timeout: float) -> None:
        """Wait until a worker has taken a shard; one that has left never will."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                wait(link.future, min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
                return
            except TimeoutError:
                if link.worker not in self._client.nthreads():
                    raise WorkerLost(f"{link.worker} left before it took {link}.") from None
                if time.monotonic() >= deadline:
                    raise

    def _open(self, links: Sequence[Link]) -> list[EnvDescription]:
        timeout = config.seconds("timeout.workers")
        for link in links:
            try:
                with self._client.as_current():  # not Dask's default client
                    self._await_taken(link, timeout)
                    link.actor = Actor(Shard, link.worker, link.future.key)
            except TimeoutError as error:
                raise NoWorkers(
                    f"{link.worker} did not take {link} within {timeout:g} s: it is busy with "
                    "other tasks, or gone. Give the environments workers of their own"
                ) from error
            if link.future.status != "finished":
                link.future.result()  # raises what went wrong
        # Environments of all shards are made at the same time.
        opening = [(link, link.actor.open(self._recipe, self._stream)) for link in links]
        descriptions = []
        for link, future in opening:
            try:
                opened: Opened | Failure = future.result()
            except OSError as error:
                raise self.lost(link) from error
            if isinstance(opened, Failure):
                raise env_error(link, opened)
            descriptions.append(opened.description)
            if opened.seconds_left is not None:
                self._ends[link.worker] = time.monotonic() + opened.seconds_left
            self._connect(link, opened)
        check_same_spaces(
            descriptions[0].observation_mode,
            [str(link) for link in links],
            [each.observation_space for each in descriptions],
            [each.action_space for each in descriptions],
        )
        return descriptions

    def _connect(self, link: Link, opened: Opened) -> None:
        context = None
        if link.worker.startswith("tls://"):
            context = self._client.security.get_connection_args("client")["ssl_context"]
        timeout = config.seconds("timeout.connect")
        try:
            link.connected(reach(opened.endpoint, context, timeout))
            link.relay = opened.relay
        except OSError as error:
            where = f"{opened.endpoint.host}:{opened.endpoint.port}"
            raise WorkerLost(
                f"cannot reach {link} at {where}: {error}. Steps travel "
                "directly between this process and the workers: if a firewall leaves only some "
                "ports open, name them: dask.config.set({'clusterenv.channel.ports': [9000, 9100]})"
            ) from error

    def gone(self) -> list[Link]:
        """Return the shards that Dask knows to be lost, and nobody had noticed.

        A machine that vanishes closes no connection.
        """
        if not self.connected:  # then Dask takes all futures for cancelled
            return []
        ended = ("lost", "cancelled", "error")
        return [link for link in self.links if not link.lost and link.future.status in ended]

    def lost(self, link: Link) -> WorkerLost:
        """Remember that a shard is lost, and return the error that says so."""
        link.lost = True
        return WorkerLost(
            f"{link} is gone: its process ended or cannot be reached. "
            "The worker's log says why (often: out of memory, walltime, a crash in native code)."
        )

    def close(self, timeout: float) -> None:
        """Stop all shards; environments that do not stop in time are named in the log."""
        with self._closing:
            self._closed = True
        self._close(self.links, timeout)
        self.links.clear()

    def discard(self, link: Link, timeout: float) -> None:
        """Stop a shard that was placed again and is not needed any more."""
        self._close([link], timeout)

    def _close(self, links: Sequence[Link], timeout: float) -> None:
        for link in links:
            link.disconnect()
        if self._client.status == "running":
            closing = [(link, link.actor.close(timeout)) for link in links if link.running]
            for link, future in closing:
                try:
                    ended = future.result(timeout=timeout + _GRACE_SECONDS)
                except (OSError, RuntimeError, TimeoutError):
                    ended = link.future.status != "finished"  # a lost worker runs nothing
                if not ended:
                    logger.warning(
                        "%s did not stop within %g s: an environment hangs. To end its process: "
                        "client.restart_workers([%r])",
                        link,
                        timeout,
                        link.worker,
                    )
            # Handles of an actor hold futures of their own and may live on in cycles.
            self._client.cancel([link.future for link in links], force=True)


def _closed_meanwhile(link: Link) -> ClosedError:
    return ClosedError(f"closed while {link} was being placed again")


def _joined(shards: Sequence[EnvDescription]) -> EnvDescription:
    """Return the description of all environments of a fleet."""
    spaces = tuple(space for shard in shards for space in shard.observation_spaces)
    return replace(shards[0], observation_spaces=spaces)


def env_error(link: Link, failure: Failure) -> Exception:
    """Return the exception that a failure on a worker becomes at the head."""
    cause: BaseException | None = None
    if failure.error is not None:
        try:
            cause = loads(failure.error)
        except Exception:
            cause = None
    if isinstance(cause, ConfigError):
        return cause
    if failure.doing == "act":
        what = str(cause) if isinstance(cause, PolicyFault) else failure.traceback.splitlines()[-1]
        fault = PolicyError(f"{what} ({link})\n\nOn the worker:\n{failure.traceback.rstrip()}")
        fault.__cause__ = cause
        return fault
    which = "an environment" if failure.env is None else f"environment {failure.env}"
    hint = ""
    if isinstance(cause, ImportError):
        hint = "\nIs the package installed on the workers?"
    note = f"\n{failure.note}" if failure.note else ""
    return raised_by_env(
        EnvGivenUp if failure.note else EnvError,
        f"{which} of {link} raised in {failure.doing}.{hint}{note}\n\n"
        f"On the worker:\n{failure.traceback.rstrip()}",
        cause,
    )
