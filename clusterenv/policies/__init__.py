"""The policy protocol, and adapters for networks and agents of other libraries."""

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
from clusterenv.policies.policy import Context, Decision, Policy
from clusterenv.policies.saved import load_policy, save_policy
from clusterenv.policies.squashed import SquashedGaussian, SquashedNormal

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
    "SquashedGaussian",
    "SquashedNormal",
    "load_policy",
    "save_policy",
]
