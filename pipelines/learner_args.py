"""What can be chosen for a learner with a replay store, however its data is collected."""

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
    """Arguments of the learner; others say how its data is collected."""

    temperature: float = 1.0  # of the softmax of values that --sync divergence compares
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
    log_every: int = 2_000  # steps between two rows of progress.csv
    checkpoint_every: int = 10_000  # steps between two commits of rows and learner

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
