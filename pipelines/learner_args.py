"""What can be chosen for a learner with a replay store, however its data is collected."""

from __future__ import annotations

from dataclasses import dataclass

from clusterenv.errors import ConfigError
from pipelines.run_args import RunArgs, refused

__all__ = ["FREE", "LearnerArgs"]

# Arguments that may change when a run goes on.
FREE = (
    *("total_steps", "stop_at", "shards", "cluster", "threads", "log_every", "checkpoint_every"),
    *("restarts", "restart_wait", "env_faults", "out", "wandb", "dashboard", "quiet"),
)


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
        positive = (
            *("n_step", "batch", "rows_per_update"),
            *("min_rows", "capacity", "target_every", "publish_every"),
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
