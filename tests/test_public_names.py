"""``import clusterenv`` is fast, needs no optional package, and every public name is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import clusterenv

SLOW = {"torch", "pyarrow", "pandas", "distributed"}
OPTIONAL = {
    *("bokeh", "dask_jobqueue", "duckdb", "envpool", "matplotlib", "minari", "numba", "rich"),
    *("moviepy", "onnx", "onnxscript", "stable_baselines3", "tensordict", "torchrl", "tyro"),
    "wandb",
}


def imported(statement: str) -> set[str]:
    """Return the modules of a process after it has executed a statement."""
    script = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def without(packages: set[str]) -> str:
    """Return statements after which packages cannot be imported."""
    return f"sys.modules.update(dict.fromkeys({sorted(packages)!r}))"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import clusterenv", SLOW | OPTIONAL),
        ("import clusterenv; dir(clusterenv)", SLOW | OPTIONAL),
        ("import clusterenv; clusterenv.errors.ConfigError", SLOW | OPTIONAL),
        ("import clusterenv; clusterenv.Restarts", {"torch", "pyarrow"}),
        ("import clusterenv.doctor", SLOW | OPTIONAL),
        ("from clusterenv import *", OPTIONAL),
    ],
)
def test_slow_and_optional_packages_are_imported_when_they_are_needed(
    statement: str, absent: set[str]
) -> None:
    assert not imported(statement) & absent


def test_every_public_name_is_there_without_optional_packages() -> None:
    names = f"assert set({clusterenv.__all__!r}) <= set(globals())"
    imported(f"{without(OPTIONAL)}\nfrom clusterenv import *\n{names}")


def test_sb3_is_needed_for_its_vector_environment_alone() -> None:
    assert "SB3VecEnv" in dir(clusterenv)
    script = f"import sys; {without({'stable_baselines3'})}; from clusterenv import SB3VecEnv"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "ImportError: clusterenv.SB3VecEnv needs Stable-Baselines3: pip install" in done.stderr


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'integrations'"):
        _ = clusterenv.integrations
