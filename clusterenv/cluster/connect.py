"""Connects to a Dask cluster, however it is named, and waits for its workers."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, TypeAlias

from dask.utils import parse_timedelta
from distributed import Client
from distributed.deploy import Cluster
from distributed.security import Security

from clusterenv import config
from clusterenv.cluster.cluster_file import ClusterFile, is_cluster_file, read_cluster_file
from clusterenv.cluster.jobqueue import JOBQUEUES
from clusterenv.cluster.security import choose_security
from clusterenv.cluster.start import start
from clusterenv.errors import ConfigError, NoWorkers

__all__ = ["ClusterLike", "connect", "starts_cluster", "starts_empty", "wait_for_workers"]

logger = logging.getLogger("clusterenv")

ClusterLike: TypeAlias = Any  # str | PathLike | Client | Cluster | None; distributed is untyped
"""Anything that :func:`connect` takes."""

_POLL_SECONDS = 2.0
_LOG_SECONDS = 60.0
_QUIET_SECONDS = 2.0  # without an answer, before a wait is logged
_WRITE_SECONDS = 0.5  # for a scheduler to finish writing its file


def connect(
    cluster: ClusterLike = None,
    *,
    security: Security | bool | None = None,
    set_as_default: bool = True,
    **options: Any,
) -> Client:
    """Connect to a Dask cluster, or start one.

    Parameters
    ----------
    cluster
        - ``None`` or ``"local"``: start a ``LocalCluster``, one single-threaded process
          per core. ``close()`` of the returned client stops it.
        - ``"tcp://…"`` or ``"tls://…"``: the address of a running scheduler.
        - The path of a scheduler file.
        - A ``distributed.Client``: returned as it is if it talks to workers directly,
          otherwise a second client of the same scheduler is made.
        - Any Dask cluster object (``SLURMCluster``, ``KubeCluster``, …): it stays open
          when the returned client is closed.
        - The name of a dask-jobqueue class (``"slurm"``, ``"pbs"``, …), configured
          through Dask's own configuration. ``close()`` of the client ends its jobs.
        - The path of a cluster file (``"cluster.yaml"``), which describes a cluster to start.
    security
        A cluster that is started uses TLS, with temporary certificates of its own. ``False``
        turns this off, and so does the setting ``clusterenv.security``. Pass your own certificates
        as a ``distributed.security.Security``. A running cluster that uses TLS needs one, unless
        Dask's configuration names the certificates.
    set_as_default
        Whether Dask's own collections use this client too.
    **options
        Passed to the cluster that is started, otherwise to ``distributed.Client``.

    Returns
    -------
    distributed.Client
        With ``direct_to_workers=True``: the results of actors bypass the scheduler.

    Raises
    ------
    ConfigError
        If there is no such cluster, or it cannot be reached or started.

    Examples
    --------
    >>> client = connect("local", n_workers=1)
    >>> len(client.nthreads())
    1
    >>> client.close()
    """
    if starts_cluster(cluster):
        wanted = _to_start(cluster)
        options = {**wanted.options, **options}
        in_file = options.pop("security", None)
        chosen = choose_security(in_file if security is None else security)
        return start(wanted.cluster, chosen, options, set_as_default)
    if isinstance(security, bool) and not isinstance(cluster, Client):
        raise ConfigError(
            f"security={security} is for clusters that are started here; a running one has its "
            "certificates already: connect(address, security=Security(tls_ca_file='ca.pem', …))"
        )
    if security is not None:
        options["security"] = security
    if isinstance(cluster, Client):
        return _direct(cluster, options, set_as_default)
    if isinstance(cluster, Cluster) or (isinstance(cluster, str) and "://" in cluster):
        return _client(cluster, set_as_default=set_as_default, **options)
    if isinstance(cluster, (str, os.PathLike)):
        path = Path(cluster)
        try:
            exists = path.is_file()
        except OSError:  # the name is too long
            exists = False
        if exists:
            _check_scheduler_file(path)
            return _client(scheduler_file=str(path), set_as_default=set_as_default, **options)
        known = ["local", *JOBQUEUES]
        close = difflib.get_close_matches(str(cluster).lower(), known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"cluster={str(cluster)!r} is no address, no existing scheduler file and none of "
            f"{', '.join(known)}; {hint}An address looks like 'tcp://10.0.0.1:8786'."
        )
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
    named = address or options.get("scheduler_file")
    seconds = parse_timedelta(options["timeout"])
    notice = threading.Timer(
        _QUIET_SECONDS,
        logger.warning,
        ("no answer yet from the scheduler at %s; trying for %g s", named, seconds),
    )
    notice.daemon = True
    notice.start()
    client = Client.__new__(Client)  # a name for what has to be closed if it cannot be made
    # Dask bounds its attempts to connect, but not the wait for the first words of what answers.
    client.start = functools.partial(Client.start, client, callback_timeout=seconds + 1)
    try:
        client.__init__(address, **{**options, "direct_to_workers": True})
        return client
    except (OSError, MemoryError) as error:
        if client.status not in ("closed", "newly-created"):
            with contextlib.suppress(TimeoutError):
                client.close(timeout=1)
            client.status = "closed"  # or it would wait for a minute when it is collected
        # Of other words than a scheduler's, the first are read as a length.
        reason = "another kind of server is there" if isinstance(error, MemoryError) else error
        raise ConfigError(
            f"no scheduler answers at {named} ({reason}): is the scheduler running, is this the "
            "address in its log, which is not that of its dashboard (port 8787), and does it speak "
            "TLS (tls://…) or not (tcp://…)?"
        ) from error
    finally:
        notice.cancel()


def _check_scheduler_file(path: Path) -> None:
    """Raise unless a file names a scheduler; wait a moment in case it is being written."""
    deadline = time.monotonic() + _WRITE_SECONDS
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


def starts_cluster(cluster: ClusterLike) -> bool:
    """Whether :func:`connect` would start a cluster for this argument."""
    return (
        cluster is None
        or is_cluster_file(cluster)
        or (isinstance(cluster, str) and cluster.lower() in ("local", *JOBQUEUES))
    )


def starts_empty(cluster: ClusterLike) -> bool:
    """Whether :func:`connect` would start a cluster without workers."""
    if not starts_cluster(cluster):
        return False
    wanted = _to_start(cluster)
    return wanted.cluster != "local" and not wanted.options.get("n_workers")


def _to_start(cluster: ClusterLike) -> ClusterFile:
    if is_cluster_file(cluster):
        return read_cluster_file(cluster)
    return ClusterFile("local" if cluster is None else cluster.lower(), {})


def wait_for_workers(client: Client, n: int, timeout: float) -> list[str]:
    """Wait until ``n`` workers are connected, and return the addresses of all workers.

    Raises ``NoWorkers`` if fewer workers connected within ``timeout`` seconds. Jobs of a batch
    system may be queued for long: the wait for them ends after the setting
    ``clusterenv.timeout.queue``, and is logged every minute.
    """
    jobs = hasattr(client.cluster, "job_script")
    setting = "queue" if jobs else "workers"
    if jobs:
        timeout = max(timeout, config.seconds("timeout.queue"))
    deadline = time.monotonic() + timeout
    logged = time.monotonic()
    # Poll, so that closing the client ends the wait.
    while (left := deadline - time.monotonic()) > 0 and client.status == "running":
        try:
            client.wait_for_workers(n, timeout=min(left, _POLL_SECONDS))
        except TimeoutError:
            if jobs and time.monotonic() - logged > _LOG_SECONDS:
                logged = time.monotonic()
                logger.warning(
                    "waiting for jobs: %d of %d workers are connected", len(client.nthreads()), n
                )
        else:
            # Under load scheduler_info() may be outdated; nthreads() asks the scheduler.
            return sorted(client.nthreads())
    if client.status != "running":
        raise NoWorkers(f"the client was {client.status} while waiting for {n} workers")
    found = len(client.nthreads())
    see = ". If no jobs are queued, clusterenv doctor --cluster slurm (or another) shows why"
    raise NoWorkers(
        f"waited {timeout:g} s for {n} worker{'s' if n > 1 else ''} at "
        f"{client.scheduler.address}, {found} came. Start more workers, ask for fewer shards "
        f"(shards={max(found, 1)}), or wait longer: "
        f"dask.config.set({{'clusterenv.timeout.{setting}': '10 m'}}){see if jobs else ''}"
    )
