"""Two checkouts of ClusterEnv side by side: the same work, in turn, on this machine.

Each checkout runs in a process of its own that waits while the other works. The table shows the
median of the ratios of neighbouring bursts, new to old: of rows per second, and of the CPU time per
row of all processes together and of the head, which vary less on a busy machine.

    git worktree add ../before HEAD~5
    python benchmarks/checkouts.py ../before . step collect
    python benchmarks/checkouts.py ../before . step-cartpole collect-frames --rounds 20
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from collect import WORKS, collecting, cpu_seconds
from step import Still, stepping, streaming, tanh_policy

import clusterenv
from pipelines import ppo

Burst = Callable[[float], dict[str, float]]
STEPS: dict[str, tuple[Any, Callable[..., float]]] = {
    "step-lunarlander": ("LunarLander-v3", stepping),
    "step-cartpole": ("CartPole-v1", stepping),
    "step-nothing": (Still, stepping),
    "stream-lunarlander": ("LunarLander-v3", streaming),
    "stream-cartpole": ("CartPole-v1", streaming),
}
PPO = "ppo-cartpole"
COLLECTS = {f"collect-{name}": work for name, work in WORKS.items()}
GROUPS = {"step": list(STEPS), "collect": list(COLLECTS), "ppo": [PPO]}


@contextlib.contextmanager
def bursts_of(name: str) -> Iterator[Burst]:
    """Give a function that works for some seconds and returns what was measured."""
    if name in COLLECTS:
        with collecting(COLLECTS[name], workers=2) as collect:
            yield lambda seconds: collect(seconds)._asdict()
        return
    if name == PPO:
        with learning() as learn:
            yield learn
        return
    env, run = STEPS[name]
    with clusterenv.make_vec(env, 32, shards=2) as envs:
        act = tanh_policy(env) if isinstance(env, str) else lambda _obs: np.zeros(32, int)

        def burst(seconds: float) -> dict[str, float]:
            began, cpu, head = time.perf_counter(), cpu_seconds(), time.process_time()
            rate = run(envs, act, seconds)
            rows = rate * (time.perf_counter() - began)
            spent, spent_by_head = cpu_seconds() - cpu, time.process_time() - head
            return {"rate": rate, "cpu": spent / rows, "head": spent_by_head / rows}

        yield burst


@contextlib.contextmanager
def learning() -> Iterator[Burst]:
    """Give a function that trains PPO on CartPole in lock-step: rollout, update, publish."""
    args = ppo.PPO.preset("CartPole-v1")
    torch.manual_seed(1)
    learner = ppo.PPO(args, *clusterenv.env_spaces(args.env))
    agent = learner.policy
    store = clusterenv.RolloutStore()
    with clusterenv.Collector(
        args.env, agent, num_envs=args.num_envs, horizon=args.horizon, shards=2, seed=1
    ) as collector:

        def burst(seconds: float) -> dict[str, float]:
            began, cpu, head = time.perf_counter(), cpu_seconds(), time.process_time()
            rows = 0
            while (spent := time.perf_counter() - began) < seconds:
                for batch in collector.rollout():
                    store.add(batch, newest_version=collector.stats().version)
                rows += store.rows
                learner.learn(store.take(), 0.0)
                collector.publish(agent)
            used, used_by_head = cpu_seconds() - cpu, time.process_time() - head
            return {"rate": rows / spent, "cpu": used / rows, "head": used_by_head / rows}

        yield burst


def serve(name: str) -> None:
    """Work for as many seconds as each line of standard input says."""
    torch.set_num_threads(1)
    with bursts_of(name) as burst:
        print(json.dumps(clusterenv.__file__), flush=True)
        for line in sys.stdin:
            print(json.dumps(burst(float(line))), flush=True)


class Checkout:
    """A process that runs one kind of work with the ClusterEnv of a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        path = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve", name],
            cwd=directory,  # where the processes that it starts look for modules first
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        used = Path(self._answer()).parents[1]
        if used != directory:
            self.close()
            sys.exit(f"{directory} is not used: clusterenv was imported from {used}")

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a benchmark process ended; its error is above")
        return json.loads(line)

    def burst(self, seconds: float) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return dict(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def compare(name: str, directories: list[Path], rounds: int, seconds: float) -> None:
    measured: list[list[dict[str, float]]] = [[], []]
    checkouts = [Checkout(directory, name) for directory in directories]
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            result = checkouts[which].burst(seconds)
            if number:  # the first is to warm up
                measured[which].append(result)
    for checkout in checkouts:
        checkout.close()
    ratios = {
        key: sorted(new[key] / old[key] for old, new in zip(*measured, strict=True))
        for key in ("rate", "cpu", "head")
    }
    quarter = rounds // 4
    rate = ratios["rate"]
    print(
        f"| {name} | {statistics.median(m['rate'] for m in measured[0]):,.0f} "
        f"| {statistics.median(m['rate'] for m in measured[1]):,.0f} "
        f"| {statistics.median(rate):.3f} ({rate[quarter]:.2f}–{rate[-1 - quarter]:.2f}) "
        f"| {statistics.median(ratios['cpu']):.3f} | {statistics.median(ratios['head']):.3f} |",
        flush=True,
    )


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return
    names = [*STEPS, *COLLECTS, PPO]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("works", nargs="*", default=list(GROUPS), help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    works = [name for work in args.works for name in GROUPS.get(work, [work])]
    if unknown := set(works) - set(names):
        parser.error(f"unknown work {sorted(unknown)}; there are {', '.join(names)}")
    directories = [args.old.resolve(), args.new.resolve()]
    print("| work | old, rows/s | new, rows/s | new to old (middle half) | CPU per row | head's |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in works:
        compare(name, directories, args.rounds, args.seconds)


if __name__ == "__main__":
    main()
