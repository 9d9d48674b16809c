"""What can be chosen for a learner with a replay store, however its data is collected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import clusterenv
from clusterenv.errors import ConfigError
from clusterenv.sync import SyncRule

__all__ = ["FREE", "LearnerArgs", "refused", "survival", "sync_rule"]

# Arguments that may change when a run goes on.
FREE = (
    *("total_steps", "stop_at", "shards", "cluster", "threads", "log_every", "checkpoint_every"),
    *("restarts", "restart_wait", "env_faults", "out", "wandb", "dashboard", "quiet"),
)


@dataclass(frozen=True)
class LearnerArgs:
    """Arguments of the learner; others say how its data is collected."""

    env: str = "CartPole-v1"  # id of a Gymnasium environment
    total_steps: int = 200_000  # environment steps, all environments together
    num_envs: int = 8  # environments, all shards together
    horizon: int = 16  # steps of each environment in a batch
    shards: int | None = None  # worker processes; one per core if not given
    cluster: str | None = None  # scheduler address, file or jobqueue name; else this machine
    engine: str = "auto"  # what steps the environments on the workers
    sync: Literal["every-version", "every", "divergence", "never"] = "every-version"  # when to pull
    threshold: float = 0.01  # of --sync divergence: pull when diverged further
    every: int = 4  # of --sync every: pull when this many versions behind
    max_lag: int | None = None  # of --sync divergence: pull when further behind
    temperature: float = 1.0  # of the softmax of values that --sync divergence compares
    seed: int = 1  # environment i gets seed + i
    lr: float = 1e-3  # of Adam
    anneal: bool = False  # bring the learning rate down to 0 linearly
    gamma: float = 0.99  # discount per step
    n_step: int = 1  # steps of a return before it is bootstrapped
    batch: int = 256  # rows of an update
    rows_per_update: int = 8  # rows collected for each update: neither side runs ahead
    min_rows: int = 1_000  # rows collected before the first update
    capacity: int = 100_000  # rows that the store holds
    target_every: int = 1  # updates between two moves of the target network
    tau: float = 0.005  # how far it moves towards the learner's; 1 copies it
    publish_every: int = 16  # updates between two versions
    prioritized: bool = False  # sample in proportion to the errors
    alpha: float = 0.6  # of --prioritized: power of the errors
    beta: float = 0.4  # of --prioritized: power of the weights at first; 1 in the end
    duelling: bool = False  # heads for state value and advantages
    grad_norm: float = 10.0  # gradients are scaled down to this norm
    hidden: tuple[int, ...] = (128, 128)  # layers
    restarts: int = 5  # of a lost shard within 10 minutes; one loss more ends the run
    restart_wait: float = 60.0  # seconds: the longest wait before a shard is placed again
    env_faults: int = 5  # of one environment within 10 minutes; each time it is rebuilt
    threads: int = 1  # of torch at the head; the workers need the other cores
    log_every: int = 2_000  # steps between two rows of progress.csv
    checkpoint_every: int = 10_000  # steps between two commits of rows and learner
    stop_at: float | None = None  # stop when the last episodes' mean return reaches this
    out: Path | None = None  # run directory; default: under runs/, the same for the same command
    wandb: bool = False  # log to Weights & Biases too; needs clusterenv[wandb]
    dashboard: bool = False  # show each shard on Dask's dashboard, on port 8787 of this machine
    quiet: bool = False  # print nothing

    def __post_init__(self) -> None:
        positive = (
            *("total_steps", "num_envs", "horizon", "every", "n_step", "batch", "rows_per_update"),
            *("min_rows", "capacity", "target_every", "publish_every", "threads"),
            *("log_every", "checkpoint_every", "lr", "tau", "temperature", "grad_norm"),
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise refused(name, getattr(self, name), "above 0", 8)
        for name, example in (("gamma", 0.99), ("tau", 0.005), ("alpha", 0.6), ("beta", 0.4)):
            if not 0 <= getattr(self, name) <= 1:
                raise refused(name, getattr(self, name), "from 0 to 1", example)
        if self.min_rows > self.capacity:
            raise ConfigError(
                f"--min-rows {self.min_rows} are never there with --capacity {self.capacity}: "
                f"--min-rows {max(1, self.capacity // 10)}"
            )


def refused(name: str, value: float, wanted: str, example: float) -> ConfigError:
    """Return the error of an argument, with one that would do."""
    flag = f"--{name.replace('_', '-')}"
    return ConfigError(f"{flag} must be {wanted}, got {value}: {flag} {example}")


def survival(args: LearnerArgs) -> dict[str, Any]:
    """Return what a collector shall do about losses and faults."""
    wait = args.restart_wait
    return {
        "restarts": clusterenv.Restarts(args.restarts, backoff=min(1.0, wait), backoff_max=wait),
        "env_faults": clusterenv.EnvFaults(args.env_faults),
    }


def sync_rule(args: LearnerArgs) -> SyncRule:
    """Return the rule that the arguments name."""
    rules: dict[str, SyncRule] = {
        "every-version": clusterenv.EveryVersion(),
        "every": clusterenv.Every(args.every),
        "divergence": clusterenv.Divergence(args.threshold, max_lag=args.max_lag),
        "never": clusterenv.Never(),
    }
    return rules[args.sync]
