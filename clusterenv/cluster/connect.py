"""Turns whatever names a cluster into a connected Dask client."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeAlias

from distributed import Client
from distributed.deploy import Cluster
from distributed.security import Security

from clusterenv import config
from clusterenv.cluster.cluster_file import ClusterFile, is_cluster_file, read_cluster_file
from clusterenv.cluster.jobqueue import JOBQUEUES, start_jobqueue
from clusterenv.cluster.local import start_local
from clusterenv.cluster.security import choose_security
from clusterenv.errors import ConfigError, NoWorkers

__all__ = ["ClusterLike", "connect", "starts_cluster", "starts_empty", "wait_for_workers"]

logger = logging.getLogger("clusterenv")

ClusterLike: TypeAlias = Any  # str | PathLike | Client | Cluster | None; distributed is untyped
"""Everything that :func:`connect` takes."""

_NOBODY = (
    "is the scheduler running, is this the address that its log names, and does it speak TLS "
    "(tls://…) or not (tcp://…)?"
)
_TURN_SECONDS = 2.0
_SAY_SECONDS = 60.0
_WRITTEN_SECONDS = 0.5

_GUARD = (
    "a local cluster's processes import the script that starts them, so whatever starts one "
    "belongs under a guard:\n\n    if __name__ == '__main__':\n        main()\n"
)


class _OwningClient(Client):  # type: ignore[misc]  # distributed is untyped
    """A client that closes, with itself, the cluster that was started for it."""

    def __init__(self, cluster: Cluster, **options: Any) -> None:
        self.afterwards = contextlib.ExitStack()
        super().__init__(cluster, **options)

    def close(self, *args: Any, **kwargs: Any) -> Any:
        result = super().close(*args, **kwargs)
        self.afterwards.close()
        return result


def connect(
    cluster: ClusterLike = None,
    *,
    security: Security | bool | None = None,
    set_as_default: bool = True,
    **options: Any,
) -> Client:
    """Connect to a Dask cluster, and start one if asked to.

    Parameters
    ----------
    cluster
        - ``None`` or ``"local"``: start a ``LocalCluster``, one single-threaded process
          per core. ``close()`` of the returned client stops it.
        - ``"tcp://…"`` or ``"tls://…"``: the address of a running scheduler.
        - The path of a scheduler file.
        - A ``distributed.Client``: returned as it is if it talks to workers directly,
          otherwise a second client of the same scheduler is returned.
        - Any Dask cluster object (``SLURMCluster``, ``KubeCluster``, …): it stays open
          when the returned client is closed.
        - The name of a dask-jobqueue class (``"slurm"``, ``"pbs"``, …), configured
          through Dask's own configuration. ``close()`` of the client ends its jobs.
        - The path of a cluster file (``"cluster.yaml"``), which says what is to be started.
    security
        A cluster that is started speaks TLS, with certificates of its own that end with it.
        ``False`` turns this off, and so does the setting ``clusterenv.security``. A
        ``distributed.security.Security`` holds certificates of yours; one is needed to
        connect to a running cluster that speaks TLS, unless Dask's configuration names them.
    set_as_default
        Whether Dask's own collections shall compute on this client too.
    **options
        Passed to the cluster that is started, or else to ``distributed.Client``.

    Returns
    -------
    distributed.Client
        With ``direct_to_workers=True``: an actor's results do not pass the scheduler.

    Raises
    ------
    ConfigError
        If ``cluster`` names nothing that can be connected to.

    Examples
    --------
    >>> client = connect("local", n_workers=1)
    >>> len(client.nthreads())
    1
    >>> client.close()
    """
    if starts_cluster(cluster):
        wanted = _what_to_start(cluster)
        options = {**wanted.options, **options}
        listed = options.pop("security", None)
        chosen = choose_security(listed if security is None else security)
        return _start(wanted.cluster, chosen, options, set_as_default)
    if isinstance(cluster, Client):
        if security is not None:
            options["security"] = security
        return _direct(cluster, options, set_as_default)
    if isinstance(security, bool):
        raise ConfigError(
            f"security={security} is for clusters that are started here; a running one has its "
            "certificates already: connect(address, security=Security(tls_ca_file='ca.pem', …))"
        )
    if security is not None:
        options["security"] = security
    if isinstance(cluster, Cluster) or (isinstance(cluster, str) and "://" in cluster):
        return _client(cluster, set_as_default=set_as_default, **options)
    if isinstance(cluster, (str, os.PathLike)):
        path = Path(cluster)
        try:
            exists = path.is_file()
        except OSError:  # too long a name
            exists = False
        if exists:
            _check_scheduler_file(path)
            return _client(scheduler_file=str(path), set_as_default=set_as_default, **options)
        raise ConfigError(_unknown(str(cluster)))
    raise ConfigError(
        f"cluster={cluster!r} is a {type(cluster).__name__}; pass 'local', an address such as "
        "'tcp://host:8786', the path of a file, a distributed.Client or a Dask cluster object"
    )


def _client(address: str | Cluster | None = None, **options: Any) -> Client:
    options.setdefault("timeout", config.seconds("timeout.connect"))
    security = options.get("security") or Security()
    if isinstance(address, str) and address.startswith("tls://") and not security.tls_client_cert:
        raise ConfigError(
            f"{address} speaks TLS, and this process has no certificate for it: pass the "
            f"cluster's, connect({address!r}, security=Security(tls_ca_file='ca.pem', "
            "tls_client_cert='cert.pem', tls_client_key='key.pem')), or name them in Dask's "
            "configuration under distributed.comm.tls"
        )
    try:
        return Client(address, **{**options, "direct_to_workers": True})
    except OSError as error:
        named = address or options.get("scheduler_file")
        raise ConfigError(f"no scheduler answers at {named} ({error}): {_NOBODY}") from error


def _check_scheduler_file(path: Path) -> None:
    """Raise unless a file names a scheduler; wait a moment for one that is being written."""
    deadline = time.monotonic() + _WRITTEN_SECONDS
    while True:
        try:
            if isinstance(json.loads(path.read_text())["address"], str):
                return
        except (OSError, ValueError, LookupError, TypeError):
            pass
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{path} names no scheduler; a scheduler writes such a file: "
                "dask scheduler --scheduler-file scheduler.json"
            )
        time.sleep(0.02)


def _direct(client: Client, options: dict[str, Any], set_as_default: bool) -> Client:
    if options:
        raise ConfigError(
            f"a Client takes no further options, got {sorted(options)}; "
            "pass them where the Client is made"
        )
    if client.asynchronous:
        raise ConfigError(
            "the Client is asynchronous; ClusterEnv is called from ordinary code: "
            "connect(Client(address))"
        )
    if client.status != "running":
        raise ConfigError(f"the Client is {client.status}; pass one that is connected")
    if client.direct_to_workers:
        return client
    return _client(
        client.scheduler.address, security=client.security, set_as_default=set_as_default
    )


def _start(
    name: str, security: Security | None, options: dict[str, Any], set_as_default: bool
) -> Client:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(_GUARD)
    if name == "local" and getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        raise ConfigError(
            "the processes of a local cluster import the script that starts it, and this one comes "
            "from standard input: save it as a file, and run that"
        )
    return _await_start(lambda: _start_client(name, security, options, set_as_default))


def _await_start(start: Callable[[], Client]) -> Client:
    """Start a cluster in another thread, and close it if the wait for it is interrupted.

    Dask cannot close a cluster whose start was interrupted, and Python raises
    ``KeyboardInterrupt`` in the main thread only. A terminal sends Ctrl-C to the whole process
    group, so the thread blocks the signal: the processes that it starts inherit this.
    """
    client: Future[Client] = Future()

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            client.set_result(start())
        except BaseException as error:
            client.set_exception(error)

    resource_tracker.ensure_running()  # whichever thread starts it has SIGINT unblocked by it
    threading.Thread(target=run, name="clusterenv-start", daemon=True).start()
    try:
        return client.result()
    except BaseException as error:
        if not (client.done() and client.exception() is error):  # the wait was interrupted
            with contextlib.suppress(Exception):
                client.result(config.seconds("timeout.workers")).close()
        raise


def _start_client(
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
                said = str(error).rstrip(".")
                raise ConfigError(f"{said}. If this is a script: {_GUARD}") from error
            raise
        undo.callback(_stop, cluster)
        _ignore_unknown_workers(cluster)
        client = _OwningClient(
            cluster,
            direct_to_workers=True,
            timeout=config.seconds("timeout.connect"),
            set_as_default=set_as_default,
        )
        client.afterwards = undo.pop_all()
    return client


def _ignore_unknown_workers(cluster: Cluster) -> None:
    """Let a cluster object outlive the news that a worker left of which it never heard.

    Dask's own would stop listening to its scheduler, and raise ``KeyError`` when it is closed.
    """
    update = cluster._update_worker_status

    def update_known(op: str, worker: Any) -> None:
        if op != "remove" or worker in cluster.scheduler_info["workers"]:
            update(op, worker)

    cluster._update_worker_status = update_known


def _stop(cluster: Cluster) -> None:
    timeout = config.seconds("timeout.close")
    try:
        cluster.close(timeout)
    except TimeoutError:
        logger.warning("%s did not close within %g s", cluster, timeout)


def starts_cluster(cluster: ClusterLike) -> bool:
    """Whether :func:`connect` would start a cluster for this argument."""
    return (
        cluster is None
        or is_cluster_file(cluster)
        or (isinstance(cluster, str) and cluster.lower() in ("local", *JOBQUEUES))
    )


def starts_empty(cluster: ClusterLike) -> bool:
    """Whether the cluster that is started has no workers until some are asked for."""
    return starts_cluster(cluster) and _what_to_start(cluster).starts_empty


def _what_to_start(cluster: ClusterLike) -> ClusterFile:
    if is_cluster_file(cluster):
        return read_cluster_file(cluster)
    return ClusterFile("local" if cluster is None else cluster.lower(), {})


def _unknown(name: str) -> str:
    known = ["local", *JOBQUEUES]
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return (
        f"cluster={name!r} is no address, no existing scheduler file and none of "
        f"{', '.join(known)}; {hint}An address looks like 'tcp://10.0.0.1:8786'."
    )


def wait_for_workers(client: Client, n: int, timeout: float) -> list[str]:
    """Wait until ``n`` workers are there and return the addresses of all.

    Workers that are jobs may be queued for long: they are waited for as long as the setting
    ``clusterenv.timeout.queue`` says, and the log tells so every minute.

    Raises
    ------
    NoWorkers
        If fewer came within ``timeout`` seconds.
    """
    jobs = hasattr(client.cluster, "job_script")
    setting = "queue" if jobs else "workers"
    if jobs:
        timeout = max(timeout, config.seconds("timeout.queue"))
    deadline = time.monotonic() + timeout
    said = time.monotonic()
    # In short turns: a client that is closed meanwhile ends the wait.
    while (left := deadline - time.monotonic()) > 0 and client.status == "running":
        try:
            client.wait_for_workers(n, timeout=min(left, _TURN_SECONDS))
        except TimeoutError:
            if jobs and time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                logger.warning(
                    "waiting for jobs: %d of %d workers are there", len(client.nthreads()), n
                )
        else:
            # scheduler_info() may show none under load; nthreads() asks the scheduler.
            return sorted(client.nthreads())
    if client.status != "running":
        raise NoWorkers(f"the client was {client.status} while {n} workers were waited for")
    found = len(client.nthreads())
    see = ". If the jobs are not queued, see why: python -m clusterenv.doctor --cluster slurm"
    hint = f"{see} (or whichever it is)" if jobs else ""
    raise NoWorkers(
        f"waited {timeout:g} s for {n} worker{'s' if n > 1 else ''} at "
        f"{client.scheduler.address}, {found} came. Start more workers, ask for fewer shards "
        f"(shards={max(found, 1)}), or wait longer: "
        f"dask.config.set({{'clusterenv.timeout.{setting}': '10 m'}}){hint}"
    )
