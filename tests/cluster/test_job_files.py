"""Where the jobs of a batch system print: into the run directory, unless the user names another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import pytest

import clusterenv
from clusterenv.cluster.jobqueue import job_options
from clusterenv.errors import ConfigError
from pipelines.experiment.jobs import job_files

pytest.importorskip("dask_jobqueue")
JOB: dict[str, Any] = {"cores": 1, "memory": "1GB", "interface": "lo", "security": False}


def script(**options: Any) -> str:
    """Return the job script of a cluster that has no jobs: no batch system is needed."""
    with clusterenv.connect("slurm", **JOB, **options) as client:
        return str(client.cluster.job_script())


def test_jobs_of_a_run_print_into_its_directory(tmp_path: Path) -> None:
    with job_files(tmp_path / "run"):
        said = script()
    logs = tmp_path / "run" / "jobs"
    assert f"#SBATCH -o {logs}/dask-worker-%J.out" in said
    assert f"#SBATCH -e {logs}/dask-worker-%J.err" in said
    assert logs.is_dir()  # Slurm makes no directory
    assert str(logs) not in script()


def test_what_the_user_says_comes_first(tmp_path: Path) -> None:
    mine = str(tmp_path / "mine")
    with job_files(tmp_path / "run"):
        assert f"-o {mine}/dask-worker-%J.out" in script(log_directory=mine)
        assert job_options({}, {"log-directory": mine})["log_directory"] == mine
    with (
        dask.config.set({"clusterenv.jobs.log-directory": mine}),
        job_files(tmp_path / "run"),
    ):
        assert f"-o {mine}/dask-worker-%J.out" in script()


def test_what_dask_jobqueue_does_not_take_is_told_with_a_cluster_file() -> None:
    with pytest.raises(ConfigError, match=r"cannot be started: .*'eth99' is not a valid network"):
        clusterenv.connect("slurm", **{**JOB, "interface": "eth99"})
    with pytest.raises(ConfigError, match="not say the memory of a job") as refusal:
        clusterenv.connect("pbs", cores=4)
    assert "    cluster: pbs\n    cores: 8" in str(refusal.value)
    with pytest.raises(ConfigError, match="took no job: the command 'qsub' is not on this machine"):
        clusterenv.connect("pbs", n_workers=1, **JOB)
