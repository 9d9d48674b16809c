"""Starts clusters, which are closed with their client."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import resource_tracker
from typing import Any

from distributed import Client
from distributed.deploy import Cluster
from distributed.security import Security

from clusterenv import config
from clusterenv.cluster.jobqueue import jobqueue_class, start_jobqueue
from clusterenv.cluster.local import start_local
from clusterenv.errors import ConfigError

__all__ = ["start"]

logger = logging.getLogger("clusterenv")

_GUARD = (
    "the processes of a local cluster import the script that starts it, so start it under a "
    "guard:\n\n    if __name__ == '__main__':\n        main()\n"
)


class _OwningClient(Client):  # type: ignore[misc]  # distributed is untyped
    """A client that closes its cluster with itself."""

    def __init__(self, cluster: Cluster, **options: Any) -> None:
        self.on_close = contextlib.ExitStack()
        super().__init__(cluster, **options)

    def close(self, *args: Any, **kwargs: Any) -> Any:
        result = super().close(*args, **kwargs)
        self.on_close.close()
        return result


def start(
    name: str, security: Security | None, options: dict[str, Any], set_as_default: bool
) -> Client:
    """Start a local cluster or that of a batch system, and return a client that closes it."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(_GUARD)
    if name == "local" and getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        raise ConfigError(
            "the processes of a local cluster import the script that starts it, and this one comes "
            "from standard input: save it as a file, and run that"
        )
    if name != "local":
        jobqueue_class(name)  # imported in this thread: the package sets a signal handler
    return _interruptible(lambda: _start(name, security, options, set_as_default))


def _interruptible(start: Callable[[], Client]) -> Client:
    """Start a cluster in another thread, and close it if the wait for it is interrupted.

    Dask cannot close a cluster whose start was interrupted, and Python raises
    ``KeyboardInterrupt`` in the main thread only. A terminal sends Ctrl-C to the whole process
    group, so the thread blocks the signal, and the processes that it starts inherit this.
    """
    client: Future[Client] = Future()

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            client.set_result(start())
        except BaseException as error:
            client.set_exception(error)

    resource_tracker.ensure_running()  # starting it unblocks SIGINT in the thread that does so
    threading.Thread(target=run, name="clusterenv-start", daemon=True).start()
    try:
        return client.result()
    except BaseException as error:
        if not (client.done() and client.exception() is error):  # the wait was interrupted
            with contextlib.suppress(Exception):
                client.result(config.seconds("timeout.workers")).close()
        raise


def _start(
    name: str, security: Security | None, options: dict[str, Any], set_as_default: bool
) -> Client:
    with contextlib.ExitStack() as undo:
        try:
            if name == "local":
                cluster = start_local(security, options)
            else:
                cluster = start_jobqueue(name, security, options, undo)
        except RuntimeError as error:
            if "failed to start" in str(error):
                reason = str(error).rstrip(".")
                raise ConfigError(f"{reason}. If this is a script: {_GUARD}") from error
            raise
        undo.callback(_close, cluster)
        _ignore_unknown_workers(cluster)
        client = _OwningClient(
            cluster,
            direct_to_workers=True,
            timeout=config.seconds("timeout.connect"),
            set_as_default=set_as_default,
        )
        client.on_close = undo.pop_all()
    return client


def _ignore_unknown_workers(cluster: Cluster) -> None:
    """Make a cluster object ignore the removal of a worker that it does not know.

    Otherwise it disconnects from its scheduler, and raises ``KeyError`` when it is closed.
    """
    update = cluster._update_worker_status

    def update_known(op: str, worker: Any) -> None:
        if op != "remove" or worker in cluster.scheduler_info["workers"]:
            update(op, worker)

    cluster._update_worker_status = update_known


def _close(cluster: Cluster) -> None:
    timeout = config.seconds("timeout.close")
    try:
        cluster.close(timeout)
    except TimeoutError:
        logger.warning("%s did not close within %g s", cluster, timeout)
