"""The learners there are: those of this package, and those that other packages register."""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.experiment.algorithm import Algorithm

__all__ = ["ABOUT", "GROUP", "learners", "load"]

GROUP = "clusterenv.learners"
"""Entry points of other packages: ``a2c = "my_package.a2c:A2C"``."""
ABOUT = {
    "ppo": "train by PPO, the policy on the workers",
    "dqn": "train by double DQN from a replay store",
    "apex": "train by Ape-X, an epsilon per environment",
    "r2d2": "train by R2D2, an LSTM from stored sequences",
    "impala": "train by IMPALA, whose actors do not wait",
    "episodic_memory": "train by IMPALA with a memory of what is rare",
    "impact": "train by IMPACT, IMPALA with a target network",
    "vmpo": "train by V-MPO, the better half of the actions",
    "sac": "train by SAC, continuous actions from a replay store",
}
CLASSES = {
    "ppo": "PPO",
    "dqn": "DQN",
    "apex": "Apex",
    "r2d2": "R2D2",
    "impala": "IMPALA",
    "episodic_memory": "MemoryIMPALA",
    "impact": "IMPACT",
    "vmpo": "VMPO",
    "sac": "SAC",
}


def learners() -> dict[str, EntryPoint]:
    """Return all learners by name, without importing any."""
    ours = {name: EntryPoint(name, f"pipelines.{name}:{CLASSES[name]}", GROUP) for name in ABOUT}
    return {entry.name: entry for entry in entry_points(group=GROUP)} | ours


def load(name: str) -> type[Algorithm[Any, Any]]:
    """Return a learner's class.

    Raises
    ------
    ConfigError
        If there is none of this name, it cannot be imported, or it lacks something.
    """
    # Here, as --help needs none of it.
    from clusterenv.errors import ConfigError
    from pipelines.experiment.algorithm import check_algorithm

    known = learners()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1) or sorted(known)
        raise ConfigError(f"{name!r} is no learner that is installed; there is {', '.join(close)}")
    try:
        found = known[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the learner {name!r} of {known[name].value} cannot be imported: {error}"
        ) from error
    return check_algorithm(found)
