"""A learner ten times too slow, for ten minutes: ``python tests/chaos/slow_learner.py``.

Prints the memory of the head and of the workers, and ends with 1 if any has grown.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "head" / "collect"))
from test_backpressure import Still, Wide, memory

import clusterenv

WARM_UP = 20
GROWTH = 32 * 2**20


def main(minutes: float) -> int:
    """Take batches slowly; return the exit code."""
    with (
        clusterenv.connect("local", n_workers=2) as client,
        clusterenv.Collector(
            Wide, Still(), num_envs=2, shards=2, horizon=32, cluster=client
        ) as collector,
    ):
        batches = iter(collector)
        for _ in range(WARM_UP):
            next(batches)
        began = time.monotonic()
        for _ in range(WARM_UP):
            next(batches)
        pause = 9 * (time.monotonic() - began) / WARM_UP  # a batch takes ten times as long
        first, began, said, taken = memory(client), time.monotonic(), 0.0, 0
        while time.monotonic() - began < 60 * minutes:
            next(batches)
            taken += 1
            time.sleep(pause)
            if time.monotonic() - said >= 30:
                said = time.monotonic()
                used = ", ".join(f"{nbytes / 2**20:.0f}" for nbytes in memory(client))
                print(f"{said - began:4.0f} s  {taken:>7,} batches  {used} MiB", flush=True)
        growth = [now - then for now, then in zip(memory(client), first, strict=True)]
    shown = ", ".join(f"{nbytes / 2**20:+.1f}" for nbytes in growth)
    print(f"head, workers: {shown} MiB in {minutes:g} minutes, {taken:,} batches of 8 MiB")
    return 0 if max(growth) < GROWTH else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    sys.exit(main(parser.parse_args().minutes))
