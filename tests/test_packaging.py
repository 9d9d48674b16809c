"""What is installed from a wheel is whole, and the lists of packages agree with each other."""

from __future__ import annotations

import email
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a wheel and a source distribution, made of copies of the sources."""
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__")
    for package in ("clusterenv", "pipelines"):
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    out = tmp_path_factory.mktemp("dist")
    # As `make dist` does, with the setuptools that is here: the network is not needed.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_wheel_and_source_hold_every_file_of_the_packages(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    (source,) = dist.glob("*.tar.gz")
    tracked = [
        str(path.relative_to(ROOT))
        for package in ("clusterenv", "pipelines")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix in (".py", ".yaml", ".typed")
    ]
    assert {"clusterenv/clusterenv.yaml", "clusterenv/py.typed"} <= set(tracked)
    with zipfile.ZipFile(wheel) as archive:
        assert set(tracked) <= set(archive.namelist())
        assert not [name for name in archive.namelist() if name.startswith(("tests", "benchmarks"))]
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*tracked, "LICENSE", "README.md", "pyproject.toml"} <= names


def test_the_metadata_tell_an_index_what_it_shows(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_string(archive.read(name).decode())
    for field in ("Summary", "Author", "License-Expression", "Requires-Python", "Keywords"):
        assert metadata[field], field
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    classifiers = metadata.get_all("Classifier") or []
    assert "Operating System :: POSIX :: Linux" in classifiers
    assert set(PROJECT["optional-dependencies"]) == set(metadata.get_all("Provides-Extra") or [])


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an empty environment in which the wheel was installed with extras.

    Its dependencies are those that are installed here, by links: nothing is downloaded. The
    editable install of the clone is not among them.
    """
    home = tmp_path_factory.mktemp("installed")
    dependencies = home / "dependencies"
    dependencies.mkdir()
    for path in map(Path, {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        for entry in path.iterdir():
            if "clusterenv" not in entry.name.lower() and entry.suffix != ".pth":
                (dependencies / entry.name).symlink_to(entry)
    venv.create(home / "venv", with_pip=False, symlinks=True)
    (site,) = (home / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    (wheel,) = dist.glob("*.whl")
    python = str(home / "venv" / "bin" / "python")
    # pip of this environment, which sees the extras' requirements or fails.
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--quiet"]
    done = subprocess.run(
        [*command, f"clusterenv[hpc,train] @ {wheel.as_uri()}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return home / "venv" / "bin"


def outside(command: list[str], cwd: Path) -> str:
    """Run a command outside the clone; return what it prints."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_installed_wheel_is_the_one_that_is_imported(installed: Path, tmp_path: Path) -> None:
    script = "import clusterenv, pipelines; print(clusterenv.__file__, pipelines.__file__)"
    for file in outside([str(installed / "python"), "-c", script], tmp_path).split():
        assert installed.parent in Path(file).parents
    version = outside([str(installed / "clusterenv"), "--version"], tmp_path)
    script = "import importlib.metadata as m; print(m.version('clusterenv'))"
    assert version == outside([str(installed / "python"), "-c", script], tmp_path)


def test_the_quickstart_runs_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    script = shutil.copy(ROOT / "examples" / "quickstart.py", tmp_path)
    words = [script, "--num-envs", "2", "--seconds", "0.2"]
    assert "CartPole-v1" in outside([str(installed / "python"), *words], tmp_path)


def test_a_short_training_runs_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    few = "--total-steps 256 --num-envs 4 --horizon 32 --shards 1 --epochs 1 --out run"
    words = ["train", "ppo", "--env", "CartPole-v1", *few.split()]
    assert "go on" in outside([str(installed / "clusterenv"), *words], tmp_path)
    assert (tmp_path / "run" / "curve.png").is_file()


def test_the_doctor_runs_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    words = ["doctor", "--workers", "1", "--env", "CartPole-v1"]
    assert outside([str(installed / "clusterenv"), *words], tmp_path).endswith("ready\n")


CONDA = {"matplotlib-base": "matplotlib", "pytorch-cpu": "torch", "pytorch": "torch"}
"""Names that conda-forge has for what is another package of the index."""


def test_the_conda_environment_names_the_versions_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"].values()
    wanted = [Requirement(each) for each in itertools.chain(PROJECT["dependencies"], *extras)]
    ours = {canonicalize_name(each.name): each.specifier for each in wanted if each.specifier}
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = [Requirement(each) for each in listed if isinstance(each, str) and each != "pip"]
    theirs = {canonicalize_name(CONDA.get(each.name, each.name)): each.specifier for each in conda}
    assert str(theirs.pop("python")) == PROJECT["requires-python"]
    assert theirs == {name: ours.get(name) for name in theirs}
    needed = {canonicalize_name(Requirement(each).name) for each in PROJECT["dependencies"]}
    assert needed <= theirs.keys()
    (pip,) = (each["pip"] for each in listed if isinstance(each, dict))
    assert pip == ["--editable .[dev]"]
