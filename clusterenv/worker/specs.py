"""What a shard is told when it starts, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from clusterenv.policies.base import Policy
from clusterenv.simulation.engines.base import EnvDescription
from clusterenv.simulation.env_faults import EnvFaults
from clusterenv.simulation.policy_rng import this_process
from clusterenv.sync.rules import SyncRule
from clusterenv.transport.connection import MESSAGE_LIMIT
from clusterenv.transport.endpoint import Endpoint

__all__ = ["SWITCHES", "Opened", "ShardSpec", "StreamSpec"]


@dataclass(frozen=True)
class ShardSpec:
    """One shard's share of the environments."""

    index: int
    first: int
    count: int
    ports: tuple[int, int] | None
    accept_timeout: float
    local: bool = True
    """Whether a head on the same machine may come by a Unix socket."""
    message_limit: int = MESSAGE_LIMIT
    """Largest message of its connections, in bytes."""
    incarnation: int = 0
    """How often the shard was placed before."""
    fleet: str = ""
    """To which other shards it belongs."""


class Opened(NamedTuple):
    """A shard that is ready: where its connection listens and what its environments are."""

    endpoint: Endpoint
    relay: Endpoint | None
    """Where other workers get weights from it, if they do."""
    description: EnvDescription
    seconds_left: float | None
    """Until the worker's lifetime or job ends, if that is known."""


SWITCHES = ("fragment", "step")
"""Between what a shard may change its policy."""


@dataclass(frozen=True)
class StreamSpec:
    """What a shard needs to collect."""

    policy: Policy
    rule: SyncRule
    horizon: int
    seed: int | None
    version: int
    switch: str = "fragment"
    """One of :data:`SWITCHES`."""
    env_faults: EnvFaults = field(default_factory=EnvFaults)
    relays: bool = False
    """Whether weights go from worker to worker too."""
    text: str = "refuse"
    """What becomes of text in observations."""
    head: tuple[int, int] = field(default_factory=this_process)
    """The head's process, which may be the worker's too."""
