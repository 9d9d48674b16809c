"""Policies: the protocol, and adapters for what people already have."""

from __future__ import annotations

from clusterenv.data.fragment import Fragment
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
    "Fragment",
    "Gaussian",
    "PaperAgent",
    "Policy",
    "Random",
]
