"""What the head sends to start a shard, and what the shard answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from clusterenv.data.checks import check_choice, check_whole
from clusterenv.data.processes import this_process
from clusterenv.errors import ConfigError
from clusterenv.policies.policy import Policy, check_policy
from clusterenv.simulation.engines.base import EnvDescription
from clusterenv.simulation.env_faults import EnvFaults
from clusterenv.simulation.policy_spaces import TEXT
from clusterenv.sync.rules import SyncRule, check_rule
from clusterenv.transport.endpoint import Endpoint
from clusterenv.transport.framing import MESSAGE_LIMIT
from clusterenv.worker.tuning import Tune

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
    """Whether a head on the same machine may connect by a Unix socket."""
    message_limit: int = MESSAGE_LIMIT
    """Largest blob of a message, in bytes."""
    incarnation: int = 0
    """How often the shard was restarted."""
    fleet: str = ""
    """Name of the fleet that the shard belongs to."""
    tune: Tune = "auto"
    """Which worker processes may be tuned; see :mod:`clusterenv.worker.tuning`."""
    head: tuple[int, int] = field(default_factory=this_process)
    """The head's process, which may be the worker's too."""


class Opened(NamedTuple):
    """A shard that is ready: where its connection listens and what its environments are."""

    endpoint: Endpoint
    relay: Endpoint | None
    """Where other workers download weights from it, if they do."""
    description: EnvDescription
    seconds_left: float | None
    """Until the worker's lifetime or job ends, if that is known."""


_MOST_TIME_ROWS = 2**20
_MOST_VERSION = 2**30

SWITCHES = ("fragment", "step")
"""When a shard may change its policy version: between fragments, or between steps."""


@dataclass(frozen=True)
class StreamSpec:
    """What a shard needs to collect; raises ``ConfigError`` if it cannot."""

    policy: Policy
    rule: SyncRule
    horizon: int
    seed: int | None
    version: int
    switch: str = "fragment"
    """One of :data:`SWITCHES`."""
    env_faults: EnvFaults = field(default_factory=EnvFaults)
    relays: bool = False
    """Whether workers pass weights on to each other."""
    text: str = "refuse"
    """How text in observations is handled."""
    groups: int = 1
    """Groups of environments that are stepped in turn, if the policy is a ``HeadPolicy``."""

    def __post_init__(self) -> None:
        check_policy(self.policy)
        check_whole("horizon", self.horizon, "horizon=128", least=1, most=_MOST_TIME_ROWS)
        if self.seed is not None:
            check_whole("seed", self.seed, "seed=1")
        check_rule(self.rule, self.policy)
        why = "rows keep it in 32 bits, and it counts on from there"
        check_whole("version", self.version, "version=0", most=_MOST_VERSION, why=why)
        right = (
            "switch='fragment' changes the policy between fragments, switch='step' between steps"
        )
        check_choice("switch", self.switch, SWITCHES, right)
        right = "text='keep' makes it a column of strings, text='drop' leaves it out"
        check_choice("text", self.text, TEXT, right)
        if not isinstance(self.env_faults, EnvFaults):
            raise ConfigError(
                f"env_faults={self.env_faults!r} is no rule: env_faults=clusterenv.EnvFaults(5)"
            )
