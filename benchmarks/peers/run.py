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
import statistics
import sys
from pathlib import Path

import torch

from benchmarks import collect
from benchmarks.peers.common import WARM_UP, WORKERS
from benchmarks.peers.venvs import Skipped, python_of, report_of

PEERS = ("rllib", "sample_factory", "torchrl", "sb3", "gymnasium_async")
WORK = "lunarlander"
OURS, BARE = "ClusterEnv Collector", "bare limit: no communication"


def peer_rate(peer: str, python: Path, seconds: float) -> tuple[str, float, str]:
    """Return a peer's name, its steps per second and its version."""
    result = report_of(python, peer, "--seconds", seconds, timeout=60 + 4 * seconds)
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
