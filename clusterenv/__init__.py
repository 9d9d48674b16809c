"""Spread reinforcement-learning simulation over a Dask cluster; keep the learner as it is."""

from __future__ import annotations

from clusterenv import config as _config  # loads the defaults into Dask's configuration
from clusterenv import errors, policies, returns
from clusterenv.batch import Batch, Rollout
from clusterenv.cluster import connect
from clusterenv.collector import Collector
from clusterenv.stats import Stats
from clusterenv.store import ReplayStore, RolloutStore, open_dataset, to_minari
from clusterenv.supervision import EnvFaults, Restarts
from clusterenv.sync import Divergence, Every, EveryVersion, Never
from clusterenv.vector import ClusterEnv, make_vec

__all__ = [
    "Batch",
    "ClusterEnv",
    "Collector",
    "Divergence",
    "EnvFaults",
    "Every",
    "EveryVersion",
    "Never",
    "ReplayStore",
    "Restarts",
    "Rollout",
    "RolloutStore",
    "Stats",
    "__version__",
    "connect",
    "errors",
    "make_vec",
    "open_dataset",
    "policies",
    "returns",
    "to_minari",
]
__version__ = "0.1.0"
del _config
