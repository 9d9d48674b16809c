"""Jobs of a real Slurm: across nodes, under TLS, cancelled in the middle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
import torch
from conftest import wait_until
from machine import NODES, Slurm, missing

import clusterenv
from clusterenv.cluster import wait_for_workers

QUICK = {"distributed.deploy.lost-worker-timeout": "2s"}


@pytest.fixture(scope="session")
def machine() -> Iterator[Slurm]:
    """Three nodes; the tests are skipped where Slurm cannot run."""
    pytest.importorskip("dask_jobqueue")
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    slurm = Slurm()
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture
def slurm(machine: Slurm) -> Iterator[Slurm]:
    """The same, without jobs before the test and with none left by it."""
    yield machine
    left = machine.jobs()
    running = {job: state for job, (state, _) in left.items() if state != "COMPLETING"}
    assert machine.clear(), machine.jobs()
    assert running == {}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """Options of a job of one process that has a node for itself."""
    return {
        "cores": 1,
        "memory": "1GB",
        "walltime": "00:10:00",
        "interface": "lo",
        "job_extra_directives": ["--exclusive"],
        "log_directory": str(tmp_path / "log"),
        "local_directory": str(tmp_path / "local"),
        "shared_temp_directory": str(tmp_path / "shared"),
    }


def test_connect_by_name_across_nodes_and_back_to_nothing(
    slurm: Slurm, job: dict[str, Any], tmp_path: Path
) -> None:
    client = clusterenv.connect("slurm", n_workers=3, **job)
    try:
        workers = wait_for_workers(client, 3, 60)
        assert all(address.startswith("tls://") for address in workers)
        nodes = client.run(lambda: os.environ["SLURMD_NODENAME"])
        assert sorted(nodes.values()) == list(NODES)
        assert len(slurm.jobs()) == 3
    finally:
        client.close()
    assert list((tmp_path / "shared").iterdir()) == []


def collecting(client: Any, **options: Any) -> clusterenv.Collector:
    policy = clusterenv.policies.Categorical(torch.nn.Linear(4, 2))
    kwargs = {"num_envs": 6, "horizon": 32, "seed": 1, "cluster": client, **options}
    return clusterenv.Collector("CartPole-v1", policy, **kwargs)


def test_a_cancelled_job_is_replaced_and_collection_goes_on(
    slurm: Slurm, job: dict[str, Any]
) -> None:
    with (
        dask.config.set(QUICK),
        clusterenv.connect("slurm", n_workers=2, **job) as client,
        collecting(client, shards=2) as collector,
    ):
        batches = iter(collector)
        assert {next(batches).shard for _ in range(8)} == {0, 1}
        first = set(slurm.jobs())
        for old in sorted(first):  # one after the other, until none of the first is left
            slurm.cancel(old)
            assert wait_until(lambda old=old: old not in slurm.jobs(), 30)  # type: ignore[misc]
            assert wait_until(lambda: len(client.nthreads()) == 2, 60), slurm.jobs()
            for _ in range(8):
                next(batches)
        assert not first & set(slurm.jobs())
        assert collector.stats().restarts >= 2
