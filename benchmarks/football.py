"""What football costs: memory and throughput of three learners, computed beforehand and measured.

    python -m benchmarks.football                     # what a row costs, and what follows for runs
    python -m benchmarks.football --learners ppo --steps 20000
    python -m benchmarks.football --constant          # what always the same action scores

Without ``--learners`` no run is started: the CPU time of a step of the simulation, of a decision
and of learning is measured in this process, and throughput and memory of a run are computed from
it. With ``--learners`` these are then trained with their presets for so many steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import torch

from benchmarks.environments import rate
from clusterenv.policies import Context
from clusterenv.store import Rollout
from pipelines import learners
from pipelines.envs.football import EASIEST
from pipelines.experiment import run
from pipelines.experiment.args import ReplayArgs, RolloutArgs, RunArgs
from pipelines.experiment.sinks import read_csv

LEARNERS = {"ppo": "residual", "impala": "residual", "apex": "nature"}
"""And the convolutions that each has by default."""
FRAME = 4 * 72 * 96
STACK = 4 * FRAME
HORIZONS = 6
"""That a shard keeps, if its environments spend steps on resetting."""
PROCESS, ENGINE = 350_000_000, 59_000_000
"""Bytes of a process that has imported everything, and of one environment in it: measured."""
SIDE = 1.1
"""Slots of a replay store for each row, those for the ends of episodes and fragments included."""
SHARDS = 2
RIGHT, SHOOT = 5, 12
"""Numbers of actions."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """CPU seconds of a row, by what they are spent on."""

    simulate: float
    act: float
    learn: float

    def rate(self, cores: int) -> float:
        """Return the steps per second of a run, if all cores are busy and nothing else costs.

        The learner has one core at most.

        Examples
        --------
        >>> Costs(simulate=0.002, act=0.0, learn=0.002).rate(cores=2)
        500.0
        >>> round(Costs(simulate=0.001, act=0.0, learn=0.004).rate(cores=2))
        250
        """
        whole = self.simulate + self.act + self.learn
        return min(cores / whole, 1 / self.learn)


def memory_of(args: RunArgs) -> dict[str, int]:
    """Return the bytes that a worker and the head hold, computed from the options.

    Of the head only rows are counted, and not the process or fragments on their way.

    Examples
    --------
    >>> args = learners.load("apex").preset(EASIEST[0], shards=2)
    >>> memory_of(args)["head"] == int(args.capacity * 1.1) * 27_648
    True
    """
    per_shard = args.num_envs // SHARDS
    fragment = per_shard * args.horizon * STACK
    if isinstance(args, ReplayArgs):
        head = int(args.capacity * SIDE) * FRAME
    elif isinstance(args, RolloutArgs):
        head = args.num_envs * args.horizon * STACK * (2 if args.overlap else 1)
    else:
        head = SHARDS * int(getattr(args, "queue", 1)) * fragment
    shard = HORIZONS * fragment
    worker = PROCESS + per_shard * ENGINE + shard
    return {"fragment": fragment, "shard": shard, "worker": worker, "head": head}


def costs_of(name: str, cnn: Any, simulate: float) -> Costs:
    """Measure what a row costs a learner, with convolutions of this name."""
    kind = learners.load(name)
    args = kind.preset(EASIEST[0], shards=SHARDS, cnn=cnn)
    space = gym.make(args.env).observation_space
    learner = kind(args, space, gym.spaces.Discrete(19))
    # Every shard decides for its environments at once.
    n = args.num_envs // SHARDS
    obs = _observations(n)
    context = Context(torch.arange(n), {}, learner.policy.initial_state(n))
    with torch.inference_mode():
        act = _cpu_seconds(lambda: learner.policy.act(obs, context)) / n
    rows, count = _rows(args)
    return Costs(simulate, act, _cpu_seconds(lambda: learner.learn(rows, 0.0)) / count)


def _observations(n: int) -> torch.Tensor:
    """Return observations with about as many points as football's."""
    return (torch.rand(n, 4, 4, 72, 96) < 0.0005).to(torch.uint8) * 255


def _rows(args: RunArgs) -> tuple[Any, int]:
    """Return what a learner takes at once, and how many collected rows that stands for."""
    if isinstance(args, ReplayArgs):
        n = args.batch
        return {
            "obs": _observations(n),
            "next_obs": _observations(n),
            "action": torch.randint(19, (n,)),
            "reward": torch.rand(n),
            "discount": torch.ones(n),
            "terminated": torch.zeros(n, dtype=torch.bool),
            "weights": torch.ones(n),
        }, args.rows_per_update
    envs = args.num_envs // (1 if isinstance(args, RolloutArgs) else SHARDS)
    shape = args.horizon, envs
    none = torch.zeros(shape, dtype=torch.bool)
    columns = {
        "obs": _observations(args.horizon * envs).unflatten(0, shape),
        "action": torch.randint(19, shape),
        "log_prob": torch.full(shape, -2.94),
        "reward": torch.rand(shape),
        "terminated": none,
        "truncated": none,
        "env": torch.arange(envs).expand(shape),
        "step": torch.arange(args.horizon).unsqueeze(1).expand(shape),
    }
    tail_rows = torch.arange(args.horizon * envs)[-envs:]
    rows = Rollout(columns, tail_rows, {"obs": columns["obs"][-1]})
    return rows, args.horizon * envs


def _cpu_seconds(call: Callable[[], Any], seconds: float = 2.0) -> float:
    """Return the CPU time of a call."""
    call()
    began = time.process_time()
    for calls in itertools.count(1):
        call()
        if (spent := time.process_time() - began) >= seconds:
            return spent / calls
    raise AssertionError("count() does not end")


class Usage:
    """Memory and CPU time of this process and of its children, the workers, while it is open.

    CPU time counts from the row of the run's log on that has so many steps: by then all processes
    have started, the learner learns, and a shard has touched the memory of its six fragments,
    which takes 0.4 ms per row once.
    """

    def __init__(self, log: Path, after: int) -> None:
        self._after = after
        self.head_bytes, self.worker_bytes = 0, 0
        self._log, self._first = log, 0
        self._begun: dict[int, float] | None = None
        self._now: dict[int, float] = {}
        self._own = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Usage:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def per_row(self) -> tuple[float, float]:
        """Return CPU milliseconds of a row: of the head, and of the workers together."""
        begun, rows = self._begun or {}, int(read_csv(self._log)[-1]["steps"]) - self._first
        spent = {pid: 1e3 * (now - begun.get(pid, 0.0)) / rows for pid, now in self._now.items()}
        head = spent.pop(self._own.pid)
        return head, sum(spent.values())

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            for process in (self._own, *self._own.children(recursive=True)):
                try:
                    size, times = process.memory_info().rss, process.cpu_times()
                except psutil.NoSuchProcess:
                    continue
                self._now[process.pid] = times.user + times.system
                if process == self._own:
                    self.head_bytes = max(self.head_bytes, size)
                else:
                    self.worker_bytes = max(self.worker_bytes, size)
            logged = read_csv(self._log) if self._log.is_file() and self._begun is None else []
            if logged and int(logged[-1]["steps"]) >= self._after:
                self._begun, self._first = dict(self._now), int(logged[-1]["steps"])


def measured(name: str, steps: int) -> str:
    """Train with the preset; return a row of the table: what the run logged last, and took."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        kind = learners.load(name)
        changes = {"total_steps": steps, "shards": SHARDS, "log_every": 1_000, "out": out}
        with Usage(out / "progress.csv", steps // 2) as usage:
            run(kind, kind.preset(EASIEST[0], quiet=True, **changes))
        last = read_csv(out / "progress.csv")[-1]
        head, workers = usage.per_row()
    store = last.get("store_bytes")
    return (
        f"| {name} | {head:.2f} | {workers:.2f} | {float(last['steps_per_second']):,.0f} "
        f"| {float(last['learner_share']):.0%} | {megabytes(float(store)) if store else '–'} "
        f"| {megabytes(usage.head_bytes)} | {megabytes(usage.worker_bytes)} |"
    )


def score(env: str, action: int | None) -> float:
    """Return the mean score of 16 episodes of one action, or of random ones: two of each of 8."""
    envs = gym.make_vec(env, 8, vectorization_mode="vector_entry_point", reward="score")
    envs.action_space.seed(9000)
    envs.reset(seed=9000)
    scores, left, over = 0.0, np.full(8, 2), np.zeros(8, bool)
    while left.any():
        chosen = envs.action_space.sample() if action is None else np.full(8, action)
        _, rewards, terminated, truncated, _ = envs.step(chosen)
        counted = (left > 0) & ~over  # the step after an end only resets
        scores += float(rewards[counted].sum())
        over = (terminated | truncated) & ~over
        left -= over & counted
    envs.close()
    return scores / 16


def megabytes(count: float) -> str:
    """Return bytes as text.

    >>> megabytes(110_592_000)
    '111 MB'
    """
    return f"{count / 1e6:,.0f} MB"


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--learners", nargs="*", choices=LEARNERS, default=[])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--constant", action="store_true", help="only what one action scores")
    args = parser.parse_args(argv)
    if args.constant:
        print("| task | always right | always shoot | random |\n|---|---:|---:|---:|")
        for env in EASIEST:
            scores = [score(env, action) for action in (RIGHT, SHOOT, None)]
            print(f"| {env} | {' | '.join(f'{each:.2f}' for each in scores)} |", flush=True)
        return
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    envs = gym.make_vec(EASIEST[0], 8, vectorization_mode="vector_entry_point")
    envs.reset(seed=1)
    simulate = 1 / rate(envs, [envs.action_space.sample() for _ in range(64)], 3.0)
    envs.close()
    print(f"A frame {FRAME:,} bytes, an observation {STACK:,}; {cores} cores, CPU ms per row:\n")
    print("| learner | cnn | simulate | act | learn | steps/s | 1M steps | learner's share |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for name, cnn in itertools.product(LEARNERS, ("", "pooled")):
        cnn = cnn or LEARNERS[name]
        costs = costs_of(name, cnn, simulate)
        steps = costs.rate(cores)
        parts = " | ".join(f"{1e3 * each:.2f}" for each in dataclasses.astuple(costs))
        print(
            f"| {name} | {cnn} | {parts} | {steps:,.0f} | {1e6 / steps / 60:.0f} min "
            f"| {steps * costs.learn / cores:.0%} |",
            flush=True,
        )
    print("\n| learner | fragment | fragments of a shard | worker | rows at the head |")
    print("|---|---:|---:|---:|---:|")
    for name in LEARNERS:
        sizes = memory_of(learners.load(name).preset(EASIEST[0], shards=SHARDS))
        print(f"| {name} | {' | '.join(map(megabytes, sizes.values()))} |")
    if args.learners:
        print(
            f"\nMeasured, {args.steps:,} steps; CPU ms per row in their second half, and memory:\n"
        )
        print("| learner | head | workers | steps/s | learner works | store | head | worker |")
        print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in args.learners:
        print(measured(name, args.steps), flush=True)


if __name__ == "__main__":
    main()
