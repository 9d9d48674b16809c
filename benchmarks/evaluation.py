"""What an evaluation beside training costs collection.

    python benchmarks/evaluation.py
    python benchmarks/evaluation.py --shards 2 --rounds 8

LunarLander-v3, a 64-64 tanh policy. The evaluator has a worker of its own and evaluates without a
pause, in every second burst. On a machine with fewer cores than processes, collection may lose the
evaluator's share: one worker in ``shards + 1``.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import clusterenv
from clusterenv.policies import Categorical

ENV = "LunarLander-v3"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    policy, version, episodes = Categorical(net), 0, 0
    ratios = []
    with (
        clusterenv.connect("local", n_workers=args.shards + 1, dashboard_address=None) as client,
        clusterenv.Collector(
            ENV, policy, num_envs=16 * args.shards, horizon=128, shards=args.shards, cluster=client
        ) as collector,
        clusterenv.Evaluator(ENV, policy, episodes=10, num_envs=10, cluster=client) as evaluator,
    ):
        batches = iter(collector)

        def burst(evaluates: bool) -> float:
            """Collect for some seconds; return rows per second."""
            nonlocal version, episodes
            for _ in range(2 * args.shards):  # those that waited
                next(batches)
            rows, began, busy = 0, time.perf_counter(), False
            while (spent := time.perf_counter() - began) < args.seconds:
                if evaluates and not busy:
                    version += 1
                    evaluator.publish(policy, version)
                    busy = True
                rows += next(batches).num_rows
                for result in evaluator.results():
                    episodes += len(result.returns)
                    busy = False
            if busy:
                evaluator.wait(120)
                list(evaluator.results())
            return rows / spent

        burst(True)
        print("| rows/s alone | beside an evaluation | ratio |\n|--:|--:|--:|")
        for _ in range(args.rounds):
            alone, beside = burst(False), burst(True)
            ratios.append(beside / alone)
            print(f"| {alone:,.0f} | {beside:,.0f} | {ratios[-1]:.3f} |", flush=True)
    share = args.shards / (args.shards + 1)
    print(
        f"\nmedian ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); "
        f"without the evaluator's share of the workers: {share:.3f}; {episodes} episodes evaluated"
    )


if __name__ == "__main__":
    main()
