"""Checks of arguments that ``ClusterEnv`` and ``Collector`` share."""

from __future__ import annotations

from typing import Any

from clusterenv.data.checks import check_whole
from clusterenv.errors import ConfigError
from clusterenv.head.fleet.restarts import Restarts

__all__ = ["check_counts", "check_restarts", "check_shards"]

_MOST_ENVS = 2**20
_MOST_SHARDS = 2**16


def check_restarts(restarts: Any) -> None:
    """Raise ``ConfigError`` unless this is a restart budget."""
    if not isinstance(restarts, Restarts):
        raise ConfigError(f"restarts={restarts!r} is no rule: restarts=clusterenv.Restarts(5)")


def check_counts(num_envs: Any, shards: Any) -> None:
    """Raise ``ConfigError`` unless so many environments can be split into so many shards."""
    check_whole("num_envs", num_envs, "make_vec(env, num_envs=8)", least=1, most=_MOST_ENVS)
    if shards is None:
        return
    check_shards("shards", shards, "make_vec(env, 8, shards=2)")
    if num_envs < shards:
        raise ConfigError(
            f"num_envs={num_envs} is less than shards={shards}: every shard needs an environment; "
            f"make_vec(…, num_envs={shards}, shards={shards}) or shards={num_envs}"
        )


def check_shards(name: str, shards: Any, right: str) -> None:
    """Raise ``ConfigError`` unless this is a number of shards."""
    check_whole(name, shards, right, least=1, most=_MOST_SHARDS)
