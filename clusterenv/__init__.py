"""Spread reinforcement-learning simulation over a Dask cluster; keep the learner as it is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from clusterenv import config  # noqa: F401  # loads the defaults into Dask's configuration

if TYPE_CHECKING:
    from clusterenv import errors, policies, returns
    from clusterenv.cluster.connect import connect
    from clusterenv.data.batch import Batch, Rollout
    from clusterenv.data.tensordict import to_tensordict
    from clusterenv.head.collect.collector import Collector
    from clusterenv.head.evaluate.evaluator import Evaluator
    from clusterenv.head.evaluate.result import Evaluation
    from clusterenv.head.fleet.launch import env_spaces
    from clusterenv.head.fleet.restarts import Restarts
    from clusterenv.head.fleet.roster import ShardInfo
    from clusterenv.head.monitor.follower import follow
    from clusterenv.head.monitor.stats import Stats
    from clusterenv.head.vector.cluster_env import ClusterEnv
    from clusterenv.head.vector.make_vec import make_vec
    from clusterenv.head.vector.sb3 import SB3VecEnv as SB3VecEnv
    from clusterenv.policies.saved import load_policy, save_policy
    from clusterenv.simulation.env_faults import EnvFaults
    from clusterenv.store import ReplayStore, RolloutStore, from_minari, open_dataset, to_minari
    from clusterenv.sync.announcement import Announcement
    from clusterenv.sync.rules import Divergence, Every, EveryVersion, Never

# Without SB3VecEnv: ``from clusterenv import *`` must not need Stable-Baselines3.
__all__ = [
    "Announcement",
    "Batch",
    "ClusterEnv",
    "Collector",
    "Divergence",
    "EnvFaults",
    "Evaluation",
    "Evaluator",
    "Every",
    "EveryVersion",
    "Never",
    "ReplayStore",
    "Restarts",
    "Rollout",
    "RolloutStore",
    "ShardInfo",
    "Stats",
    "__version__",
    "connect",
    "env_spaces",
    "errors",
    "follow",
    "from_minari",
    "load_policy",
    "make_vec",
    "open_dataset",
    "policies",
    "returns",
    "save_policy",
    "to_minari",
    "to_tensordict",
]
__version__ = "0.1.0"

# The module of each name, imported when the name is first used: torch, pyarrow and distributed
# together take seconds, and ``clusterenv --help`` needs none of them.
_MODULES = {
    "cluster.connect": ("connect",),
    "data.batch": ("Batch", "Rollout"),
    "data.tensordict": ("to_tensordict",),
    "head.collect.collector": ("Collector",),
    "head.evaluate.result": ("Evaluation",),
    "head.evaluate.evaluator": ("Evaluator",),
    "head.fleet.launch": ("env_spaces",),
    "head.fleet.restarts": ("Restarts",),
    "head.fleet.roster": ("ShardInfo",),
    "head.monitor.follower": ("follow",),
    "head.monitor.stats": ("Stats",),
    "head.vector.cluster_env": ("ClusterEnv",),
    "head.vector.make_vec": ("make_vec",),
    "head.vector.sb3": ("SB3VecEnv",),
    "policies.saved": ("load_policy", "save_policy"),
    "simulation.env_faults": ("EnvFaults",),
    "store": ("ReplayStore", "RolloutStore", "from_minari", "open_dataset", "to_minari"),
    "sync.announcement": ("Announcement",),
    "sync.rules": ("Divergence", "Every", "EveryVersion", "Never"),
}
_DEFINED_IN = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = ("errors", "policies", "returns", "store", "sync")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"clusterenv.{name}")
    if name in _DEFINED_IN:
        value = getattr(importlib.import_module(f"clusterenv.{_DEFINED_IN[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'clusterenv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_DEFINED_IN, *_SUBMODULES})
