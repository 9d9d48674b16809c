"""Runs in several sessions: whichever moment one is killed at, the next goes on from a commit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from clusterenv.errors import ConfigError
from pipelines.experiment.run_directory import arguments, check_arguments

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Args:
    lr: float = 0.1
    hidden: tuple[int, ...] = (8, 8)
    total_steps: int = 100
    out: Path | None = None


def test_rows_and_learner_are_of_one_commit_whenever_a_session_is_killed(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_sessions.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "25"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
    # The last; one that a kill left before it was removed; one that a kill left before it counted.
    assert len(list(tmp_path.glob("learner-*.pt"))) <= 3


def test_arguments_are_kept_as_json_keeps_them() -> None:
    kept = arguments(Args(out=Path("runs/x")))
    assert kept == {"lr": 0.1, "hidden": [8, 8], "total_steps": 100, "out": "runs/x"}


def test_a_run_goes_on_only_with_the_arguments_that_began_it() -> None:
    begun, out = arguments(Args()), Path("runs/x")
    check_arguments(out, begun, Args(total_steps=200), free=("total_steps",))
    with pytest.raises(ConfigError, match=r"--hidden 8 8 instead of --hidden 4;.*--out runs/x-2"):
        check_arguments(out, begun, Args(hidden=(4,)), free=())
