"""Scheduler plugins: protect workers that hold a shard, and replace lost jobs and workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import dask
from dask.utils import parse_timedelta
from distributed import Client, Scheduler, SchedulerPlugin
from distributed.core import Status
from distributed.deploy import SpecCluster

__all__ = ["ReplaceLostJobs", "ReplaceLostWorkers", "affordable", "lost_jobs", "protect_shards"]

logger = logging.getLogger("clusterenv")

_WINDOW = 600.0
_PER_JOB = 5  # replacements within the window
_RETRY_SECONDS = 60.0
_CLOSE_SECONDS = 0.5  # that Dask takes to close the nanny of a lost worker


class ProtectShards(SchedulerPlugin):  # type: ignore[misc]  # distributed is untyped
    """Lets ``cluster.adapt(...)`` close only workers without actors.

    Without it Dask closes workers that hold actors too, and the actors are lost.
    """

    name = "clusterenv-protect-shards"
    idempotent = True

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
        return [worker for worker in workers if not worker.actors]


def protect_shards(client: Client) -> None:
    """Register :class:`ProtectShards` with the cluster's scheduler."""
    try:
        client.register_plugin(ProtectShards())
    except Exception as error:  # a scheduler without this package cannot import the plugin
        logger.warning(
            "the scheduler does not protect workers with shards from adaptive scaling: %s. "
            "Install clusterenv where the scheduler runs, or do not call cluster.adapt()",
            error,
        )


def lost_jobs(
    jobs: Mapping[str, Collection[str]],
    present: Collection[str],
    gone: Mapping[str, float],
    now: float,
    patience: float,
) -> list[str]:
    """Return the jobs that have ended, judged by their workers.

    A job that is still queued has had no worker yet, and a worker that its nanny restarts is back
    soon: neither job is lost. ``jobs`` and ``present`` name workers, ``gone`` says when each
    disconnected, and a worker that is gone for ``patience`` seconds will not return.

    >>> jobs = {"a": ["a-0", "a-1"], "b": ["b-0", "b-1"], "queued": ["q-0", "q-1"]}
    >>> gone = {"a-0": 10.0, "b-0": 10.0, "b-1": 11.0}
    >>> lost_jobs(jobs, present={"a-1"}, gone=gone, now=30.0, patience=15.0)
    ['b']
    """
    return [
        job
        for job, workers in jobs.items()
        if any(worker in gone for worker in workers)
        and not any(worker in present for worker in workers)
        and all(now - gone[worker] >= patience for worker in workers if worker in gone)
    ]


def affordable(replaced: Sequence[float], jobs: int, now: float) -> int:
    """Return how many more jobs may be replaced, after those at the times of ``replaced``.

    5 per job of the cluster in 10 minutes are allowed.

    >>> affordable([0.0, 500.0, 600.0, 650.0], jobs=1, now=700.0)
    2
    """
    return max(0, _PER_JOB * jobs - sum(now - then < _WINDOW for then in replaced))


class ReplaceLostJobs(SchedulerPlugin):  # type: ignore[misc]  # distributed is untyped
    """Replaces lost jobs of a jobqueue cluster whose scheduler runs in this process.

    A job whose workers are gone for ``distributed.deploy.lost-worker-timeout`` is cancelled, in
    case it only hangs, and another one is submitted.
    """

    name = "clusterenv-replace-lost-jobs"

    def __init__(self, cluster: SpecCluster) -> None:
        self._cluster = cluster
        self._patience = parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout"))
        self._names: dict[str, str] = {}
        self._gone: dict[str, float] = {}
        self._replacing: set[asyncio.Task[None]] = set()
        self._replaced: list[float] = []

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        name = str(scheduler.workers[worker].name)
        self._names[worker] = name
        self._gone.pop(name, None)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        name = self._names.pop(worker, None)
        if name is not None:
            self._gone[name] = time.monotonic()
            asyncio.get_running_loop().call_later(self._patience, self._check)

    def _check(self) -> None:
        if self._cluster.status != Status.running:
            return
        jobs = {
            str(name): [f"{name}{suffix}" for suffix in spec.get("group", [""])]
            for name, spec in self._cluster.worker_spec.items()
        }
        present, now = set(self._names.values()), time.monotonic()
        lost = lost_jobs(jobs, present, self._gone, now, self._patience)
        allowed = affordable(self._replaced, len(jobs), now)
        if len(lost) > allowed:
            logger.error(
                "%d jobs ended, after %d had been replaced within 10 minutes: waiting before more "
                "are submitted. The logs of the jobs show why they end, and so does "
                "clusterenv doctor --cluster …",
                len(lost),
                len(self._replaced),
            )
            asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._check)
            lost = lost[:allowed]
        if lost:
            self._replaced = [then for then in self._replaced if now - then < _WINDOW]
            self._replaced += [now] * len(lost)
            for job in lost:
                for worker in jobs[job]:
                    self._gone.pop(worker, None)
            task = asyncio.ensure_future(self._replace(lost))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _replace(self, lost: list[str]) -> None:
        wanted = len(self._cluster.worker_spec)
        logger.warning("%s ended; submitting as many jobs again.", ", ".join(lost))
        try:
            await self._cluster.scale_down(lost)
            self._cluster.scale(jobs=wanted)
        except Exception:
            logger.exception("no job could be submitted to replace %s", ", ".join(lost))


class ReplaceLostWorkers(SchedulerPlugin):  # type: ignore[misc]  # distributed is untyped
    """Replaces lost workers of a local cluster, whose scheduler runs in this process.

    If a worker is gone for ``distributed.deploy.lost-worker-timeout``, Dask closes the nanny that
    would restart it. On a busy machine every kill may end so, until no worker is left.
    """

    name = "clusterenv-replace-lost-workers"

    def __init__(self, cluster: SpecCluster) -> None:
        self._cluster = cluster

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        patience = parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout"))
        asyncio.get_running_loop().call_later(patience + _CLOSE_SECONDS, self._check)

    def _check(self) -> None:
        cluster = self._cluster
        lost = cluster.worker_spec.keys() - cluster.workers.keys()
        if cluster.status == Status.running and lost:
            logger.warning("%d workers were lost; starting others.", len(lost))
            cluster.scale(len(cluster.worker_spec))
