"""What IMPALA's learner costs the collection that goes on beside it.

    python benchmarks/learning.py
    python benchmarks/learning.py --env CartPole-v1 --horizon 256

One collector, in bursts: in every first one its batches are only taken, in every second one IMPALA
learns from each, once, and publishes a version after it. Both act with what has been learned so
far. The learner's share is that of one core, from a batch as tensors to the published version.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import clusterenv
from pipelines.impala import IMPALA


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--env", default="LunarLander-v3")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--horizon", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = {name: getattr(options, name) for name in ("num_envs", "horizon", "shards")}
    args = IMPALA.args_type(env=options.env, **size)
    learner = IMPALA(args, *clusterenv.env_spaces(options.env))
    ratios, shares = [], []
    with clusterenv.Collector(
        options.env, learner.policy, credits=args.queue, sync=clusterenv.EveryVersion(), **size
    ) as collector:
        batches = iter(collector)

        def burst(learns: bool) -> tuple[float, float]:
            """Collect for some seconds; return rows per second, and the learner's share."""
            for _ in range(2 * options.shards):  # those that waited
                next(batches)
            rows, busy, began = 0, 0.0, time.perf_counter()
            while (spent := time.perf_counter() - began) < options.seconds:
                batch = next(batches)
                rows += batch.num_rows
                if learns:
                    taken = time.perf_counter()
                    learner.learn(batch.torch(), progress=0.0)
                    collector.publish(learner.policy)
                    busy += time.perf_counter() - taken
            return rows / spent, busy / spent

        burst(True)
        print("| rows/s alone | beside the learner | ratio | learner's share |\n|--:|--:|--:|--:|")
        for _ in range(options.rounds):
            (alone, _), (beside, share) = burst(False), burst(True)
            ratios.append(beside / alone)
            shares.append(share)
            print(f"| {alone:,.0f} | {beside:,.0f} | {ratios[-1]:.3f} | {share:.3f} |", flush=True)
    print(
        f"\nmedian ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
        f"median share {statistics.median(shares):.3f} of one core"
    )


if __name__ == "__main__":
    main()
