"""Policies: the protocol, and adapters for what people already have."""

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
