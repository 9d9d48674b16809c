"""The arguments of a ``Collector`` that only the head needs, checked."""

from __future__ import annotations

from dataclasses import dataclass

from clusterenv.data.checks import check_whole
from clusterenv.errors import ConfigError
from clusterenv.head.fleet.launch import check_shards
from clusterenv.head.fleet.restarts import Restarts

__all__ = ["CollectorOptions"]

_MOST_CREDITS = 1024


@dataclass(frozen=True)
class CollectorOptions:
    """The arguments of a ``Collector`` that only the head needs."""

    shards: int | None
    """At the start; ``None`` for one on each worker."""
    max_shards: int | None
    """If workers join; ``None`` for as many as at the start."""
    credits: int
    """Fragments that each shard may be ahead of the reader."""
    restarts: Restarts

    def __post_init__(self) -> None:
        why = "with one a shard waits for the head; each is a fragment in the head's memory"
        check_whole("credits", self.credits, "credits=2", least=2, most=_MOST_CREDITS, why=why)
        if self.max_shards is None:
            return
        least = self.shards or 1
        check_shards("max_shards", self.max_shards, f"max_shards={2 * least}")
        if self.max_shards < least:
            raise ConfigError(
                f"max_shards must be at least shards={least}, got {self.max_shards}: "
                f"max_shards={2 * least}"
            )
