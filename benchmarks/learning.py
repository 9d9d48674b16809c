"""What IMPALA's learner costs the collection that goes on beside it.

    python benchmarks/learning.py
    python benchmarks/learning.py --env CartPole-v1 --horizon 256

One collector, in bursts: in every first one its batches are only taken, in every second one IMPALA
learns from each, once, and publishes a version after it. Both act with what has been learned so
far. The learner's share is that of one core, from a batch as tensors to the published version. CPU
time per row, of the head and of the workers, tells the same on a machine that is busy otherwise:
where all cores are taken, its quotient is the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from collect import cpu_seconds

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
    ratios, quotients, shares = [], [], []
    with clusterenv.Collector(
        options.env, learner.policy, credits=args.queue, sync=clusterenv.EveryVersion(), **size
    ) as collector:
        batches = iter(collector)

        def burst(learns: bool) -> tuple[float, float, float, float]:
            """Collect for some seconds.

            Returns rows per second, the learner's share, and µs of CPU per row: of the head and of
            the workers.
            """
            for _ in range(2 * options.shards):  # those that waited
                next(batches)
            rows, busy, began = 0, 0.0, time.perf_counter()
            head, everyone = time.process_time(), cpu_seconds()
            while (spent := time.perf_counter() - began) < options.seconds:
                batch = next(batches)
                rows += batch.num_rows
                if learns:
                    taken = time.perf_counter()
                    learner.learn(batch.torch(), progress=0.0)
                    collector.publish(learner.policy)
                    busy += time.perf_counter() - taken
            head = time.process_time() - head
            workers = cpu_seconds() - everyone - head
            return rows / spent, busy / spent, head / rows * 1e6, workers / rows * 1e6

        burst(True)
        print("| rows/s alone | beside the learner | ratio | learner's share |", end="")
        print(" head, µs/row alone | beside | workers, µs/row alone | beside |")
        print(f"|{'--:|' * 8}")
        for _ in range(options.rounds):
            (alone, _, *idle), (beside, share, *busy) = burst(False), burst(True)
            ratios.append(beside / alone)
            quotients.append(sum(idle) / sum(busy))
            shares.append(share)
            print(f"| {alone:,.0f} | {beside:,.0f} | {ratios[-1]:.3f} | {share:.3f} |", end="")
            pairs = (f" {one:.1f} | {two:.1f} |" for one, two in zip(idle, busy, strict=True))
            print("".join(pairs), flush=True)
    print(
        f"\nmedian ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
        f"by CPU time {statistics.median(quotients):.3f}, "
        f"median share {statistics.median(shares):.3f} of one core"
    )


if __name__ == "__main__":
    main()
