"""Stores: they gather the batches of a collector and hand their rows to a learner."""

from __future__ import annotations

from clusterenv.store.journal.dataset import open_dataset, to_minari
from clusterenv.store.journal.journal import Journal
from clusterenv.store.ratio import Ratio
from clusterenv.store.replay import ReplayStore
from clusterenv.store.rollout import Rollout, RolloutStats, RolloutStore
from clusterenv.store.samplers import NStep, Prioritized, Recent, Sampler, Sequences, Uniform
from clusterenv.store.sampling import ReplayStats
from clusterenv.store.table.stacks import Stack

__all__ = [
    "Journal",
    "NStep",
    "Prioritized",
    "Ratio",
    "Recent",
    "ReplayStats",
    "ReplayStore",
    "Rollout",
    "RolloutStats",
    "RolloutStore",
    "Sampler",
    "Sequences",
    "Stack",
    "Uniform",
    "open_dataset",
    "to_minari",
]
