"""Collects the facts about a cluster that matter for environments."""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dask
import psutil
from distributed import Client
from distributed.comm import get_address_host_port

import clusterenv
from clusterenv import config
from clusterenv.cluster.connect import connect, starts_empty, wait_for_workers
from clusterenv.doctor.diagnosis import Process, Report, Route, Trial, judge
from clusterenv.errors import ClusterEnvError, NoWorkers

__all__ = ["examine"]

_PACKAGES = ("clusterenv", "gymnasium", "pyarrow", "torch")
_CALLS = 30
_BLOCK = 16 << 20
_STEPS = 50
_TAIL_LINES = 15


def examine(
    cluster: str, env: str | None = None, workers: int | None = None, timeout: float = 120
) -> Report:
    """Examine a cluster: its workers, versions, routes and speed.

    Parameters
    ----------
    cluster
        Anything that :func:`clusterenv.connect` takes.
    env
        Id of an environment to step on the workers.
    workers
        Number of workers to start, if a cluster is started.
    timeout
        Seconds to wait for workers.
    """
    report = Report(cluster)
    try:
        if workers is None and starts_empty(cluster):
            workers = 1
        options = {} if workers is None else {"n_workers": workers}
        client = connect(cluster, set_as_default=False, **options)
    except (ClusterEnvError, OSError, RuntimeError, ValueError) as error:
        return dataclasses.replace(report, failure=f"no cluster: {error}")
    with client:
        if hasattr(client.cluster, "job_script"):
            report = dataclasses.replace(report, script=client.cluster.job_script())
        try:
            with dask.config.set({"clusterenv.timeout.queue": timeout}):
                addresses = wait_for_workers(client, workers or 1, timeout)
        except NoWorkers as error:
            return dataclasses.replace(report, failure=str(error), logs=_job_logs(client))
        return _examine_workers(report, client, addresses, env)


def _examine_workers(
    report: Report, client: Client, addresses: Sequence[str], env: str | None
) -> Report:
    versions = client.get_versions(packages=list(_PACKAGES))
    report = dataclasses.replace(
        report,
        tls=client.scheduler.address.startswith("tls://"),
        head=_process("head", versions["client"]),
        scheduler=_process("scheduler", versions["scheduler"]),
        workers=tuple(_process(address, versions["workers"].get(address)) for address in addresses),
        routes=tuple(_route(client, address) for address in addresses),
    )
    if any(finding.blocking for finding in judge(report)):
        return report  # do not send code to a Python of another version
    hardware = client.run(_hardware())
    timed = [_timed(client, route) for route in report.routes]
    trial = None if env is None else _try(client, env, len(addresses))
    found = [dataclasses.replace(each, **hardware.get(each.name, {})) for each in report.workers]
    return dataclasses.replace(report, workers=tuple(found), routes=tuple(timed), trial=trial)


def _process(name: str, answer: Mapping[str, Any] | None) -> Process:
    packages = dict(answer["packages"]) if answer else {}
    if "python" in packages:
        packages["python"] = ".".join(packages["python"].split(".")[:3])
    return Process(name, packages)


def _hardware() -> Callable[..., dict[str, Any]]:
    # Nested functions are pickled by value: this one runs where clusterenv is not installed.
    def hardware(dask_worker: Any) -> dict[str, Any]:
        import os
        import socket

        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return {
            "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "cpus": cpus,
            "threads": dask_worker.state.nthreads,
        }

    return hardware


def _route(client: Client, worker: str) -> Route:
    """Connect to a worker as the head does."""
    if worker.startswith("inproc://"):
        return Route(worker)
    host, port = get_address_host_port(worker)
    try:
        with socket.create_connection((host, port), config.seconds("timeout.connect")) as sock:
            source = sock.getsockname()[0]
            if worker.startswith("tls://"):
                context = client.security.get_connection_args("client")["ssl_context"]
                context.wrap_socket(sock).close()
    except OSError as error:
        return Route(worker, error=str(error))
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == source for address in addresses):
            return Route(worker, source=source, interface=interface)
    return Route(worker, source=source)


def _echo() -> type:
    class Echo:
        def block(self, size: int) -> bytes:
            return bytes(size)

    return Echo


def _timed(client: Client, route: Route) -> Route:
    """Measure the latency and bandwidth of actor calls, which bypass the scheduler."""
    future = client.submit(_echo(), actor=True, workers=[route.worker], pure=False)
    try:
        with client.as_current():  # otherwise the actor uses Dask's default client
            actor = future.result()
        actor.block(0).result()
        calls = [_seconds(lambda: actor.block(0).result()) for _ in range(_CALLS)]
        blocks = [_seconds(lambda: actor.block(_BLOCK).result()) for _ in range(3)]
    except (OSError, RuntimeError) as error:  # the worker is lost
        return dataclasses.replace(route, error=str(error))
    finally:
        client.cancel([future], force=True)
    return dataclasses.replace(
        route, seconds=statistics.median(calls), bytes_per_second=_BLOCK / min(blocks)
    )


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _try(client: Client, env: str, workers: int) -> Trial:
    """Step an environment on every worker."""
    try:
        with clusterenv.make_vec(env, workers, shards=workers, cluster=client) as envs:
            envs.reset(seed=1)
            actions = envs.action_space.sample()
            spent = _seconds(lambda: [envs.step(actions) for _ in range(_STEPS)])
    except ClusterEnvError as error:
        return Trial(env, error=str(error))
    return Trial(env, steps_per_second=workers * _STEPS / spent)


def _job_logs(client: Client) -> dict[str, str]:
    """Return the last lines of the logs of a cluster's jobs, as far as they can be found."""
    logs: dict[str, str] = {}
    for job in getattr(client.cluster, "workers", {}).values():
        identity = getattr(job, "job_id", None)
        if identity is None:
            continue
        folder = Path(getattr(job, "log_directory", None) or ".")
        for path in sorted(folder.glob(f"*{identity}*")):
            lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
            if lines:
                logs[str(path)] = "\n".join(lines[-_TAIL_LINES:])
    return logs
