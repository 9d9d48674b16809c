"""What a ``Collector`` is given, checked before anything starts."""

from __future__ import annotations

from typing import Any

from clusterenv.data.checks import check_choice, check_whole
from clusterenv.errors import ConfigError
from clusterenv.head.fleet.arguments import check_restarts, check_rule, check_shards
from clusterenv.head.fleet.launch import SWITCHES
from clusterenv.policies.base import Policy
from clusterenv.simulation.env_faults import EnvFaults
from clusterenv.simulation.policy_spaces import TEXT

__all__ = ["check_collector", "check_survival"]

_MOST_TIME_ROWS = 2**20
_MOST_CREDITS = 1024
_MOST_VERSION = 2**30


def check_collector(
    policy: Any,
    horizon: Any,
    credit: Any,
    rule: Any,
    seed: Any,
    switch: Any,
    version: Any,
    text: Any,
) -> None:
    """Raise ``ConfigError`` unless a collector can be made of these."""
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"policy is a {type(policy).__name__}; wrap it: "
            "clusterenv.policies.Categorical(module), Gaussian(module, action_space), "
            "EpsilonGreedy(q_module) or CleanRL(agent)"
        )
    check_whole("horizon", horizon, "horizon=128", least=1, most=_MOST_TIME_ROWS)
    why = "with one a shard waits for the head; each is a fragment in the head's memory"
    check_whole("credits", credit, "credits=2", least=2, most=_MOST_CREDITS, why=why)
    if seed is not None:
        check_whole("seed", seed, "seed=1")
    check_rule(rule, policy)
    why = "rows keep it in 32 bits, and it counts on from there"
    check_whole("version", version, "version=0", most=_MOST_VERSION, why=why)
    right = "switch='fragment' changes the policy between fragments, switch='step' between steps"
    check_choice("switch", switch, SWITCHES, right)
    right = "text='keep' makes it a column of strings, text='drop' leaves it out"
    check_choice("text", text, TEXT, right)


def check_survival(restarts: Any, env_faults: Any, shards: int | None, max_shards: Any) -> None:
    """Raise ``ConfigError`` unless these say what to do about losses and faults."""
    check_restarts(restarts)
    if not isinstance(env_faults, EnvFaults):
        raise ConfigError(
            f"env_faults={env_faults!r} is no rule: env_faults=clusterenv.EnvFaults(5)"
        )
    if max_shards is None:
        return
    least = shards or 1
    check_shards("max_shards", max_shards, f"max_shards={2 * least}")
    if max_shards < least:
        raise ConfigError(
            f"max_shards must be at least shards={least}, got {max_shards}: max_shards={2 * least}"
        )
