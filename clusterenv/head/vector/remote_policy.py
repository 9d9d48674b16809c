"""``ClusterEnv.step(policy)``: the policy acts beside the environments, one step at a time.

The head knows which version each shard has and how far it has diverged, so it sends weights
along with the step to those shards whose rule asks for them, and to no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterenv.data.pickling import dumps, pickled
from clusterenv.data.spaces import Array, Column, Layout
from clusterenv.errors import ConfigError
from clusterenv.head.fleet.roster import Roster
from clusterenv.policies.base import Policy
from clusterenv.simulation.masks import InfoMask
from clusterenv.sync.publisher import Publisher
from clusterenv.sync.rules import SyncRule, check_rule
from clusterenv.transport.messages import ActRequest

__all__ = ["RemotePolicy"]


class RemotePolicy:
    """The head's side: knows what each shard acts with."""

    def __init__(
        self, policy: Policy, rule: SyncRule, observations: Layout, roster: Roster, envs: int
    ) -> None:
        check_rule(rule, policy)
        self._pickled = pickled(policy)
        self._kind = type(policy)
        self._rule = rule
        self._roster = roster
        self._publisher = Publisher(policy, rule, observations, roster.versions_in_use)
        self._arrays = observations.arrays
        self._divergences: dict[int, float] = {}
        self._mask = InfoMask(envs)
        self._columns: dict[str, Column] = {}
        self.pulls = 0
        self.weight_bytes = 0

    def refresh(self, policy: Policy) -> None:
        """Make a new version if the policy's numbers were changed since the last step."""
        if type(policy) is not self._kind:
            raise ConfigError(
                f"step() got a {type(policy).__name__}, and a {self._kind.__name__} before; the "
                "shards go on with the one policy: make another ClusterEnv for another"
            )
        if not self._publisher.is_newest(policy):
            self._divergences = dict(self._publisher.publish(policy, {}).divergences)

    def request(self, shard: int) -> tuple[bytes, list[Array]]:
        """Return blob and body of the frame that makes a shard act."""
        publisher = self._publisher
        record = self._roster[shard]
        new = record.version is None  # begins with the newest version
        first = self._pickled if new else None
        held = record.version = record.version or 0
        lag = publisher.version - held
        if lag and (new or self._rule.should_pull(lag, self._divergences.get(held))):
            record.version = publisher.version
            buffer = publisher.newest.buffer
            self.pulls += 1
            self.weight_bytes += buffer.nbytes
            return dumps(tuple(ActRequest(first, publisher.version))), [buffer]
        return dumps(tuple(ActRequest(first, held))), []

    def complete(self, chosen: dict[str, Column], envs: int) -> dict[str, Column]:
        """Return what was chosen, with zeros if a lost shard had nobody to choose."""
        self._columns |= {name: values[:1] for name, values in chosen.items()}
        for name, like in self._columns.items():
            if name not in chosen:
                chosen[name] = np.zeros((envs, *like.shape[1:]), like.dtype)
        return chosen

    def observe(
        self, obs: list[Column], over: npt.NDArray[np.bool_], info: Mapping[str, Any]
    ) -> None:
        """Keep some observations and their action masks, to compare versions on.

        Not where an episode is over: the last observation may allow no action.
        """
        if not self._rule.needs_divergence:
            return
        self._mask.note(info)
        obs = [obs[k] for k in self._arrays]
        live, mask = np.flatnonzero(~over), self._mask.value
        if len(live) < len(over):
            obs = [column[live] for column in obs]
            mask = None if mask is None else mask[live]
        if len(live):
            self._publisher.observe(obs, live, mask, take=8)
