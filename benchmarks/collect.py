"""Rows per second with the policy beside the simulation, against the bare limit.

The bare limit is as many independent processes as workers, each a tight loop of policy and
environments, with no communication. ``Collector`` into a ``RolloutStore`` runs the same
environments and the same 64-64 tanh policy. Both are started once and then run in turn, in short
bursts, on this machine: ratios are of neighbours in time.

    python benchmarks/collect.py            # all kinds of work
    python benchmarks/collect.py lunarlander cartpole
    python benchmarks/collect.py --tls      # the same with and without TLS, in turn
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import dask
import gymnasium as gym
import numpy as np
import psutil
import torch
from torch import nn

import clusterenv
from clusterenv.policies import Categorical, Context, Decision, Policy


class TanhPolicy(Policy):
    """64-64 tanh, sampling by the Gumbel trick; log-probabilities go into the rows."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, actions)
        )

    def act(self, obs: torch.Tensor, context: Context) -> Decision:
        logits = self.net(obs).log_softmax(-1)
        noise = torch.empty_like(logits).exponential_().log_()
        action = (logits - noise).argmax(-1)
        return Decision(action, {"log_prob": logits.gather(1, action[:, None]).squeeze(1)})


class PixelPolicy(Policy):
    """Acts at random on frames: the frames' way is what is measured."""

    def act(self, obs: torch.Tensor, context: Context) -> Decision:
        return Decision(torch.randint(0, 4, (len(obs),)), {"log_prob": torch.zeros(len(obs))})


class Frames(gym.Env):
    """Atari-sized frames; 16 environments together take 4 ms a step."""

    busy = False

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.frame = np.random.default_rng(seed).integers(0, 255, (4, 84, 84), np.uint8)
        return self.frame, {}

    def step(self, action: int) -> tuple:
        until = time.perf_counter() + 0.004 / 16
        if not self.busy:
            time.sleep(0.0002)  # it wakes up a little late
        while time.perf_counter() < until:
            pass
        return self.frame, 1.0, False, False, {}


class BusyFrames(Frames):
    """The same, but the 4 ms are computing, so that the head has no core of its own."""

    busy = True


@dataclass(frozen=True)
class Work:
    """One kind of work: environments, engine and how to make them bare."""

    title: str
    env: Any
    engine: str
    envs_per_shard: int
    horizon: int
    policy: Callable[[], Policy]
    goal: float


def tanh(inputs: int, actions: int) -> Callable[[], Policy]:
    def make() -> Policy:
        torch.manual_seed(1)  # how long episodes are, and what a step costs, depends on the policy
        return TanhPolicy(inputs, actions)

    return make


WORKS = {
    "lunarlander": Work(
        "LunarLander-v3, Gymnasium loop", "LunarLander-v3", "gymnasium", 16, 128, tanh(8, 4), 0.97
    ),
    "cartpole": Work(
        "CartPole-v1, Gymnasium loop", "CartPole-v1", "gymnasium", 16, 128, tanh(4, 2), 1.05
    ),
    "envpool": Work(
        "LunarLander-v3, EnvPool", "LunarLander-v3", "envpool", 64, 128, tanh(8, 4), 0.92
    ),
    "native": Work(
        "CartPole-v1, native vector", "CartPole-v1", "native", 256, 128, tanh(4, 2), 0.88
    ),
    "frames": Work(
        "4×84×84 uint8 frames, 4 ms a step, waiting",
        Frames,
        "gymnasium",
        16,
        32,
        PixelPolicy,
        0.95,
    ),
    "busyframes": Work(
        "4×84×84 uint8 frames, 4 ms a step, computing",
        BusyFrames,
        "gymnasium",
        16,
        32,
        PixelPolicy,
        0.95,
    ),
}


def bare_envs(work: Work) -> Any:
    """Make the environments of one shard as one would without ClusterEnv."""
    n = work.envs_per_shard
    if work.engine == "native":
        return gym.make_vec(work.env, n, vectorization_mode="vector_entry_point")
    if work.engine == "envpool":
        import envpool

        return envpool.make(work.env, env_type="gymnasium", num_envs=n, num_threads=1, seed=1)
    factory = work.env if callable(work.env) else lambda: gym.make(work.env)
    return gym.vector.SyncVectorEnv([factory] * n)


def bare(name: str, bursts: Any) -> None:
    """Step as fast as one process can, for as long as is asked; answer with rows per second."""
    work = WORKS[name]
    torch.set_num_threads(1)
    envs, policy = bare_envs(work), work.policy()
    n = work.envs_per_shard
    context = Context(torch.arange(n))
    obs, _ = envs.reset()
    dtype = np.int32 if work.engine == "envpool" else np.int64
    over = np.zeros(n, np.bool_)
    bursts.send(0.0)  # ready
    while seconds := bursts.recv():
        rows, began = 0, time.perf_counter()
        with torch.inference_mode():
            while (spent := time.perf_counter() - began) < seconds:
                action = policy.act(torch.from_numpy(obs), context).action.numpy()
                obs, _, terminated, truncated, _ = envs.step(action.astype(dtype, copy=False))
                rows += n - int(over.sum())  # the step after an end only resets
                over = terminated | truncated
        bursts.send(rows / spent)


@contextlib.contextmanager
def bare_limit(name: str, workers: int) -> Iterator[Callable[[float], float]]:
    """Give a function that returns the rows per second of independent processes together."""
    spawn = multiprocessing.get_context("spawn")
    ends = [spawn.Pipe() for _ in range(workers)]
    processes = [spawn.Process(target=bare, args=(name, theirs)) for _, theirs in ends]
    for process in processes:
        process.start()
    for _, theirs in ends:
        theirs.close()  # then a process that ends is noticed

    def burst(seconds: float) -> float:
        for ours, _ in ends:
            ours.send(seconds)
        return float(sum(ours.recv() for ours, _ in ends))

    try:
        for ours, _ in ends:
            ours.recv()
        yield burst
    finally:
        for ours, _ in ends:
            ours.send(0.0)
        for process in processes:
            process.join()


class Pace(NamedTuple):
    """How a collection went."""

    rate: float
    """Rows per second."""
    head: float
    """CPU seconds of the head per million rows."""
    wire: float
    """Bytes per row."""
    cpu: float
    """CPU seconds of all processes per million rows."""


def cpu_seconds() -> float:
    """Return the CPU time of this process and those that it started."""
    mine = psutil.Process()
    times = [each.cpu_times() for each in (mine, *mine.children(recursive=True))]
    return sum(each.user + each.system for each in times)


@contextlib.contextmanager
def collecting(work: Work, workers: int) -> Iterator[Callable[[float], Pace]]:
    """Give a function that collects for some seconds; between two calls nothing runs."""
    store = clusterenv.RolloutStore()

    def burst(seconds: float) -> Pace:
        for _ in range(2 * workers):  # those that waited, and the first after a rest
            next(batches)
        rows, began, cpu, all_cpu = 0, time.perf_counter(), time.process_time(), cpu_seconds()
        before = collector.stats()
        while (spent := time.perf_counter() - began) < seconds:
            batch = next(batches)
            store.add(batch, newest_version=0)
            rows += batch.num_rows
            if store.rows >= workers * work.envs_per_shard * work.horizon:
                store.take()
        used, all_used = time.process_time() - cpu, cpu_seconds() - all_cpu
        after = collector.stats()
        wire = (after.wire_bytes - before.wire_bytes) / max(1, after.rows - before.rows)
        time.sleep(0.5)  # until the shards have used up their credits
        return Pace(rows / spent, 1e6 * used / rows, wire, 1e6 * all_used / rows)

    with clusterenv.Collector(
        work.env,
        work.policy(),
        num_envs=work.envs_per_shard * workers,
        horizon=work.horizon,
        shards=workers,
        engine=work.engine,
        seed=1,
    ) as collector:
        batches = iter(collector)
        yield burst


def compare_tls(name: str, workers: int, seconds: float, rounds: int) -> None:
    """Print what TLS costs: the same collection with it and without, in turn."""
    work = WORKS[name]
    paces: dict[bool, list[Pace]] = {True: [], False: []}
    with contextlib.ExitStack() as stack:
        bursts = {}
        for security in (True, False):
            with dask.config.set(
                {"clusterenv.security": security, "clusterenv.channel.local": False}
            ):
                bursts[security] = stack.enter_context(collecting(work, workers))
        for _ in range(rounds):
            for security in (True, False):
                paces[security].append(bursts[security](seconds))
    pairs = list(zip(paces[True], paces[False], strict=True))
    plain, tls = (statistics.median(pace.rate for pace in paces[on]) for on in (False, True))
    ratios = [
        statistics.median(getattr(a, figure) / getattr(b, figure) for a, b in pairs)
        for figure in ("rate", "cpu", "head")
    ]
    print(
        f"| {work.title}, {workers} × {work.envs_per_shard} | {plain:,.0f} | {tls:,.0f} | "
        f"{' | '.join(f'{ratio:.2f}' for ratio in ratios)} |",
        flush=True,
    )


def compare(name: str, workers: int, seconds: float, rounds: int) -> None:
    """Print how near a collection comes to the bare limit, in turn with it."""
    work = WORKS[name]
    limits, paces = [], []
    with bare_limit(name, workers) as bare_burst, collecting(work, workers) as burst:
        for _ in range(rounds):
            limits.append(bare_burst(seconds))
            paces.append(burst(seconds))
    ratios = sorted(pace.rate / limit for pace, limit in zip(paces, limits, strict=True))
    quarter = len(ratios) // 4
    rate, head, wire = (statistics.median(p[k] for p in paces) for k in range(3))
    print(
        f"| {work.title}, {workers} × {work.envs_per_shard} "
        f"| {statistics.median(limits):,.0f} | {rate:,.0f} "
        f"| {statistics.median(ratios):.2f} ({ratios[quarter]:.2f}–{ratios[-1 - quarter]:.2f}) "
        f"| {work.goal} | {head:.2f} | {wire:,.0f} |",
        flush=True,
    )


def publishing(workers: int, seconds: float, rounds: int) -> None:
    """Print what ten announcements a second of a 1 M-parameter policy cost, with no pull."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 980), nn.Tanh(), nn.Linear(980, 980), nn.Tanh(), nn.Linear(980, 4)
    )
    policy = Categorical(net)
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    rates: dict[str, list[float]] = {}
    spent = {"publish": 0.0, "evaluate": 0.0}
    told = versions = seconds_published = 0.0
    with clusterenv.Collector(
        "LunarLander-v3",
        policy,
        num_envs=16 * workers,
        horizon=64,
        shards=workers,
        sync=clusterenv.Divergence(1e9),
        seed=1,
    ) as collector:
        batches = iter(collector)
        for _ in range(4):
            next(batches)
        for name in ("quiet", "publishing") * rounds:
            before = collector.stats()
            rows, due, began = 0, 0.0, time.perf_counter()
            while (passed := time.perf_counter() - began) < seconds:
                if name == "publishing" and passed >= due:
                    with torch.no_grad():  # versions that differ, as a learner's do
                        net[0].bias.add_(1e-4)
                    collector.publish(policy)
                    spent["publish"] += time.perf_counter() - began - passed
                    due += 0.1
                rows += next(batches).num_rows
            rates.setdefault(name, []).append(rows / passed)
            after = collector.stats()
            if name == "publishing":
                seconds_published += passed
                versions += after.announcements - before.announcements
                told += after.announced_bytes - before.announced_bytes
                spent["evaluate"] += after.evaluation_seconds - before.evaluation_seconds
    pairs = zip(rates["publishing"], rates["quiet"], strict=True)
    ratio = statistics.median(busy / quiet for busy, quiet in pairs)
    print(
        f"\n{parameters:,} parameters, {versions / seconds_published:.1f} versions/s, no shard "
        f"over the threshold: {after.pulls} pulls, {after.weight_bytes} weight bytes, "
        f"{told / seconds_published / workers / 1e3:.2f} kB/s of announcements per worker, "
        f"{1e3 * spent['publish'] / versions:.1f} ms a publish "
        f"({1e3 * spent['evaluate'] / versions:.1f} ms of it evaluation), "
        f"{ratio:.2f} of the quiet throughput ({rates['quiet'][0]:,.0f} rows/s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    others = "inference, publish"
    parser.add_argument("works", nargs="*", metavar="work", help=f"{', '.join(WORKS)}, {others}")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--tls", action="store_true", help="compare with and without TLS instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = args.works or [*WORKS, "publish", "inference"]
    unknown = set(chosen) - {*WORKS, "publish", "inference"}
    if unknown:
        parser.error(f"unknown work {sorted(unknown)}; there are {', '.join(WORKS)}, {others}")
    if args.tls:
        columns = ("plain, rows/s", "TLS, rows/s", "ratio", "CPU time per row, ratio", "head's")
        print(f"| work | {' | '.join(columns)} |\n|---|---:|---:|---:|---:|---:|")
        for name in args.works or WORKS:
            compare_tls(name, args.workers, args.seconds, args.rounds)
        return
    columns = (
        "bare limit, rows/s",
        "Collector, rows/s",
        "ratio (middle half)",
        "goal",
        "head CPU, s per M rows",
    )
    if set(chosen) & set(WORKS):
        print(f"| work | {' | '.join(columns)} | bytes per row |")
        print("|---|---:|---:|---:|---:|---:|---:|")
    for name in chosen:
        if name in WORKS:
            compare(name, args.workers, args.seconds, args.rounds)
    if "publish" in chosen:
        publishing(args.workers, args.seconds, args.rounds)
    if "inference" in chosen:
        sys.path.append(str(Path(__file__).parent))  # also where this is a module of a package
        import inference

        inference.compare(args.workers, args.seconds, args.rounds)


if __name__ == "__main__":
    main()
