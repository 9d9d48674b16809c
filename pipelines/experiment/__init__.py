"""The experiment runner: everything that a run needs around its algorithm."""

from __future__ import annotations

from pipelines.experiment.algorithm import Algorithm, Losses, ReplayAlgorithm, RolloutAlgorithm
from pipelines.experiment.args import ReplayArgs, RolloutArgs, RunArgs
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
    "main",
    "run",
    "train",
]
