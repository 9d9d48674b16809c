"""Stores: they collect batches and return their rows to a learner."""

from __future__ import annotations

from clusterenv.store.dataset import from_minari, open_dataset, to_minari
from clusterenv.store.journal.journal import Journal
from clusterenv.store.journal.snapshot import Snapshot, is_store, open_snapshot
from clusterenv.store.rate_limiter import Ratio
from clusterenv.store.replay import ReplayStore
from clusterenv.store.replay_buffer import ReplayStats
from clusterenv.store.rollout import Rollout, RolloutStats, RolloutStore
from clusterenv.store.samplers.nstep import NStep
from clusterenv.store.samplers.prioritized import Prioritized
from clusterenv.store.samplers.recent import Recent
from clusterenv.store.samplers.sampler import Draw, Sampler, Uniform
from clusterenv.store.samplers.sequences import Sequences
from clusterenv.store.table.stacks import Stack

__all__ = [
    "Draw",
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
    "Snapshot",
    "Stack",
    "Uniform",
    "from_minari",
    "is_store",
    "open_dataset",
    "open_snapshot",
    "to_minari",
]
