"""Jobs of a real Slurm: across nodes, under TLS, cancelled in the middle."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
import yaml
from conftest import wait_until
from machine import NODES, Slurm, missing

import clusterenv
from clusterenv import doctor
from clusterenv.cluster.connect import wait_for_workers
from clusterenv.errors import ConfigError
from pipelines.dqn import DQN
from pipelines.experiment import run
from pipelines.ppo import PPO


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


def test_what_slurm_says_to_a_job_that_it_refuses_is_told(
    slurm: Slurm, job: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"slurm took no job: (.|\n)*invalid partition"):
        clusterenv.connect("slurm", n_workers=2, queue="nowhere", **job)
    assert list((tmp_path / "shared").iterdir()) == []


def collecting(client: Any, **options: Any) -> clusterenv.Collector:
    policy = clusterenv.policies.Categorical(torch.nn.Linear(4, 2))
    kwargs = {"num_envs": 6, "horizon": 32, "seed": 1, "cluster": client, **options}
    return clusterenv.Collector("CartPole-v1", policy, **kwargs)


def test_a_cancelled_job_is_replaced_and_collection_goes_on_there(
    slurm: Slurm, job: dict[str, Any]
) -> None:
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "2s"}),
        clusterenv.connect("slurm", n_workers=2, **job) as client,
        collecting(client, shards=2) as collector,
    ):
        batches = iter(collector)
        delivered: set[int] = set()
        while delivered != {0, 1}:
            delivered.add(next(batches).shard)
        before = client.nthreads().keys()
        one, other = slurm.jobs()
        slurm.cancel(one)
        # Both shards go on in the job that is left, until there are two jobs again.
        while not client.nthreads().keys() - before:
            next(batches)
        (new,) = slurm.jobs().keys() - {one, other}
        # Then the replacement is all that is left, so both shards go on there.
        slurm.cancel(other)
        going_on: set[int] = set()
        while going_on != {0, 1}:
            batch = next(batches)
            shard = collector.shards[batch.shard]
            # What is queued may be of a shard that had gone to the other job.
            if shard.worker not in {None, *before} and batch.incarnation == shard.incarnation:
                going_on.add(batch.shard)
        assert slurm.jobs()[new][0] == "RUNNING"


def test_a_job_of_several_processes_is_replaced_as_a_whole(
    slurm: Slurm, job: dict[str, Any]
) -> None:
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "2s"}),
        clusterenv.connect("slurm", n_workers=2, **{**job, "cores": 2}) as client,
    ):
        before = set(wait_for_workers(client, 2, 60))
        (old,) = slurm.jobs()
        slurm.cancel(old)
        assert wait_until(lambda: not before & set(client.nthreads()), 30)
        after = set(wait_for_workers(client, 2, 60))
        assert len(after) == 2
        assert list(slurm.jobs()) != [old]


def test_a_shard_leaves_before_the_walltime_of_its_job_ends(
    slurm: Slurm, job: dict[str, Any]
) -> None:
    with (
        dask.config.set({"clusterenv.timeout.leave": "105s"}),
        clusterenv.connect("slurm", n_workers=1, **{**job, "walltime": "00:02:00"}) as client,
        collecting(client, shards=1) as collector,
    ):
        (first,) = client.nthreads()
        client.cluster.scale(jobs=2)  # that job ends later
        step: dict[int, int] = {}
        for batch in collector:
            if batch.incarnation == 0:
                assert batch["step"][0].tolist() == [step.get(env, 0) for env in range(6)]
                over = batch["terminated"][-1] | batch["truncated"][-1]
                following = np.where(over, 0, batch["step"][-1] + 1)
                step = dict(enumerate(following.tolist()))
            else:
                break  # of the shard elsewhere
        assert first in client.nthreads()  # it was not lost
        assert [shard.worker for shard in collector.shards] != [first]
        stats = collector.stats()
        assert (stats.moves, stats.restarts, stats.lost_rows) == (1, 0, 0)
        assert [state for state, _ in slurm.jobs().values()] == ["RUNNING"] * 2


@pytest.fixture
def file(job: dict[str, Any], tmp_path: Path) -> str:
    """A cluster file of such jobs."""
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"cluster": "slurm", **job}))
    return str(path)


def test_ppo_learns_across_nodes_from_a_cluster_file(
    slurm: Slurm, file: str, tmp_path: Path
) -> None:
    out = tmp_path / "ppo"
    args = PPO.preset("CartPole-v1", total_steps=1024, num_envs=8, horizon=64, shards=2, epochs=1)
    args = dataclasses.replace(args, sync="every-version")  # so that weights travel
    result = run(PPO, dataclasses.replace(args, cluster=file, out=out, quiet=True))
    assert result.steps == 1024
    assert result.pulls > 0
    assert list(out.glob("learner-*.pt"))


def test_what_jobs_print_is_in_the_run_directory(
    slurm: Slurm, job: dict[str, Any], tmp_path: Path
) -> None:
    path, out = tmp_path / "cluster.yaml", tmp_path / "ppo"
    silent = {name: value for name, value in job.items() if name != "log_directory"}
    path.write_text(yaml.safe_dump({"cluster": "slurm", **silent}))
    args = PPO.preset("CartPole-v1", total_steps=256, num_envs=4, horizon=32, shards=1, epochs=1)
    run(PPO, dataclasses.replace(args, cluster=str(path), out=out, quiet=True))
    (printed,) = (out / "jobs").glob("*.err")
    assert "distributed.nanny" in printed.read_text()


def test_dqn_learns_across_nodes_from_a_cluster_file(
    slurm: Slurm, file: str, tmp_path: Path
) -> None:
    args = DQN.preset("CartPole-v1", total_steps=1_000, min_rows=400, num_envs=4, shards=2)
    result = run(DQN, dataclasses.replace(args, cluster=file, out=tmp_path / "dqn", quiet=True))
    assert result.steps >= 1_000
    assert clusterenv.open_dataset(tmp_path / "dqn" / "replay").count_rows() > 0


@pytest.mark.parametrize("name", ["train ppo", "train dqn", "collect"])
def test_sigterm_while_jobs_are_queued_cancels_them_and_ends_the_run(
    slurm: Slurm, job: dict[str, Any], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "cluster.yaml"
    queued = {**job, "job_extra_directives": ["--begin=now+1hour"]}
    path.write_text(yaml.safe_dump({"cluster": "slurm", **queued}))
    out = ("--out", str(tmp_path / "out"), "--env", "CartPole-v1")
    command = [sys.executable, "-m", "pipelines.cli", *name.split(), *out, "--cluster", str(path)]
    process = subprocess.Popen(
        [*command, "--shards", "2"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert wait_until(lambda: list(slurm.jobs().values()) == [("PENDING", "")] * 2, 60)
        process.terminate()
        said, complaints = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert slurm.jobs() == {}
    assert "stopping" not in said
    assert complaints == (
        f"clusterenv {name}: stopped by SIGTERM while workers started; the jobs and processes "
        "that it had asked for are ended\n"
    )
    assert process.returncode == 130
    assert list((tmp_path / "shared").iterdir()) == []


def test_the_doctor_shows_the_job_script_and_the_route(
    slurm: Slurm, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["--cluster", file, "--env", "CartPole-v1"]) == 0
    said = capsys.readouterr().out
    assert "    #SBATCH --exclusive" in said
    assert "(lo) to tls://127.0.0.1:" in said
    assert said.endswith("ready\n")


def test_the_example_runs_on_jobs(slurm: Slurm, file: str) -> None:
    script = Path(__file__).parents[2] / "examples" / "slurm.py"
    done = subprocess.run(
        [sys.executable, str(script), "--cluster", file, "--shards", "2", "--rows", "3000"],
        cwd=script.parents[1],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --exclusive" in done.stdout
    assert re.search(r"^    1 +[\d,]+ +[\d,]+$", done.stdout, re.MULTILINE)
    assert "2 workers on" in done.stdout


def test_the_doctor_shows_why_a_job_failed(
    slurm: Slurm, job: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    broken = {"cluster": "slurm", **job, "prologue": ["module load nothing", "exit 1"]}
    path.write_text(yaml.safe_dump(broken))
    assert doctor.main(["--cluster", str(path), "--timeout", "15"]) == 1
    said = capsys.readouterr().out
    assert "module: command not found" in said
    assert "the prologue calls a command that the nodes do not have" in said
    assert said.endswith("not ready\n")
