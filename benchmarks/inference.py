"""Where the policy is evaluated, compared: at the head, on the workers, and step by step.

LunarLander-v3 with a 64-64 tanh policy, and with one of ten million parameters. All ways are
started once and run in turn, in short bursts, on this machine: ratios are of neighbours in time.

    python benchmarks/collect.py inference
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import dask
import gymnasium as gym
import numpy as np
import torch
from torch import nn

import clusterenv
from clusterenv.policies import Context, Decision, Policy

ENV, OBS, ACTIONS = "LunarLander-v3", 8, 4
KINDS = (("head, 2 groups", "head", 2), ("head, 1 group", "head", 1), ("workers", "worker", 1))
"""Collectors: a name, where the policy acts, and groups of each shard's environments."""


class Gumbel(Policy):
    """Tanh layers, sampling by the Gumbel trick; log-probabilities go into the rows."""

    def __init__(self, *hidden: int) -> None:
        super().__init__()
        sizes = (OBS, *hidden)
        layers = [(nn.Linear(*pair), nn.Tanh()) for pair in zip(sizes, hidden, strict=False)]
        self.net = nn.Sequential(
            *(part for pair in layers for part in pair), nn.Linear(sizes[-1], ACTIONS)
        )

    def act(self, obs: torch.Tensor, context: Context | None = None) -> Decision:
        logits = self.net(obs).log_softmax(-1)
        noise = torch.empty_like(logits).exponential_().log_()
        action = (logits - noise).argmax(-1)
        return Decision(action, {"log_prob": logits.gather(1, action[:, None]).squeeze(1)})


class Way(NamedTuple):
    """One way to collect: a burst returns its steps."""

    name: str
    burst: Callable[[float], int]


def stepping(name: str, envs: gym.vector.VectorEnv, policy: Policy) -> Way:
    """Return the way of someone's own loop: a policy here, and ``step``."""
    now = [envs.reset(seed=1)[0]]

    def burst(seconds: float) -> int:
        steps, until = 0, time.perf_counter() + seconds
        with torch.inference_mode():
            while time.perf_counter() < until:
                action = policy.act(torch.from_numpy(now[0])).action.numpy()
                now[0] = envs.step(action)[0]
                steps += envs.num_envs
        return steps

    return Way(name, burst)


def collecting(name: str, collector: clusterenv.Collector, policy: Policy, every: float) -> Way:
    """Return the way of a collector that publishes a version every so many seconds."""
    batches = iter(collector)

    def burst(seconds: float) -> int:
        began, due, rows = time.perf_counter(), every, 0
        for _ in range(4):  # those that waited
            next(batches)
        while (passed := time.perf_counter() - began) < seconds:
            if passed > due:
                with torch.no_grad():  # versions that differ, as a learner's do
                    next(policy.parameters()).add_(1e-6)
                collector.publish(policy)
                due += every
            rows += next(batches).num_rows
        return rows

    return Way(name, burst)


@contextlib.contextmanager
def ways(
    workers: int, hidden: tuple[int, ...], horizon: int, publish_every: float
) -> Iterator[list[Way]]:
    """Start everything that is compared."""
    torch.manual_seed(1)
    policy = Gumbel(*hidden)
    options = {"num_envs": 16 * workers, "shards": workers}
    with contextlib.ExitStack() as stack:
        envs = gym.vector.AsyncVectorEnv([lambda: gym.make(ENV)] * (16 * workers))
        stack.callback(envs.close)
        cluster = stack.enter_context(clusterenv.make_vec(ENV, **options))
        made = [stepping("AsyncVectorEnv", envs, policy)]
        made.append(stepping("ClusterEnv.step", cluster, policy))
        for name, where, groups in KINDS:
            with dask.config.set({"clusterenv.inference.groups": groups}):
                collector = clusterenv.Collector(
                    ENV, policy, horizon=horizon, seed=1, inference=where, **options
                )
            stack.enter_context(collector)
            made.append(collecting(name, collector, policy, publish_every))
        yield made


def compare(workers: int, seconds: float, rounds: int) -> None:
    """Print a table for a small policy, and for a large one that has all cores at the head."""
    for hidden, horizon, every in (((64, 64), 64, 0.1), ((2240, 2240, 2240), 8, 1.0)):
        parameters = sum(parameter.numel() for parameter in Gumbel(*hidden).parameters())
        torch.set_num_threads(1 if parameters < 10**6 else workers)
        rates: dict[str, list[float]] = {}
        with ways(workers, hidden, horizon, every) as made:
            for turn in range(rounds + 1):
                for way in made:
                    began = time.perf_counter()
                    steps = way.burst(seconds)
                    if turn:  # the first warms up
                        rate = steps / (time.perf_counter() - began)
                        rates.setdefault(way.name, []).append(rate)
        title = f"{ENV}, {workers} × 16, {parameters:,} parameters, {1 / every:g} versions/s"
        names = list(rates)
        print(f"\n| {title} | steps/s | {' | '.join(f'÷ {name}' for name in names)} |")
        print(f"|---|---:|{'---:|' * len(names)}")
        for name in names:
            ratios = [np.divide(rates[name], rates[other]) for other in names]
            cells = " | ".join(f"{statistics.median(ratio.tolist()):.2f}" for ratio in ratios)
            print(f"| {name} | {statistics.median(rates[name]):,.0f} | {cells} |", flush=True)
