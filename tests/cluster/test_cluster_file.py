"""A cluster file becomes options of dask-jobqueue, and what it cannot mean is refused."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

import clusterenv
from clusterenv.cluster.cluster_file import read_cluster_file
from clusterenv.cluster.connect import starts_cluster, starts_empty
from clusterenv.cluster.jobqueue import job_options
from clusterenv.errors import ConfigError

pytest.importorskip("dask_jobqueue")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def test_a_file_becomes_the_options_of_dask_jobqueue(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        cluster: slurm
        cores: 4
        memory: 8GB
        walltime: "02:00:00"
        partition: short
        log-directory: null
        directives: ["--exclusive"]
        prologue: |
          module load python
          export SDL_VIDEODRIVER=dummy
        """,
    )
    file = read_cluster_file(path)
    assert file.cluster == "slurm"
    assert file.options == {
        "cores": 4,
        "memory": "8GB",
        "walltime": "02:00:00",
        "queue": "short",
        "job_extra_directives": ["--exclusive"],
        "job_script_prologue": ["module load python", "export SDL_VIDEODRIVER=dummy"],
    }
    assert starts_cluster(path)
    assert starts_empty(path)


SCRIPTS = {
    "slurm": ["#SBATCH -p short", "#SBATCH -t 02:00:00", "#SBATCH --cpus-per-task=4"],
    "pbs": ["#PBS -q short", "#PBS -l walltime=02:00:00", "#PBS -l select=1:ncpus=4:mem=7630MB"],
    "lsf": ["#BSUB -q short", "#BSUB -W 02:00", "#BSUB -n 4"],
    "sge": ["#$ -q short", "#$ -l h_rt=02:00:00"],
    "oar": ["#OAR -q short", "#OAR -l /nodes=1/core=4,walltime=02:00:00"],
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.filterwarnings("ignore:OAR Job memory:UserWarning")
def test_each_batch_system_gets_its_job_script(name: str, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"""
        cluster: {name}
        cores: 4
        memory: 8GB
        walltime: "{"02:00" if name == "lsf" else "02:00:00"}"
        queue: short
        interface: lo
        shared_temp_directory: {tmp_path}
        prologue: ["module load python"]
        """,
    )
    with clusterenv.connect(path, set_as_default=False) as client:
        script = client.cluster.job_script()
    for line in (*SCRIPTS[name], "module load python"):
        assert line in script
    assert "--nworkers 4" in script
    assert "--nthreads 1" in script
    assert f"--tls-key {tmp_path}/tls-" in script


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster: slurm\nmemry: 1GB", "'memry' is no option of cluster 'slurm'; .* 'memory'?"),
        ("cluster: slurm\nwall-time: '1'", "did you mean 'walltime'?"),
        ("cluster: slurm\nenv_extra: []", "'env_extra' is no option"),
        ("cluster: local\nworkers: 3", "did you mean 'n_workers'?"),
        ("cluster: slurm\nqueue: a\npartition: b", "the same option; keep one"),
        ("cluster: slurm\nwalltime: 1:30:00", "walltime: 5400 is no string; use quotes"),
        ("cluster: sluurm", "says 'sluurm'; one of local, htcondor"),
        ("cores: 4", "must say which cluster, and says None"),
        ("- 1", r"must say which cluster, and says \[1\]"),
        ("cluster: [", "is no YAML"),
    ],
)
def test_what_a_file_cannot_mean_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        clusterenv.connect(path)


def test_the_file_of_the_documentation_is_a_good_one(tmp_path: Path) -> None:
    page = (Path(clusterenv.__file__).parents[1] / "docs" / "hpc.md").read_text()
    path = write(tmp_path, page.split("```yaml\n")[1].split("```")[0])
    file = read_cluster_file(path)
    assert file.options["walltime"] == "02:00:00"
    assert file.options["job_script_prologue"] == ["module load cuda"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read"):
        clusterenv.connect(tmp_path / "nowhere.yaml")


def test_a_local_cluster_from_a_file_and_what_the_call_says_comes_first(tmp_path: Path) -> None:
    path = write(tmp_path, "cluster: local\nn_workers: 3\nsecurity: false")
    with clusterenv.connect(path, n_workers=1, set_as_default=False) as client:
        assert len(client.nthreads()) == 1
        assert client.scheduler.address.startswith("tcp://")


def test_a_cluster_of_jobs_needs_a_number_of_workers(tmp_path: Path) -> None:
    path = write(tmp_path, "cluster: slurm\ncores: 1\nmemory: 1GB")
    with pytest.raises(ConfigError, match=r"has no workers yet, so say how many.*shards=4"):
        clusterenv.make_vec("CartPole-v1", 4, cluster=path)
    path = write(tmp_path, "cluster: slurm\ncores: 1\nmemory: 1GB\nn_workers: 2")
    assert not starts_empty(path)


@pytest.fixture
def no_batch_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_jobs_that_cannot_be_submitted_are_an_error_at_once(
    no_batch_system: None, tmp_path: Path
) -> None:
    path = write(
        tmp_path,
        f"cluster: slurm\ncores: 1\nmemory: 1GB\ninterface: lo\n"
        f"shared_temp_directory: {tmp_path / 'shared'}\nn_workers: 1",
    )
    with pytest.raises(ConfigError, match=r"slurm took no job: .*sbatch(.|\n)*#SBATCH -n 1"):
        clusterenv.connect(path)
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "settings", "expected"),
    [
        ({}, {}, None),
        ({"cores": 6}, {}, 6),
        ({}, {"cores": 6}, 6),
        ({"cores": 6, "processes": 2}, {}, 2),
        ({"cores": 6}, {"processes": 3}, 3),
    ],
)
def test_a_job_has_a_process_for_each_core_unless_told_otherwise(
    options: dict[str, Any], settings: dict[str, Any], expected: int | None
) -> None:
    assert job_options(options, settings).get("processes") == expected


def test_http_stays_on_loopback_unless_told_otherwise() -> None:
    ours = job_options({}, {})
    assert ours["scheduler_options"] == {"dashboard_address": "127.0.0.1:0", "dashboard": False}
    assert ours["worker_extra_args"] == ["--dashboard-address", "127.0.0.1:0", "--no-dashboard"]
    theirs = job_options(
        {"scheduler_options": {"dashboard_address": ":8787"}},
        {"worker-extra-args": ["--dashboard-address", ":0"]},
    )
    assert theirs["scheduler_options"] == {"dashboard_address": ":8787"}
    assert theirs["worker_extra_args"] == ["--dashboard-address", ":0"]
