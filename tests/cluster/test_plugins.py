"""Lost jobs and lost local workers are replaced, within a budget."""

from __future__ import annotations

import os
import signal

import dask
import pytest
from conftest import wait_until

import clusterenv
from clusterenv.cluster.plugins import affordable, lost_jobs

JOBS = {"a": ["a-0", "a-1"], "b": ["b"]}


@pytest.mark.parametrize(
    ("present", "gone", "lost"),
    [
        ({"a-0", "a-1", "b"}, {}, []),
        (set(), {}, []),  # all are queued
        ({"a-0", "a-1"}, {"b": 80.0}, ["b"]),
        ({"a-0", "a-1"}, {"b": 90.0}, []),  # its nanny may start another
        ({"a-1", "b"}, {"a-0": 10.0}, []),  # the job runs
        ({"b"}, {"a-0": 10.0, "a-1": 95.0}, []),
        ({"b"}, {"a-0": 10.0, "a-1": 20.0}, ["a"]),
        ({"b"}, {"a-0": 10.0}, ["a"]),  # the other had not come yet
        (set(), {"a-0": 1.0, "a-1": 1.0, "b": 1.0}, ["a", "b"]),
        ({"a-0", "a-1", "b"}, {"c": 1.0}, []),  # of a job that was scaled down
    ],
)
def test_a_job_is_lost_when_all_its_workers_stay_away(
    present: set[str], gone: dict[str, float], lost: list[str]
) -> None:
    assert lost_jobs(JOBS, present, gone, now=100.0, patience=15.0) == lost


def test_jobs_that_end_again_and_again_are_not_asked_for_without_limit() -> None:
    assert affordable([], jobs=2, now=0.0) == 10
    assert affordable([float(n) for n in range(10)], jobs=2, now=100.0) == 0
    assert affordable([float(n) for n in range(10)], jobs=2, now=604.5) == 5
    assert affordable([float(n) for n in range(10)], jobs=1, now=100.0) == 0


def test_a_local_worker_that_dask_gives_up_is_started_again() -> None:
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1ms"}),  # no time to return
        clusterenv.connect("local", n_workers=1, set_as_default=False) as client,
    ):
        nannies = client.cluster.workers
        (before,) = nannies.values()
        os.kill(before.process.pid, signal.SIGKILL)
        assert wait_until(lambda: list(nannies.values()) not in ([], [before]), 30)
        assert wait_until(lambda: len(client.nthreads()) == 1, 60)
