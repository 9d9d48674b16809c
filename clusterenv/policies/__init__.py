"""The policy protocol, and adapters for networks and agents of other libraries."""

from __future__ import annotations

from clusterenv.policies.adapters import (
    Categorical,
    CleanRL,
    EpsilonGreedy,
    Gaussian,
    PaperAgent,
    Random,
)
from clusterenv.policies.base import Context, Decision, Policy

__all__ = [
    "Categorical",
    "CleanRL",
    "Context",
    "Decision",
    "EpsilonGreedy",
    "Gaussian",
    "PaperAgent",
    "Policy",
    "Random",
]
