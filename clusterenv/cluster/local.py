"""Starts clusters of worker processes on this machine, forked from a prepared process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import dask
from dask.system import CPU_COUNT
from distributed import LocalCluster, Nanny, Worker
from distributed.security import Security

from clusterenv import config
from clusterenv.cluster.plugins import ReplaceLostWorkers
from clusterenv.cluster.security import LOOPBACK, NO_HTTP_ROUTES
from clusterenv.data.processes import OWN_WORKER, signal_on_parent_death

__all__ = ["LocalNanny", "LocalWorker", "start_local"]

# Makes Dask's periodic tasks rare. An idle local cluster of two workers took 10 % of a core (ticks
# every 20 ms, memory checks every 100 ms, a profiler); with these settings it takes 2 %.
_QUIET = {
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.monitor-interval": "1s",
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
}
_HEARTBEAT_SECONDS = 3.0  # a nanny kills a worker that takes 4 seconds to close
_METHOD = "distributed.worker.multiprocessing-method"

_lock = threading.Lock()
_starting = 0  # workers that are being forked now
_before = ""  # the method that was set before


class LocalWorker(Worker):  # type: ignore[misc]  # distributed is untyped
    """A worker whose process ends with the head.

    - The kernel kills it when its parent process ends, even if it is stopped or holds the GIL.
    - It ignores Ctrl-C, which a terminal sends to all processes of a job; the head handles it.
    - It waits for a pending heartbeat before it closes. Dask's own worker closes the heartbeat's
      connection, and logs the resulting error.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        os.environ[OWN_WORKER] = "1"
        signal_on_parent_death(signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked since its start
        self._heartbeat: asyncio.Task[Any] | None = None
        super().__init__(*args, **options)

    async def heartbeat(self) -> None:
        self._heartbeat = asyncio.current_task()
        try:
            await super().heartbeat()
        finally:
            self._heartbeat = None

    async def close(self, *args: Any, **options: Any) -> str | None:
        self.periodic_callbacks["heartbeat"].stop()
        heartbeat = self._heartbeat
        if heartbeat is not None and heartbeat is not asyncio.current_task():
            await asyncio.wait([heartbeat], timeout=_HEARTBEAT_SECONDS)
        closed: str | None = await super().close(*args, **options)
        return closed


class LocalNanny(Nanny):  # type: ignore[misc]  # distributed is untyped
    """Starts and restarts a :class:`LocalWorker`, by forking it if possible."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._fork = _can_fork()
        super().__init__(*args, **{"worker_class": LocalWorker, **options})

    async def instantiate(self) -> Any:
        with _forking() if self._fork else contextlib.nullcontext():
            return await super().instantiate()


class _PlainNanny(LocalNanny):
    """Starts a worker without a dashboard, although its HTTP server has an address."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "dashboard": False})


def start_local(security: Security | None, options: dict[str, Any]) -> LocalCluster:
    """Start a ``LocalCluster`` that replaces lost workers; ``options`` are passed to it."""
    address = options.get("dashboard_address", config.get("local.dashboard-address"))
    options = {
        "n_workers": config.get("local.n-workers") or CPU_COUNT,
        "threads_per_worker": config.get("local.threads-per-worker"),
        # Without a dashboard Dask still serves metrics over HTTP: keep that on loopback.
        "scheduler_kwargs": {"dashboard_address": address or LOOPBACK},
        "worker_dashboard_address": LOOPBACK,
        **options,
        "dashboard_address": address,
    }
    if options.get("processes") is not False:
        nanny = LocalNanny if address else _PlainNanny
        options = {"worker_class": nanny, **_start_fork_server(), **options}
    with dask.config.set(_QUIET if address else {**_QUIET, **NO_HTTP_ROUTES}):
        cluster = LocalCluster(security=security, **options)
    cluster.scheduler.add_plugin(ReplaceLostWorkers(cluster))
    return cluster


def _can_fork() -> bool:
    """Whether local workers are forked.

    The setting ``clusterenv.local.fork`` turns this off, and so does any method but ``spawn`` in
    Dask's configuration. It is used on Linux only, where libraries survive a fork, and not with
    Python 3.11.0, whose fork server is open to other users (CVE-2022-42919).
    """
    safe = sys.platform == "linux" and sys.version_info >= (3, 11, 1)
    wanted = safe and config.get("local.fork")
    return bool(wanted and dask.config.get(_METHOD) in ("spawn", "forkserver"))


def _start_fork_server() -> dict[str, Any]:
    """Start the process that workers are forked from; return options for their nannies.

    A worker that is spawned imports everything, in about three seconds. The fork server has
    imported everything and is forked for each worker: workers start at once, also after a kill,
    and share the memory of what was imported. It ends with this process.
    """
    if not _can_fork():
        return {}
    for name, value in dask.config.get("distributed.nanny.pre-spawn-environ").items():
        os.environ.setdefault(name, str(value))  # as nannies do; libraries read it on import
    forkserver.set_forkserver_preload(["clusterenv.worker.preload"])
    forkserver.ensure_running()
    # Variables that were set after the fork server started must reach the workers too.
    return {"env": dict(os.environ)}


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Let Dask fork the worker processes that are started in this context.

    Dask reads the method from its global configuration. It is set only while workers of ours
    start, so that other clusters of this process keep theirs.
    """
    global _starting, _before
    with _lock:
        if not _starting:
            _before = dask.config.get(_METHOD)
            dask.config.set({_METHOD: "forkserver"})
        _starting += 1
    try:
        yield
    finally:
        with _lock:
            _starting -= 1
            if not _starting:
                dask.config.set({_METHOD: _before})
