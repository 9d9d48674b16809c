"""The code is clean by its own rules."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]],
    ids=["ruff check", "ruff format", "mypy"],
)
@pytest.mark.timeout(300)  # mypy reads all of torch the first time
def test_checker(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


FORBIDDEN = {
    "clusterenv": {"pipelines"},
    "clusterenv/envs": {"dask", "distributed", "torch", "clusterenv.cluster", "clusterenv.fleet"},
    "clusterenv/schema.py": {"dask", "distributed", "clusterenv.policy"},
    "clusterenv/infos.py": {"dask", "distributed"},
    "clusterenv/env_loop": {"dask", "distributed", "clusterenv.channel", "clusterenv.fleet"},
    "clusterenv/policies": {"dask", "distributed", "clusterenv.store", "clusterenv.envs"},
    "clusterenv/sync": {
        "dask",
        "distributed",
        "clusterenv.store",
        "clusterenv.envs",
        "clusterenv.stream",
    },
    "clusterenv/store": {"dask", "distributed", "clusterenv.fleet"},
    "clusterenv/cluster.py": {"clusterenv.envs", "clusterenv.vector", "gymnasium"},
    "clusterenv/local_cluster.py": {"clusterenv.envs", "clusterenv.cluster", "gymnasium"},
    "clusterenv/jobqueue.py": {"clusterenv.envs", "clusterenv.cluster", "gymnasium"},
    "clusterenv/replacement.py": {"clusterenv.fleet", "clusterenv.cluster", "gymnasium"},
    "clusterenv/diagnosis.py": {"dask", "distributed", "psutil"},
}


@pytest.mark.parametrize("part", FORBIDDEN)
def test_a_part_does_not_import_what_it_must_not_know(part: str) -> None:
    path = ROOT / part
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                for forbidden in FORBIDDEN[part]:
                    assert not f"{name}.".startswith(f"{forbidden}."), f"{file} imports {name}"
