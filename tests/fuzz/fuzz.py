"""Ten thousand wrong calls of the public API: ``python tests/fuzz/fuzz.py``.

Each is a right call of a public callable with one or two arguments replaced by values that may be
wrong. It must work, or end in an error of ours, soon, and leave no thread, process or socket.
A call that does not is printed as Python, with what repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import dask
import gymnasium as gym
import minari
import numpy as np
import torch
from distributed import Client
from gymnasium import spaces
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from batches import Fleet, Frames
from conftest import footprint, left_behind, wait_until
from targets import TARGETS, VALUES, Target
from worlds import World

import clusterenv
from clusterenv import errors, policies
from clusterenv.store import (
    Journal,
    NStep,
    Prioritized,
    Ratio,
    Recent,
    ReplayStore,
    Sampler,
    Sequences,
    Stack,
    Uniform,
)

__all__ = ["Call", "Fuzz", "Report"]

SLOW_SECONDS = 1.0  # what a call may take; a loaded machine takes longer, so it is only printed
HUNG_SECONDS = 30.0
SETTINGS = {"clusterenv.timeout.workers": "0.5s"}  # for calls that want more than there are


@dataclass(frozen=True)
class Call:
    """One call."""

    index: int
    target: Target
    text: str
    """As Python."""


@dataclass
class Report:
    """What became of the calls."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """How many worked, and how many ended in which error."""
    failures: list[str] = field(default_factory=list)
    """Calls that ended in another error, hung, or left something behind."""
    slow: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.outcomes.total():,} calls:"]
        lines += [f"{count:8,} {outcome}" for outcome, count in self.outcomes.most_common()]
        lines += [f"{len(self.slow)} took more than {SLOW_SECONDS:g} s", *self.slow]
        lines += [f"{len(self.failures)} failed", *self.failures]
        return "\n".join(lines)


class Hung(BaseException):
    """Raised in a call that does not end."""


class Fuzz:
    """Makes the calls; the objects that they are made on live until a call has closed them.

    Parameters
    ----------
    client
        Of a cluster with at least two workers.
    here
        An empty directory to work in.
    seed
        Of the calls.
    verbose
        Whether to print each call before it is made.
    """

    def __init__(self, client: Client, here: Path, seed: int, *, verbose: bool = False) -> None:
        self._seed = seed
        self._verbose = verbose
        self._workers = list(client.nthreads())
        self._last: Call | None = None
        self._before: dict[str, set[str]] = {}
        self.names = _names(client, here)
        """That may occur in a call."""
        self._make()

    def right_calls(self) -> None:
        """Make the right call of every target; each must work."""
        for target in TARGETS:
            self._prepare(target)
            self._run(self._text(target, dict(target.right)))

    def run(self, indices: range) -> Report:
        """Make these calls."""
        report = Report()
        for index in indices:
            self._judge(self.call(index), report)
        return report

    def call(self, index: int) -> Call:
        """Return a call, which depends on the seed, on its index and on nothing else."""
        rng = random.Random(f"{self._seed} {index}")
        (target,) = rng.choices(TARGETS, [each.weight for each in TARGETS])
        arguments = dict(target.right)
        parameters = list(dict.fromkeys((*self._parameters(target), *target.right, *target.more)))
        for name in rng.sample(parameters, min(len(parameters), rng.choice((1, 1, 1, 2)))):
            never = target.never.get(name, ())
            arguments[name] = rng.choice([value for value in VALUES if value not in never])
        return Call(index, target, self._text(target, arguments))

    def close(self) -> None:
        """Close all objects."""
        for name in _MADE:
            self.names[name].close()

    def _parameters(self, target: Target) -> dict[str, inspect.Parameter]:
        given = inspect.signature(eval(target.call, self.names)).parameters
        gathers = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return {name: each for name, each in given.items() if each.kind not in gathers}

    def _text(self, target: Target, arguments: dict[str, str]) -> str:
        parameters = self._parameters(target)
        bare = {n for n, each in parameters.items() if each.kind is each.POSITIONAL_ONLY}
        given = [value if n in bare else f"{n}={value}" for n, value in arguments.items()]
        return target.form.format(f"{target.call}({', '.join(given)})")

    def _judge(self, call: Call, report: Report) -> None:
        shown = f"    {call.text}  # fuzz.py --seed {self._seed} --only {call.index}"
        try:
            self._prepare(call.target)
        except Exception as error:
            report.failures.append(f"{self._last}\n        after it: {error!r}")
            del self.names[call.target.call.split(".")[0]]  # what the call is made on
            self._prepare(call.target)
        self._last = call
        if self._verbose:
            print(shown, flush=True)
        began = time.monotonic()
        try:
            with dask.config.set(SETTINGS), _time_limit(HUNG_SECONDS):
                self._run(call.text)
            outcome = "worked"
        except errors.ClusterEnvError as error:
            outcome = type(error).__name__
        except (Exception, Hung) as error:
            outcome = f"{type(error).__name__}, which is not ours"
            report.failures.append(f"{shown}\n        {_told(error)}")
        took = time.monotonic() - began
        report.outcomes[outcome] += 1
        if took > SLOW_SECONDS:
            report.slow.append(f"{took:5.1f} s {outcome}\n{shown}")
        if not wait_until(lambda: not self._left()):
            report.failures.append(f"{shown}\n        left {self._left()}")
            self._before = footprint()

    def _left(self) -> dict[str, set[str]]:
        """Return what was left behind; Dask's client keeps connections to workers, to use again."""
        left = left_behind(self._before)
        workers = [f"port={address.rpartition(':')[2]})" for address in self._workers]
        connections = left.pop("connections", set())
        connections = {c for c in connections if not any(worker in c for worker in workers)}
        return left | ({"connections": connections} if connections else {})

    def _run(self, text: str) -> None:
        """Make a call, and close what it returns."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's, torch's and Minari's, about odd values
            result = eval(text, self.names)
        ours = [self.names[name] for name in ("client", *_MADE)]
        if hasattr(result, "close") and not any(result is each for each in ours):
            result.close()

    def _prepare(self, target: Target) -> None:
        self._make()
        exec(target.before, self.names)

    def _make(self) -> None:
        """Make objects that are missing, or that a call has closed."""
        missing = [n for n in _MADE if n not in self.names or self.names[n].closed]
        for name in missing:
            self.names[name] = _MADE[name](self.names)
        if missing:
            self._before = footprint()


def _told(error: BaseException) -> str:
    """Return what was raised, and by which line of the library."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "clusterenv/" in f.filename]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise ``Hung`` in the main thread after so many seconds; pytest uses the other signal."""

    def stop(*_: object) -> None:
        raise Hung(f"still running after {seconds:g} s")

    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)


# The names in calls


class OfBatch(gym.Env[Any, Any]):
    """Has the spaces of the batches here."""

    def __init__(self) -> None:
        obs = Fleet(seed=1).next()[0].flat("obs")
        self.observation_space = spaces.Box(-np.inf, np.inf, obs.shape[1:], obs.dtype.type)
        self.action_space = spaces.Discrete(5)


class Agent(nn.Module):
    """Is as CleanRL's scripts have one."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(4, 2)

    def get_action_and_value(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = torch.zeros(len(obs))
        return zeros.long(), zeros, zeros, zeros


_MADE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "envs": lambda names: clusterenv.make_vec(World, 4, shards=2, cluster=names["client"]),
    "collector": lambda names: clusterenv.Collector(
        "CartPole-v1", names["policy"], num_envs=4, horizon=4, shards=2, cluster=names["client"]
    ),
    "store": lambda _: filled(ReplayStore(200, sampler=Prioritized(), seed=1)),
    "journaled": lambda names: filled(ReplayStore(200, journal=names["here"] / "journal")),
    "journal": lambda names: Journal(names["here"] / "append"),
}
"""Objects that calls are made on, and how they are made."""


def _names(client: Client, here: Path) -> dict[str, Any]:
    batch = Fleet(seed=1).next()[0]
    (here / "a-file").write_text("no store")
    (here / "empty").mkdir()
    with filled(ReplayStore(100)) as store:
        store.save(here / "saved")
    policies.save_policy(policies.Categorical(nn.Linear(4, 2)), here / "policy.pt")
    with warnings.catch_warnings(action="ignore"):  # Minari misses an author and a link
        recorded = clusterenv.to_minari(here / "saved", "fuzz/recorded-v0", env=OfBatch())
    modules = (clusterenv, gym, minari, nn, np, os, policies, spaces, threading, torch)
    named: tuple[Any, ...] = (
        *(Decimal, Fraction, datetime, World, OfBatch),
        *(Journal, NStep, Prioritized, Ratio, Recent, ReplayStore, Sequences, Stack, Uniform),
        *(acted, collected, gathered, learned, received, sampled, settled, written),
    )
    return {
        **{module.__name__.split(".")[-1]: module for module in modules},
        **{each.__name__: each for each in named},
        "gym": gym,
        "np": np,
        "nan": float("nan"),
        "inf": float("inf"),
        "client": client,
        "here": here,
        "a_file": here / "a-file",
        "saved": here / "saved",
        "batch": batch,
        "other_batch": Fleet(Frames(), seed=2).next()[0],
        "schema": batch.record_batch.schema,
        "policy": policies.Categorical(nn.Linear(4, 2)),
        "agent": Agent(),
        "rollouts": clusterenv.RolloutStore(),
        "recorded": recorded,
    }


# What is done with what a call returns: a wrong argument must not be found out so late


def acted(policy: policies.Policy) -> None:
    policy.act(torch.zeros(3, 4), policies.Context(torch.arange(3)))


def collected(collector: clusterenv.Collector) -> None:
    with collector:
        collector.rollout()


def filled(store: ReplayStore) -> ReplayStore:
    batches = Fleet(seed=1)
    while len(store) < 40:
        store.add(batches.next()[0])
    return store


def gathered(store: clusterenv.RolloutStore) -> None:
    store.add(Fleet(seed=1).next()[0], newest_version=1)
    store.take()


def learned(store: ReplayStore) -> None:
    with store:
        store.add(Fleet(seed=1).next()[0])
        store.sample(None if isinstance(store.sampler, Recent) else 1)


def received(envs: clusterenv.ClusterEnv, _: None) -> None:
    with contextlib.suppress(errors.NothingSent):
        while True:
            envs.recv()


def sampled(sampler: Sampler, n: int | None = 4) -> None:
    with ReplayStore(100, sampler=sampler) as store:
        filled(store).sample(n)


def settled(call: Callable[[], Any], wait: Callable[[], Any]) -> None:
    try:
        call()
    finally:
        with contextlib.suppress(errors.ClusterEnvError):  # a wrong call has taken nothing
            wait()


def written(journal: Journal) -> None:
    with contextlib.closing(journal):
        journal.append(Fleet(seed=1).next()[0])
        journal.commit()


def main() -> None:
    """Start a cluster, and make the calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="make call N alone")
    parser.add_argument("--verbose", action="store_true", help="print each call before it is made")
    options = parser.parse_args()
    tests = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    logging.getLogger("clusterenv").setLevel(logging.ERROR)
    indices = range(options.calls)
    if options.only is not None:
        indices = range(options.only, options.only + 1)
    with (
        tempfile.TemporaryDirectory() as directory,
        contextlib.chdir(directory),
        clusterenv.connect("local", n_workers=2) as client,
    ):
        os.environ["MINARI_DATASETS_PATH"] = directory
        fuzz = Fuzz(client, Path(directory), options.seed, verbose=options.verbose)
        with contextlib.redirect_stdout(sys.stderr):  # Minari prints what it deletes
            report = fuzz.run(indices)
        fuzz.close()
    print(report)
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
