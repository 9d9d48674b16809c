"""Programs in virtual environments of their own: made on first use, run with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Skipped(Exception):
    """A peer cannot be measured here, and why."""


def called(*command: str | Path, timeout: float) -> str:
    """Return what a command prints; end all its processes when it fails or takes too long."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # more threads than cores slow all of them
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise Skipped(f"no answer within {timeout:.0f} s") from None
    finally:
        if process.poll() is None:
            process.terminate()  # Ray takes its daemons along only when it may end by itself
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if process.returncode != 0:
        last = [line for line in (out + err).splitlines() if line.strip()][-1:]
        raise Skipped(f"exit code {process.returncode}: {' '.join(last)}")
    return out


def python_of(peer: str) -> Path:
    """Return the interpreter of a peer's virtual environment, which is made if need be."""
    home = ROOT / ".venv-peers" / peer
    requirements = Path(__file__).parent / "requirements" / f"{peer}.txt"
    python, marker = home / "bin" / "python", home / "installed"
    if not marker.exists() or marker.read_text() != requirements.read_text():
        print(f"installing {peer} …", file=sys.stderr, flush=True)
        called(sys.executable, "-m", "venv", home, timeout=120)
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        called(*pip, "--constraint", "constraints.txt", "torch", timeout=900)
        called(*pip, "--requirement", requirements, timeout=900)
        marker.write_text(requirements.read_text())
    return python


def report_of(python: Path, program: str, *options: object, timeout: float) -> dict[str, Any]:
    """Return what a program of ``benchmarks.peers`` reports: the last line that is its JSON."""
    module = f"benchmarks.peers.{program}"
    out = called(python, "-m", module, *map(str, options), timeout=timeout)
    lines = [line for line in out.splitlines() if line.startswith('{"peer"')]
    if not lines:
        raise Skipped("it printed no result")
    report: dict[str, Any] = json.loads(lines[-1])
    return report
