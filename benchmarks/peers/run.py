"""Steps per second of the peers and of ClusterEnv, in one run on this machine.

LunarLander-v3 in Gymnasium's loop, two worker processes with 16 environments each, a 64-64 tanh
policy. Each peer has a virtual environment of its own, made on first use under ``.venv-peers``,
since their dependencies clash. All take turns, several rounds; the table shows the median of each
and of the ratios within the rounds.

    python -m benchmarks.peers.run                      # all peers
    python -m benchmarks.peers.run rllib torchrl        # some of them
    python -m benchmarks.peers.run --rounds 0           # only make the environments
    python -m benchmarks.peers.run sb3 --here           # with what is installed already
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import collect
from benchmarks.peers.common import WARM_UP, WORKERS

ROOT = Path(__file__).parents[2]
PEERS = ("rllib", "sample_factory", "torchrl", "sb3", "gymnasium_async")
WORK = "lunarlander"
OURS, BARE = "ClusterEnv Collector", "bare limit: no communication"


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


def peer_rate(peer: str, python: Path, seconds: float) -> tuple[str, float, str]:
    """Return a peer's name, its steps per second and its version."""
    program = (python, "-m", f"benchmarks.peers.{peer}")
    out = called(*program, "--seconds", str(seconds), timeout=60 + 4 * seconds)
    lines = [line for line in out.splitlines() if line.startswith('{"peer"')]
    if not lines:
        raise Skipped("it printed no result")
    result = json.loads(lines[-1])
    return result["peer"], result["steps_per_second"], result["version"]


def our_rates(seconds: float) -> dict[str, float]:
    """Return the steps per second of ClusterEnv and of the bare limit; neither runs afterwards."""
    with collect.collecting(collect.WORKS[WORK], WORKERS) as burst:
        burst(WARM_UP)
        ours = burst(seconds).rate
    with collect.bare_limit(WORK, WORKERS) as bare_burst:
        bare_burst(WARM_UP)
        return {OURS: ours, BARE: bare_burst(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("peers", nargs="*", metavar="peer", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--here", action="store_true", help="use the peers of this interpreter")
    args = parser.parse_args()
    chosen = args.peers or list(PEERS)
    unknown = set(chosen) - set(PEERS)
    if unknown:
        parser.error(f"unknown peer {sorted(unknown)}; there are {', '.join(PEERS)}")
    torch.set_num_threads(1)

    skipped: dict[str, str] = {}
    pythons: dict[str, Path] = {}
    for peer in chosen:
        try:
            pythons[peer] = Path(sys.executable) if args.here else python_of(peer)
        except Skipped as reason:
            skipped[peer] = f"cannot be installed: {reason}"

    rates: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    versions = {OURS: "this", BARE: ""}
    for _ in range(args.rounds):
        found = our_rates(args.seconds)
        for peer, python in list(pythons.items()):
            try:
                name, rate, versions[name] = peer_rate(peer, python, args.seconds)
            except Skipped as reason:
                skipped[peer] = f"cannot be measured: {reason}"
                del pythons[peer]
            else:
                found[name] = rate
        for name, rate in found.items():
            rates.setdefault(name, []).append(rate)
            ratios.setdefault(name, []).append(found[OURS] / rate)
            print(f"{name}: {rate:,.0f} steps/s", file=sys.stderr, flush=True)

    if rates:
        print("| LunarLander-v3, 2 × 16 environments | version | steps/s | ours ÷ it |")
        print("|---|---|---:|---:|")
    for name in sorted(rates, key=lambda name: -statistics.median(rates[name])):
        print(
            f"| {name} | {versions[name]} | {statistics.median(rates[name]):,.0f} "
            f"| {statistics.median(ratios[name]):.2f} |"
        )
    for peer, reason in skipped.items():
        print(f"\n{peer}: {reason}")


if __name__ == "__main__":
    main()
