"""``ClusterEnv.step(policy)``: the policy acts on the workers, one step at a time.

The head knows which version each shard has and how far it has diverged, so it sends weights with
the step to those shards that should pull by the rule. Versions are announced on the run's topic
for those who follow it; no worker needs to.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterenv.data.pickling import dumps, dumps_by_value
from clusterenv.data.spaces import Array, Column, Layout
from clusterenv.errors import ConfigError
from clusterenv.head.fleet.fleet import Fleet
from clusterenv.head.monitor.announcer import Announcer
from clusterenv.head.monitor.runs import register
from clusterenv.head.vector.env_groups import EnvIds
from clusterenv.policies.policy import Policy
from clusterenv.simulation.masks import InfoMask
from clusterenv.sync.publisher import Publisher
from clusterenv.sync.rules import SyncRule, check_rule
from clusterenv.transport.messages import ActRequest

__all__ = ["RemotePolicy"]

_PROBE_ROWS = 8  # observations per step that versions are compared on


class RemotePolicy:
    """The policy versions of ``step(policy)``, of which the first call's policy is the first."""

    def __init__(
        self, policy: Policy, rule: SyncRule, observations: Layout, fleet: Fleet, envs: int
    ) -> None:
        check_rule(rule, policy)
        roster = fleet.roster
        self._pickled = dumps_by_value(policy, "the policy")
        self._kind = type(policy)
        self._rule = rule
        self._roster = roster
        self._publisher = Publisher(policy, rule, observations, roster.versions_in_use)
        self._arrays = observations.arrays
        self._divergences: dict[int, float] = {}
        self._info_mask = InfoMask(envs)
        recurrent = type(policy).initial_state is not Policy.initial_state
        self._state_rows = (
            -(-_PROBE_ROWS // len(roster)) if rule.needs_divergence and recurrent else 0
        )
        self._columns: dict[str, Column] = {}
        self.pulls = 0
        self.weight_bytes = 0
        spec = fleet.description.spec
        entry = register(fleet.client, None, fleet.run, "step(policy)" if spec is None else spec.id)
        self._announcer = Announcer(fleet.client, entry, subscribers=lambda: 0)
        self._announce()

    def refresh(self, policy: Policy) -> None:
        """Publish a new version if the policy's weights have changed since the last step."""
        if type(policy) is not self._kind:
            raise ConfigError(
                f"step() got a {type(policy).__name__}, and a {self._kind.__name__} before; a "
                "ClusterEnv takes one policy: make another ClusterEnv for another"
            )
        if not self._publisher.is_newest(policy):
            self._divergences = dict(self._publisher.publish(policy, {}).divergences)
            self._announce()

    def _announce(self) -> None:
        newest = self._publisher.announced
        self._announcer.announce(newest._replace(time=time.time(), pulls=self.pulls))

    def close(self) -> None:
        """Tell those who follow that there are no more versions."""
        self._announcer.close()

    def request(self, shard: int) -> tuple[bytes, list[Array]]:
        """Return blob and body of the message that makes a shard act."""
        publisher = self._publisher
        record = self._roster[shard]
        new = record.version is None  # starts with the newest version
        first = self._pickled if new else None
        held = record.version = record.version or 0
        lag = publisher.version - held
        if lag and (new or self._rule.should_pull(lag, self._divergences.get(held))):
            record.version = publisher.version
            buffer = publisher.newest.buffer
            self.pulls += 1
            self.weight_bytes += buffer.nbytes
            return dumps(tuple(ActRequest(first, publisher.version, self._state_rows))), [buffer]
        return dumps(tuple(ActRequest(first, held, self._state_rows))), []

    def complete(self, chosen: dict[str, Column], envs: int) -> dict[str, Column]:
        """Return the chosen columns; if all shards were lost, zeros for those seen before."""
        self._columns |= {name: values[:1] for name, values in chosen.items()}
        for name, like in self._columns.items():
            if name not in chosen:
                chosen[name] = np.zeros((envs, *like.shape[1:]), like.dtype)
        return chosen

    def observe(
        self,
        obs: list[Column],
        over: npt.NDArray[np.bool_],
        info: Mapping[str, Any],
        states: Sequence[tuple[EnvIds, Mapping[str, Column]]] = (),
    ) -> None:
        """Sample observations of a step to compare versions on, with masks and recurrent states.

        Final observations are left out, since they may allow no action. ``states`` has, for some
        rows of each shard, the recurrent state that acts on them next; the rows of a recurrent
        policy are sampled from these alone.
        """
        if not self._rule.needs_divergence:
            return
        self._info_mask.update(info)
        mask, state = self._info_mask.value, {}
        rows = np.flatnonzero(~over)
        if self._state_rows:
            rows = np.concatenate([np.empty(0, np.intp), *(part for part, _ in states)])
            names = states[0][1] if states else ()
            state = {name: np.concatenate([part[name] for _, part in states]) for name in names}
        if len(rows):
            self._publisher.observe(
                [obs[k][rows] for k in self._arrays],
                rows,
                None if mask is None else mask[rows],
                state,
                take=_PROBE_ROWS,
            )
