"""Some seconds of chaos; ``make chaos`` has half an hour of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parent / "chaos.py"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("inference", "minutes"), [("worker", "0.2"), ("head", "0.1")])
def test_every_row_once_and_no_episode_across_a_crash(inference: str, minutes: str) -> None:
    # In a process of its own: it interrupts itself when it has seen enough.
    options = ["--minutes", minutes, "--seed", "1", "--no-throughput", "--inference", inference]
    command = [sys.executable, str(CHAOS), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each row once" in done.stdout
    print(done.stdout)
