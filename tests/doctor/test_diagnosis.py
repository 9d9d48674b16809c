"""What follows from what the doctor has found out."""

from __future__ import annotations

import dataclasses

import pytest

from clusterenv.doctor.diagnosis import Process, Report, Route, Trial, judge

VERSIONS = {"python": "3.11.7", "distributed": "2026.8.0", "torch": "2.13.0", "envpool": None}
WORKER = Process("tls://10.0.0.7:4000", VERSIONS, host="n1", cpus=2, threads=1)
GOOD = Report(
    "slurm",
    tls=True,
    head=Process("head", VERSIONS),
    scheduler=Process("scheduler", VERSIONS),
    workers=(WORKER,),
    routes=(Route(WORKER.name, source="10.0.0.5", seconds=1e-3, bytes_per_second=1e9),),
    trial=Trial("CartPole-v1", steps_per_second=1e4),
)


def with_worker(**versions: str | None) -> Report:
    worker = dataclasses.replace(WORKER, versions={**VERSIONS, **versions})
    return dataclasses.replace(GOOD, workers=(worker,))


def test_a_good_cluster_leaves_nothing_to_say() -> None:
    assert judge(GOOD) == []


@pytest.mark.parametrize(
    ("report", "text", "blocking"),
    [
        (with_worker(python="3.12.1"), "python is 3.11.7 at the head and 3.12.1 on tls", True),
        (with_worker(torch="2.12.0"), "torch is 2.13.0 at the head and 2.12.0 on", True),
        (with_worker(torch="2.13.1"), "torch is 2.13.0 at the head and 2.13.1 on", False),
        (with_worker(torch=None), "torch 2.13.0 is not installed on tls://10.0.0.7:4000", True),
        (
            dataclasses.replace(
                GOOD, scheduler=Process("scheduler", {**VERSIONS, "distributed": "2026.7.0"})
            ),
            "distributed is 2026.8.0 at the head and 2026.7.0 on scheduler",
            True,
        ),
        (
            dataclasses.replace(GOOD, routes=(Route(WORKER.name, error="timed out"),)),
            "the head cannot reach tls://10.0.0.7:4000: timed out",
            True,
        ),
        (
            dataclasses.replace(GOOD, routes=(Route(WORKER.name, seconds=0.05),)),
            "takes 50 ms",
            False,
        ),
        (
            dataclasses.replace(
                GOOD, routes=(Route(WORKER.name, seconds=1e-3, bytes_per_second=1e7),)
            ),
            "10 MB/s from tls",
            False,
        ),
        (
            dataclasses.replace(GOOD, trial=Trial("Doom-v1", error="No module named 'doom'")),
            "Doom-v1 does not run on the workers: No module named 'doom'",
            True,
        ),
        (dataclasses.replace(GOOD, tls=False), "plain TCP", False),
        (dataclasses.replace(GOOD, workers=(WORKER,) * 3), "3 workers on n1 share 2 CPUs", False),
        (Report("slurm", failure="no worker came"), "no worker came", True),
        (
            Report("slurm", failure="no worker came", logs={"a": "No module named 'dask'"}),
            "no worker came. The log of a job says 'No module named': install",
            True,
        ),
        (
            Report("slurm", failure="no worker came", logs={"a": "module: command not found"}),
            "the prologue calls a command that the nodes do not have",
            True,
        ),
        (
            Report("slurm", failure="no worker came", logs={"a": "2 oom_kill events in StepId=7"}),
            "the job ran out of memory: raise memory",
            True,
        ),
    ],
)
def test_each_fault_is_named_with_what_to_change(report: Report, text: str, blocking: bool) -> None:
    (finding,) = judge(report)
    assert text in finding.text
    assert finding.blocking is blocking


def test_the_scheduler_needs_no_packages_of_environments() -> None:
    bare = Process("scheduler", {**VERSIONS, "torch": None})
    assert judge(dataclasses.replace(GOOD, scheduler=bare)) == []


def test_many_workers_with_one_fault_make_one_finding() -> None:
    workers = tuple(
        dataclasses.replace(
            WORKER, name=f"w{i}", host=f"n{i}", versions={**VERSIONS, "torch": None}
        )
        for i in range(4)
    )
    (finding,) = judge(dataclasses.replace(GOOD, workers=workers))
    assert "on w0 and 3 more" in finding.text
