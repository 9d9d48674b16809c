"""What ``publish`` costs the learner, and announcements the scheduler, with 2 to 64 shards.

    python benchmarks/publish.py
    python benchmarks/publish.py --shards 2 64 --versions 100

Each shard is a worker process of its own. They rest meanwhile, so that the cores are free: the
times are those of ``publish`` without its evaluation, which does not depend on the shards. The
second figure publishes as fast as it can for some seconds and counts the events on the topic,
of which ``clusterenv.publish.share`` allows so many.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import clusterenv
from clusterenv.policies import Categorical


def measure(shards: int, versions: int, seconds: float) -> tuple[float, float, float]:
    """Return milliseconds of a publish, versions per second, and events per second."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    policy = Categorical(net)
    with (
        clusterenv.connect("local", n_workers=shards, dashboard_address=None) as client,
        clusterenv.Collector(
            "CartPole-v1",
            policy,
            num_envs=shards,
            horizon=4,
            shards=shards,
            cluster=client,
            sync=clusterenv.Divergence(1e9),
        ) as collector,
    ):
        collector.rollout()
        for _ in range(5):
            publish(collector, policy)
        spent = []
        for _ in range(versions):
            time.sleep(0.05)  # publish seldom, as a learner does
            evaluated = collector.stats().evaluation_seconds
            took = publish(collector, policy)
            spent.append(took - (collector.stats().evaluation_seconds - evaluated))
        events = len(client.get_events(collector.topic))
        published, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            publish(collector, policy)
            published += 1
            time.sleep(0.002)
        passed = time.perf_counter() - began
        sent = len(client.get_events(collector.topic)) - events
        return 1e3 * statistics.median(spent), published / passed, sent / passed


def publish(collector: clusterenv.Collector, policy: Categorical) -> float:
    """Publish a version that differs from the one before; return the seconds it took."""
    with torch.no_grad():
        next(policy.parameters()).add_(1e-4)
    began = time.perf_counter()
    collector.publish(policy)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shards", type=int, nargs="+", default=[2, 16, 64])
    parser.add_argument("--versions", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    print("| shards | ms per publish | ratio | versions/s published | events/s |")
    print("|--:|--:|--:|--:|--:|")
    first = None
    for shards in args.shards:
        spent, published, sent = measure(shards, args.versions, args.seconds)
        first = spent if first is None else first
        print(
            f"| {shards} | {spent:.2f} | {spent / first:.2f} | {published:.0f} | {sent:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
