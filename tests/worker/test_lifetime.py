from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import psutil
import pytest

from clusterenv.worker.lifetime import parse_slurm, seconds_left


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:59", 59),
        ("10:00", 600),
        ("1:00:00", 3600),
        ("2-00:00:01", 172_801),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_what_slurm_says(text: str, seconds: float | None) -> None:
    assert parse_slurm(text) == seconds


def test_the_first_end_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_JOB_END_TIME", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert seconds_left(None) is None
    age = time.time() - psutil.Process().create_time()
    by_lifetime = seconds_left(age + 500)
    assert by_lifetime is not None
    assert 480 < by_lifetime <= 500.5
    squeue = tmp_path / "squeue"  # where there is no Slurm, something that answers as it does
    squeue.write_text("#!/bin/sh\necho 5:00\n")
    squeue.chmod(squeue.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert seconds_left(age + 500) == 300
    squeue.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert seconds_left(None) is None
