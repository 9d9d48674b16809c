"""Starts clusters whose workers are jobs of a batch system, through dask-jobqueue."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dask
from distributed.core import Status
from distributed.deploy import SpecCluster
from distributed.security import Security

from clusterenv.cluster.plugins import ReplaceLostJobs
from clusterenv.cluster.security import LOOPBACK, NO_HTTP_ROUTES, in_files
from clusterenv.data.processes import OWN_WORKER
from clusterenv.errors import ConfigError

__all__ = ["JOBQUEUES", "job_options", "jobqueue_class", "start_jobqueue"]

JOBQUEUES = {
    "htcondor": "HTCondorCluster",
    "lsf": "LSFCluster",
    "moab": "MoabCluster",
    "oar": "OARCluster",
    "pbs": "PBSCluster",
    "sge": "SGECluster",
    "slurm": "SLURMCluster",
}

_SHARED = "~/.clusterenv"


def start_jobqueue(
    name: str,
    security: Security | None,
    options: Mapping[str, Any],
    on_close: contextlib.ExitStack,
) -> SpecCluster:
    """Start a cluster without jobs, or with as many as ``n_workers`` needs.

    Jobs that end are replaced until the cluster is closed or scaled down. The caller closes
    ``on_close`` after the cluster, which removes the files of its certificates.
    """
    cls = jobqueue_class(name)
    section = options.get("config_name") or name
    settings = dask.config.get(f"jobqueue.{section}", {})
    complete = job_options(options, settings)
    _check_size(name, complete, settings)
    if security is not None:
        shared = complete.get("shared_temp_directory") or settings.get("shared-temp-directory")
        directory = on_close.enter_context(_private_directory(shared))
        complete["security"] = in_files(security, Path(directory))
    dashboard = complete["scheduler_options"].get("dashboard", True)
    workers = complete.pop("n_workers", None)
    with dask.config.set({} if dashboard else NO_HTTP_ROUTES):
        try:
            cluster = cls(**complete)
        except (TypeError, ValueError, RuntimeError) as error:
            # dask-jobqueue appends all that it was called with.
            said = str(error).splitlines()[0].removeprefix("Cluster failed to start: ")
            said = said.split(" Very likely")[0].rstrip(".")
            raise ConfigError(
                f"cluster={name!r} cannot be started: {said}. {_describe(name)}"
            ) from error
    cluster.scheduler.add_plugin(ReplaceLostJobs(cluster))
    if workers:
        _submit(name, cluster, jobs=math.ceil(workers / complete["processes"]))
    return cluster


def _check_size(name: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` unless it is known how large a job is."""
    lacking = [
        each for each in ("cores", "memory") if not (options.get(each) or settings.get(each))
    ]
    if lacking:
        raise ConfigError(
            f"cluster={name!r} does not say the {' and the '.join(lacking)} of a job. "
            f"{_describe(name)}"
        )


def _describe(name: str) -> str:
    """Say how a batch system's jobs are described."""
    return (
        f"Describe a job in a cluster file, and name that: cluster='cluster.yaml'. For example\n\n"
        f"    cluster: {name}\n"
        "    cores: 8                # processes of a job, one for each shard\n"
        "    memory: 16GB\n"
        "    walltime: '01:00:00'\n"
    )


def _submit(name: str, cluster: SpecCluster, jobs: int) -> None:
    """Submit jobs as ``cluster.scale`` does, but raise if the batch system refuses them."""
    for _ in range(jobs):
        cluster.worker_spec.update(cluster.new_worker_spec())
    try:
        cluster.sync(cluster._correct_state)
    except BaseException as error:
        script = cluster.job_script()
        for job in cluster.workers.values():
            job.status = Status.failed  # close() asserts that no job is left open
        cluster.close()
        if isinstance(error, (OSError, RuntimeError, ValueError)):
            reason = str(error)
            if isinstance(error, FileNotFoundError):
                reason = (
                    f"the command {error.filename!r} is not on this machine; run this where jobs "
                    "are submitted, which is often a login node"
                )
            raise ConfigError(
                f"{name} took no job: {reason}\n\nThe job script:\n\n{script}"
            ) from error
        raise


def jobqueue_class(name: str) -> Callable[..., SpecCluster]:
    """Return dask-jobqueue's class for a batch system; ``ConfigError`` if it is not installed."""
    try:
        import dask_jobqueue
    except ImportError as error:
        raise ConfigError(
            f"cluster={name!r} needs dask-jobqueue: pip install 'clusterenv[hpc]'"
        ) from error
    return getattr(dask_jobqueue, JOBQUEUES[name])  # type: ignore[no-any-return]


def job_options(options: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a jobqueue cluster with defaults that suit environments.

    - Each core of a job runs one single-threaded process, for one shard.
    - Workers are marked as started here, so that shards may tune their processes.
    - What a job prints is in a file of the setting ``clusterenv.jobs.log-directory``, if that names
      a directory; ``clusterenv train`` sets it to one in the run directory.
    - Dask's HTTP servers, which do not support TLS, listen on loopback only. There is no dashboard
      unless the user names an address for it.

    The user's options take precedence over Dask's settings for the batch system, such as
    ``jobqueue.slurm``.

    >>> job_options({"cores": 4}, {})["processes"]
    4
    >>> job_options({}, {"cores": 4, "processes": 2})["processes"]
    2
    """

    def given(name: str, default: Any = None) -> Any:
        value = options.get(name)
        if value is None:
            value = settings.get(name.replace("_", "-"))
        return default if value is None else value

    scheduler = dict(given("scheduler_options", {}))
    if not scheduler.get("dashboard_address"):
        scheduler |= {"dashboard_address": LOOPBACK, "dashboard": False}
    arguments = list(given("worker_extra_args", []))
    if "--dashboard-address" not in arguments:
        arguments += ["--dashboard-address", LOOPBACK, "--no-dashboard"]
    completed = {
        **options,
        "scheduler_options": scheduler,
        "worker_extra_args": arguments,
        "job_script_prologue": [*given("job_script_prologue", []), f"export {OWN_WORKER}=1"],
    }
    logs = given("log_directory", dask.config.get("clusterenv.jobs.log-directory", None))
    if logs is not None:
        completed["log_directory"] = logs
    processes = given("processes", given("cores"))
    if processes is not None:
        # Passed even if it is a setting: dask-jobqueue counts workers by this argument alone.
        completed["processes"] = processes
    return completed


def _private_directory(shared: str | None) -> tempfile.TemporaryDirectory[str]:
    """Create a directory that all nodes can read, and no other user."""
    base = Path(os.path.expandvars(shared or _SHARED)).expanduser()
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="tls-", dir=base)
    except OSError as error:
        raise ConfigError(
            f"the certificates of the cluster cannot be written to {base}: {error}. Name a "
            "directory that all nodes see: connect(…, shared_temp_directory='/scratch/me'), or do "
            "without TLS: security=False"
        ) from error
