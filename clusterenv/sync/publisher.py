"""The head's side of synchronization: versions, divergences, and weights for those who ask."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from clusterenv.channel import dumps, loads
from clusterenv.lending import Lender
from clusterenv.policies.base import Context, Policy
from clusterenv.schema import Layout
from clusterenv.sync.client import Announcement
from clusterenv.sync.divergence import Probe, mean_divergence
from clusterenv.sync.rules import SyncRule
from clusterenv.sync.weights import Weights, check_numbers, holds, lend, manifest_of, pack, tensors

__all__ = ["Publisher", "probe_size"]

_PROBE = 128
_EVALUATED_PARAMETERS = 2**25  # parameters × observations


def probe_size(policy: nn.Module) -> int:
    """Return how many observations versions of a policy are compared on.

    >>> probe_size(torch.nn.Linear(8, 4)), probe_size(torch.nn.Linear(1000, 1000))
    (128, 33)
    """
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    return min(_PROBE, max(16, _EVALUATED_PARAMETERS // max(1, parameters)))


class Publisher:
    """Numbers policy versions and says how far those in use have diverged from the newest.

    It keeps the weights of every version that some shard still acts with, and of the
    newest; nobody sends weights to decide about weights.

    Parameters
    ----------
    probe
        Observations that versions are compared on. By default 128, and fewer, down to 16,
        for a policy of more than 2**18 parameters: what a publish costs is bounded.
    version
        Number of the policy.
    """

    def __init__(
        self,
        policy: Policy,
        rule: SyncRule,
        observations: Layout,
        shards: int,
        version: int = 0,
    ) -> None:
        # Not copy.deepcopy: what travels to the workers can be pickled, and that is enough.
        self._scratch: Policy = loads(dumps(policy)).eval()
        self._rule = rule
        self._layout = observations
        self._manifest = manifest_of(policy)
        self.probe = Probe(probe_size(policy))
        self.version = version
        self._same_since = version
        self.in_use = [version] * shards
        self.announcements = 0
        self.evaluation_seconds = 0.0
        self._evaluated: dict[int, Distribution] = {}
        self._observations: Any = None
        self._context: Context
        self._scalars: dict[str, float] = {}
        self._probed = 0
        self._seen: tuple[Weights, dict[str, Tensor]] | None = None
        self._lender = Lender()
        first = pack(policy, self._manifest, version, self._lender)
        self._kept: dict[int, Weights] = {version: first}

    @property
    def newest(self) -> Weights:
        """The weights of the newest version."""
        return self._kept[self.version]

    def is_newest(self, policy: Policy) -> bool:
        """Whether a policy has the numbers of the newest version.

        They are compared, since torch does not count all changes: not those by fused optimisers,
        nor those through ``.data``.
        """
        newest = self.newest
        if self._seen is None or self._seen[0] is not newest:
            self._seen = newest, tensors(self._manifest, newest)
        return holds(policy, self._seen[1])

    def publish(self, policy: Policy, scalars: Mapping[str, float]) -> Announcement:
        """Take a new version and return what the shards are told of it.

        Raises
        ------
        ConfigError
            If the policy is another one, or has become NaN.
        """
        check_numbers(policy, self.version)
        weights = pack(policy, self._manifest, self.version + 1, self._lender)
        newest, before = (each.buffer.view(np.int64) for each in (weights, self.newest))
        changed = not np.array_equal(newest, before)
        divergences: dict[int, float] = {}
        if self._rule.needs_divergence and len(self.probe):
            began = time.perf_counter()
            divergences = self._divergences(weights, scalars)
            self.evaluation_seconds += time.perf_counter() - began
        self.version = weights.version
        self._same_since = self.version if changed else self._same_since
        used = {*self.in_use, self.version}
        kept = {**self._kept, self.version: weights}
        self._kept = {version: kept[version] for version in kept if version in used}
        self.announcements += 1
        return Announcement(self.version, divergences, dict(scalars), self._same_since)

    def _divergences(self, newest: Weights, scalars: Mapping[str, float]) -> dict[int, float]:
        """Return the divergence from each version in use to the weights that become the newest."""
        self._refresh(scalars)
        with torch.inference_mode():
            becomes = self._evaluate(newest)
            found = {
                # A shard may have got a version that was replaced while it was on its way.
                version: mean_divergence(self._evaluate(self._kept[version]), becomes)
                if version in self._kept
                else math.inf
                for version in {*self.in_use}
            }
        self._evaluated[newest.version] = becomes
        return found

    def _refresh(self, scalars: Mapping[str, float]) -> None:
        """Take a new look at the probe when all of it has been replaced, or the scalars have.

        Until then the distributions of versions in use need not be computed again: a
        publish costs one evaluation, that of the new version.
        """
        known = self._evaluated and self._scalars == scalars
        if known and self.probe.added - self._probed < len(self.probe):
            self._evaluated = {v: d for v, d in self._evaluated.items() if v in self.in_use}
            return
        columns, envs, mask = self.probe.observations()
        self._observations = self._layout.nest([torch.from_numpy(column) for column in columns])
        allowed = None if mask is None else torch.from_numpy(mask)
        if allowed is None and isinstance(self._observations, dict):
            allowed = self._observations.get("action_mask")
        state = self._scratch.initial_state(len(envs))
        self._context = Context(torch.from_numpy(envs), scalars, state, allowed)
        self._probed, self._scalars = self.probe.added, dict(scalars)
        self._evaluated = {}

    def _evaluate(self, weights: Weights) -> Distribution:
        found = self._evaluated.get(weights.version)
        if found is None:
            lend(self._scratch, self._manifest, weights)
            found = self._scratch.distribution(self._observations, self._context)
            if weights.version in self.in_use:
                self._evaluated[weights.version] = found
        return found
