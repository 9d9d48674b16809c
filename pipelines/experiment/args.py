"""Options that all learners share; each learner adds its own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

import clusterenv
from clusterenv.errors import ConfigError
from clusterenv.sync import SyncRule
from pipelines.experiment.checks import (
    Bound,
    Count,
    Finite,
    Limit,
    Natural,
    Options,
    Positive,
    Queue,
    Share,
    check_shards,
)

__all__ = [
    "FREE",
    "ReplayArgs",
    "RolloutArgs",
    "RunArgs",
    "StreamArgs",
    "check_minibatches",
    "collector_options",
    "env_arguments",
]

FREE = (
    *("total_steps", "stop_at", "shards", "cluster", "threads", "log_every", "checkpoint_every"),
    *("inference", "device"),
    *("restarts", "restart_wait", "env_faults", "out", "fresh", "wandb", "dashboard", "quiet"),
    *("evaluate_every", "evaluate_episodes", "evaluate_env_args", "evaluate_splits", "lag_limit"),
)
"""Options that may change when a run is resumed."""


@dataclass(frozen=True)
class RunArgs(Options):
    """Options of a run."""

    env: str = "CartPole-v1"  # id of a Gymnasium environment
    total_steps: Count = 200_000  # environment steps, summed over all environments
    num_envs: Count = 8  # environments, summed over all shards
    horizon: Count = 16  # steps of each environment in a batch
    shards: Count | None = None  # worker processes; one per core if not given
    cluster: str | None = None  # scheduler address, file or jobqueue name; else this machine
    engine: str = "auto"  # what steps the environments
    inference: Literal["worker", "head"] = "worker"  # where the policy is evaluated
    device: str | None = None  # of the policy, with --inference head: cpu or cuda; default: cpu
    sync: Literal["every-version", "every", "divergence", "never"] = "divergence"  # when to pull
    threshold: Limit = 0.01  # with --sync divergence: pull above this divergence
    every: Count = 4  # with --sync every: pull when this many versions behind
    max_lag: Count | None = None  # with --sync divergence: pull when more versions behind
    restarts: Natural = 5  # of a shard within 10 minutes; the next loss ends the run
    restart_wait: Limit = 60.0  # longest wait before a restart, in seconds
    env_faults: Natural = 5  # of one environment within 10 minutes; after each it is rebuilt
    seed: Natural = 1  # environment i gets seed + i
    threads: Count = 1  # torch threads at the head; the workers need the other cores
    lr: Positive = 1e-3  # learning rate of Adam
    anneal: bool = False  # decrease the learning rate linearly to 0
    gamma: Share = 0.99  # discount per step
    grad_norm: Bound = 10.0  # clip gradients to this norm
    hidden: tuple[Count, ...] = (128, 128)  # hidden layers
    cnn: str | None = None  # over images: residual, nature, pooled or tiles:9; default: learner's
    publish_every: Count = 1  # updates between published versions
    evaluate_every: Count | None = None  # steps between evaluations beside training; default: none
    evaluate_episodes: Count = 20  # of each evaluation, without exploration
    evaluate_env_args: tuple[str, ...] = ()  # arguments of the evaluated environment: reward=score
    evaluate_splits: tuple[str, ...] = ()  # values of split to evaluate apart; default: none
    stop_at: Finite | None = None  # stop at this mean return: evaluated, or of the last episodes
    log_every: Count = 2_000  # steps between rows of progress.csv
    checkpoint_every: Count = 10_000  # steps between checkpoints
    init_from: Path | None = None  # directory of a run of this learner whose weights to start from
    out: Path | None = None  # run directory; default: one under runs/
    fresh: bool = False  # begin another run, even if one with these options has not finished
    wandb: bool = False  # log to Weights & Biases too; needs clusterenv[wandb]
    dashboard: bool = False  # show each shard on Dask's dashboard, on port 8787 of this machine
    quiet: bool = False  # print nothing

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shards(self.num_envs, self.shards)
        env_arguments(self.evaluate_env_args, "--evaluate-env-args")
        if self.device is not None and self.inference != "head":
            raise ConfigError(
                f"--device {self.device} is where the head evaluates the policy, and workers do: "
                f"--inference head --device {self.device}"
            )


@dataclass(frozen=True)
class RolloutArgs(RunArgs):
    """Options of learners that take each row once, in rollouts."""

    num_envs: Count = 16  # environments, summed over all shards
    horizon: Count = 128  # steps of each environment between updates
    overlap: bool = False  # collect the next rollout while the learner works, one version behind

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap and self.inference == "head":
            raise ConfigError(
                "--overlap collects exactly one version behind, and --inference head acts with the "
                "newest version in every step: --no-overlap"
            )


def check_minibatches(args: RunArgs, minibatches: int) -> None:
    """Raise if a minibatch of a rollout would have a single row: advantages need a deviation."""
    rows = args.num_envs * args.horizon
    if 2 * minibatches > rows:
        right = f"--minibatches {rows // 2}" if rows > 1 else "--horizon 128"
        raise ConfigError(
            f"--minibatches {minibatches} leaves fewer than 2 rows in each, of "
            f"{args.num_envs} environments × {args.horizon} steps: {right}"
        )


@dataclass(frozen=True)
class StreamArgs(RunArgs):
    """Options of learners that take fragments as they arrive."""

    num_envs: Count = 16  # environments, summed over all shards
    horizon: Count = 32  # steps of each environment in a fragment
    queue: Queue = 2  # fragments that each shard may be ahead of the learner
    lag_limit: Natural | None = None  # a fragment more versions behind ends the run


@dataclass(frozen=True)
class ReplayArgs(RunArgs):
    """Options of learners with a replay store."""

    n_step: Count = 1  # steps of a return before bootstrapping
    batch: Count = 256  # rows per update
    rows_per_update: Count = 8  # rows collected per update; limits collection and learner
    min_rows: Count = 1_000  # rows collected before the first update
    capacity: Count = 100_000  # rows that the store can hold
    prioritized: bool = False  # prioritised sampling by TD error
    alpha: Share = 0.6  # with --prioritized: exponent of the errors
    beta: Share = 0.4  # with --prioritized: initial exponent of the weights; grows to 1
    publish_every: Count = 16  # updates between published versions

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_rows > self.capacity:
            raise ConfigError(
                f"--min-rows {self.min_rows} are never there with --capacity {self.capacity}: "
                f"--min-rows {max(1, self.capacity // 10)}"
            )
        # As many shards as environments, if they are left to the cluster: the smallest batches.
        batch = self.horizon * math.ceil(self.num_envs / (self.shards or self.num_envs))
        if batch > self.capacity:
            raise ConfigError(
                f"--capacity {self.capacity} has no room for the {batch} rows that a shard sends "
                f"at once, by --horizon {self.horizon}: --capacity {10 * batch}"
            )


def env_arguments(words: Iterable[str], option: str) -> dict[str, Any]:
    """Return the arguments of an environment that an option gives, values as in YAML.

    Raises
    ------
    ConfigError
        If a word is no name and value.

    Examples
    --------
    >>> env_arguments(["reward=score", "stack=4"], "--env-args")
    {'reward': 'score', 'stack': 4}
    """
    arguments = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and equals):
            raise ConfigError(
                f"{option} {word} is no argument of an environment, which has a name and a value: "
                f"{option} reward=score"
            )
        try:
            arguments[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{option} {word}: {value} is no value in YAML: {option} reward=score"
            ) from error
    return arguments


def collector_options(args: RunArgs) -> dict[str, Any]:
    """Return the options of a run's collector."""
    rules: dict[str, SyncRule] = {
        "every-version": clusterenv.EveryVersion(),
        "every": clusterenv.Every(args.every),
        "divergence": clusterenv.Divergence(args.threshold, max_lag=args.max_lag),
        "never": clusterenv.Never(),
    }
    wait = args.restart_wait
    return {
        **{name: getattr(args, name) for name in ("num_envs", "horizon", "shards", "cluster")},
        "engine": args.engine,
        "sync": rules[args.sync] if args.inference == "worker" else None,
        "inference": args.inference,
        "device": args.device,
        "restarts": clusterenv.Restarts(args.restarts, backoff=min(1.0, wait), backoff_max=wait),
        "env_faults": clusterenv.EnvFaults(args.env_faults),
    }
