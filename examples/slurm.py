"""Run with workers in Slurm jobs.

``cluster.yaml``, next to this file, describes a job; copy it and adapt it to your site. This
example prints the job script, waits for the queued jobs, collects, and ends the jobs. It also runs
on any other cluster, and on this machine.

    python examples/slurm.py --dry-run          # print the job script, submit nothing
    python examples/slurm.py --shards 16        # four jobs of four workers
    python examples/slurm.py --cluster local --shards 2

If no worker connects: ``python -m clusterenv.doctor --cluster examples/cluster.yaml``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import gymnasium as gym
import numpy as np
from distributed import Client

import clusterenv


def collect(client: Client, args: argparse.Namespace) -> None:
    """Collect with a random policy and print rows and rate of each shard."""
    env = gym.make(args.env)
    policy = clusterenv.policies.Random(env.action_space)
    env.close()
    with clusterenv.Collector(
        args.env,
        policy,
        num_envs=args.shards * args.envs_per_shard,
        horizon=64,
        shards=args.shards,
        cluster=client,
        seed=1,
    ) as collector:  # waits for the workers, an hour at most: clusterenv.timeout.queue
        rows = np.zeros(args.shards, np.int64)
        for batch in collector.collect(args.rows):
            rows[batch.shard] += batch.num_rows
        stats = collector.stats()
    print("shard    rows  steps/s")
    for shard, (count, rate) in enumerate(zip(rows, stats.steps_per_second, strict=True)):
        print(f"{shard:>5}{count:>8,}{rate:>9,.0f}")
    print(f"{rows.sum():,} rows, {stats.episodes:,} episodes, mean return", end=" ")
    print(f"{np.mean(stats.returns):.1f}" if stats.returns else "–")


def main() -> None:
    """Start the cluster, collect, end the jobs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cluster", default=str(Path(__file__).with_name("cluster.yaml")))
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--shards", type=int, default=4, help="workers, one shard on each")
    parser.add_argument("--envs-per-shard", type=int, default=16)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dry-run", action="store_true", help="print the job script only")
    args = parser.parse_args()

    # With n_workers=0 no job is submitted.
    with clusterenv.connect(args.cluster, n_workers=0 if args.dry_run else args.shards) as client:
        if hasattr(client.cluster, "job_script"):
            print(client.cluster.job_script())
        if args.dry_run:
            return
        collect(client, args)
        machines = set(client.run(lambda: os.uname().nodename).values())
        print(f"{len(client.nthreads())} workers on {len(machines)} machine(s)")
    # Leaving the block closes the client, which ends the jobs.


if __name__ == "__main__":
    main()
