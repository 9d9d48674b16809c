"""How many shards a collector has, how far they run ahead, and how often they are restarted."""

from __future__ import annotations

from dataclasses import dataclass, field

from clusterenv.data.checks import check_whole
from clusterenv.errors import ConfigError
from clusterenv.head.fleet.arguments import check_restarts, check_shards
from clusterenv.head.fleet.restarts import Restarts

__all__ = ["CollectorOptions"]

_MOST_CREDITS = 1024


@dataclass(frozen=True)
class CollectorOptions:
    """The arguments of a ``Collector`` that only the head needs.

    Raises
    ------
    ConfigError
        If one of them is no such argument.
    """

    shards: int | None = None
    """At the start; ``None`` for one on each worker."""
    max_shards: int | None = None
    """If workers join; ``None`` for as many as at the start."""
    credits: int = 2
    """Fragments that each shard may be ahead of the reader."""
    restarts: Restarts = field(default_factory=Restarts)

    def __post_init__(self) -> None:
        why = "with one a shard waits for the head; each is a fragment in the head's memory"
        check_whole("credits", self.credits, "credits=2", least=2, most=_MOST_CREDITS, why=why)
        check_restarts(self.restarts)
        if self.max_shards is None:
            return
        least = self.shards or 1
        check_shards("max_shards", self.max_shards, f"max_shards={2 * least}")
        if self.max_shards < least:
            raise ConfigError(
                f"max_shards must be at least shards={least}, got {self.max_shards}: "
                f"max_shards={2 * least}"
            )
