"""Arguments of learners with a replay store."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clusterenv.errors import ConfigError
from pipelines import ranges, run_args
from pipelines.run_args import RunArgs

__all__ = ["FREE", "LearnerArgs"]

FREE = (*run_args.FREE, "log_every")


@dataclass(frozen=True)
class LearnerArgs(RunArgs):
    """Arguments of the learner, on top of those of the run."""

    temperature: float = 1.0  # of the softmax over values that --sync divergence compares
    lr: float = 1e-3  # learning rate of Adam
    anneal: bool = False  # decrease the learning rate linearly to 0
    gamma: float = 0.99  # discount per step
    n_step: int = 1  # steps of a return before bootstrapping
    batch: int = 256  # rows per update
    rows_per_update: int = 8  # rows collected per update; limits collection and learner
    min_rows: int = 1_000  # rows collected before the first update
    capacity: int = 100_000  # rows that the store can hold
    target_every: int = 1  # updates between updates of the target network
    tau: float = 0.005  # step of the target network towards the learner's; 1 copies it
    publish_every: int = 16  # updates between published versions
    prioritized: bool = False  # prioritised sampling by TD error
    alpha: float = 0.6  # with --prioritized: exponent of the errors
    beta: float = 0.4  # with --prioritized: initial exponent of the weights; grows to 1
    duelling: bool = False  # separate state value and advantages
    grad_norm: float = 10.0  # clip gradients to this norm
    hidden: tuple[int, ...] = (128, 128)  # hidden layers
    log_every: int = 2_000  # steps between rows of progress.csv
    checkpoint_every: int = 10_000  # steps between commits of rows and learner

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = ("n_step", "batch", "rows_per_update", "min_rows", "capacity", "target_every")
        ranges.check(self, ranges.COUNT, *counts)
        ranges.check(self, ranges.COUNT, "publish_every", "hidden", "log_every", "checkpoint_every")
        ranges.check(self, ranges.POSITIVE, "lr", "temperature")
        ranges.check(self, ranges.BOUND, "grad_norm")
        ranges.check(self, ranges.SHARE, "gamma", "alpha", "beta")
        ranges.check(self, ranges.STEP, "tau")
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
