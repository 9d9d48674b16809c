"""The experiment runner: everything that a run needs around its algorithm."""

from __future__ import annotations

import pipelines.envs  # noqa: F401 - registers them
from pipelines.experiment.algorithm import (
    Algorithm,
    Losses,
    ReplayAlgorithm,
    RolloutAlgorithm,
    StreamAlgorithm,
    shuffled,
)
from pipelines.experiment.args import (
    ReplayArgs,
    RolloutArgs,
    RunArgs,
    StreamArgs,
    check_minibatches,
)
from pipelines.experiment.command import main, train
from pipelines.experiment.runner import Result, run

__all__ = [
    "Algorithm",
    "Losses",
    "ReplayAlgorithm",
    "ReplayArgs",
    "Result",
    "RolloutAlgorithm",
    "RolloutArgs",
    "RunArgs",
    "StreamAlgorithm",
    "StreamArgs",
    "check_minibatches",
    "main",
    "run",
    "shuffled",
    "train",
]
