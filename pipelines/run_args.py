"""Arguments that all learners share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import clusterenv
from clusterenv.sync import SyncRule
from pipelines import ranges

__all__ = ["FREE", "RunArgs", "survival", "sync_rule"]

# Arguments that may change when a run is resumed.
FREE = (
    *("total_steps", "stop_at", "shards", "cluster", "threads", "checkpoint_every"),
    *("restarts", "restart_wait", "env_faults", "out", "wandb", "dashboard", "quiet"),
    *("evaluate_every", "evaluate_episodes"),
)


@dataclass(frozen=True)
class RunArgs:
    """Arguments of a run; each learner adds its own."""

    env: str = "CartPole-v1"  # id of a Gymnasium environment
    total_steps: int = 200_000  # environment steps, summed over all environments
    num_envs: int = 8  # environments, summed over all shards
    horizon: int = 16  # steps of each environment in a batch
    shards: int | None = None  # worker processes; one per core if not given
    cluster: str | None = None  # scheduler address, file or jobqueue name; else this machine
    engine: str = "auto"  # what steps the environments
    sync: Literal["every-version", "every", "divergence", "never"] = "divergence"  # when to pull
    threshold: float = 0.01  # with --sync divergence: pull above this divergence
    every: int = 4  # with --sync every: pull when this many versions behind
    max_lag: int | None = None  # with --sync divergence: pull when more versions behind
    restarts: int = 5  # of a shard within 10 minutes; the next loss ends the run
    restart_wait: float = 60.0  # longest wait before a restart, in seconds
    env_faults: int = 5  # of one environment within 10 minutes; after each it is rebuilt
    seed: int = 1  # environment i gets seed + i
    threads: int = 1  # torch threads at the head; the workers need the other cores
    evaluate_every: int | None = None  # steps between evaluations beside training; default: none
    evaluate_episodes: int = 20  # of each evaluation, without exploration
    stop_at: float | None = None  # stop at this mean return: evaluated, or of the last episodes
    out: Path | None = None  # run directory; default: one under runs/
    wandb: bool = False  # log to Weights & Biases too; needs clusterenv[wandb]
    dashboard: bool = False  # show each shard on Dask's dashboard, on port 8787 of this machine
    quiet: bool = False  # print nothing

    def __post_init__(self) -> None:
        counts = ("total_steps", "num_envs", "horizon", "shards", "every", "max_lag", "threads")
        ranges.check(self, ranges.COUNT, *counts, "evaluate_every", "evaluate_episodes")
        ranges.check(self, ranges.NOT_NEGATIVE, "restarts", "env_faults", "seed")
        ranges.check(self, ranges.LIMIT, "threshold", "restart_wait")
        ranges.check(self, ranges.FINITE, "stop_at")
        ranges.check_shards(self.num_envs, self.shards)


def survival(args: RunArgs) -> dict[str, Any]:
    """Return the restart and fault budgets for a collector."""
    wait = args.restart_wait
    return {
        "restarts": clusterenv.Restarts(args.restarts, backoff=min(1.0, wait), backoff_max=wait),
        "env_faults": clusterenv.EnvFaults(args.env_faults),
    }


def sync_rule(args: RunArgs) -> SyncRule:
    """Return the rule that the arguments name."""
    rules: dict[str, SyncRule] = {
        "every-version": clusterenv.EveryVersion(),
        "every": clusterenv.Every(args.every),
        "divergence": clusterenv.Divergence(args.threshold, max_lag=args.max_lag),
        "never": clusterenv.Never(),
    }
    return rules[args.sync]
