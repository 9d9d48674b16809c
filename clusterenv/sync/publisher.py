"""The head's side of synchronization: policy versions, their divergences and their weights."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from clusterenv.data.buffer_pool import BufferPool
from clusterenv.data.pickling import dumps, loads
from clusterenv.data.spaces import Column, Layout
from clusterenv.policies.policy import Context, Policy
from clusterenv.sync.announcement import Announcement
from clusterenv.sync.divergence import Probe, mean_divergence
from clusterenv.sync.rules import SyncRule
from clusterenv.sync.weights import (
    Weights,
    assign_views,
    check_numbers,
    holds,
    manifest_of,
    pack,
    tensors,
)

__all__ = ["Prepared", "Publisher"]

_PROBE = 128
_EVALUATED_PARAMETERS = 2**25  # parameters × observations


def _probe_size(policy: nn.Module) -> int:
    """Return how many observations versions of a policy are compared on.

    >>> _probe_size(nn.Linear(8, 4)), _probe_size(nn.Linear(1000, 1000))
    (128, 33)
    """
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    return min(_PROBE, max(16, _EVALUATED_PARAMETERS // max(1, parameters)))


class Prepared(NamedTuple):
    """A version that can become the newest."""

    weights: Weights
    scalars: Mapping[str, float]
    divergences: dict[int, float]
    """From each version in use to this one."""
    changed: bool
    """Whether its weights differ from those of the version before."""


class Publisher:
    """Numbers policy versions and computes how far those in use have diverged from the newest.

    It keeps the weights of the newest version and of every version that a shard acts with, so
    no weights travel to find out whether weights must travel. Versions are compared on 128
    observations, or fewer, down to 16, for a policy of more than 2**18 parameters, which bounds
    the cost of a publish. ``in_use`` returns the versions that shards act with.
    """

    def __init__(
        self,
        policy: Policy,
        rule: SyncRule,
        observations: Layout,
        in_use: Callable[[], Collection[int]],
        version: int = 0,
    ) -> None:
        # Not copy.deepcopy: what travels to the workers can be pickled, and that is enough.
        self._scratch: Policy = loads(dumps(policy)).eval()
        self._rule = rule
        self._layout = observations
        self._obs_names = [leaf.name("obs") for leaf in observations.leaves if leaf.is_array]
        self._manifest = manifest_of(policy)
        self.probe = Probe(_probe_size(policy))
        self.version = version
        self._same_since = version
        self._in_use = in_use
        self.announcements = 0
        self.evaluation_seconds = 0.0
        self._evaluated: dict[int, Distribution] = {}
        self._observations: Any = None
        self._context: Context
        self._scalars: dict[str, float] = {}  # that the probe was evaluated with
        self._published: dict[str, float] = {}
        self._probed = 0
        self._seen: tuple[Weights, dict[str, Tensor]] | None = None
        self._pool = BufferPool()
        first = pack(policy, self._manifest, version, self._pool)
        self._kept: dict[int, Weights] = {version: first}
        self.announced = Announcement(version, {}, {}, version, first.digest)
        """The newest announcement."""
        self.requested: Announcement | None = None
        """The newest when a rollout was requested that is not complete; ``None`` without one."""
        self._held: frozenset[int] = frozenset()  # that the rollout may act with

    @property
    def newest(self) -> Weights:
        """The weights of the newest version."""
        return self._kept[self.version]

    def weights(self, version: int) -> Weights:
        """Return the weights of a version that is in use or requested."""
        return self._kept[version]

    def request(self) -> None:
        """Let a rollout be acted with versions of now, whatever is published until it is complete.

        The versions in use and the newest are kept until :meth:`release`. They are also compared
        with each version published meanwhile, whether shards have pulled by then or not.
        """
        self.requested = self.announced
        self._held = frozenset((*self._in_use(), self.version))

    def release(self) -> None:
        """Record that the rollout is complete."""
        self.requested, self._held = None, frozenset()

    def _used(self) -> set[int]:
        return {*self._in_use(), *self._held}

    def is_newest(self, policy: Policy) -> bool:
        """Whether a policy has the numbers of the newest version.

        They are compared, since torch does not count all changes: not those by fused optimisers,
        nor those through ``.data``.
        """
        newest = self.newest
        if self._seen is None or self._seen[0] is not newest:
            self._seen = newest, tensors(self._manifest, newest)
        return holds(policy, self._seen[1])

    def observe(
        self,
        obs: Sequence[Column],
        envs: Column,
        mask: Column | None = None,
        state: Mapping[str, Column] | None = None,
        take: int | None = None,
    ) -> None:
        """Keep some of what a policy acted on, if the rule wants versions to be compared.

        ``obs`` has the observations that are arrays, ``envs`` global env indices, ``mask`` the
        allowed actions. Where the ``state`` of a recurrent policy is not known, versions are
        compared at the initial state. By default a quarter of the probe is replaced.
        """
        if not self._rule.needs_divergence:
            return
        columns = dict(zip(self._obs_names, obs, strict=True))
        columns["env"] = envs.astype(np.int64, copy=False)
        if mask is not None:
            columns["action_mask"] = mask
        columns |= {f"state.{name}": column for name, column in (state or {}).items()}
        self.probe.add(columns, take)

    def publish(self, policy: Policy, scalars: Mapping[str, float]) -> Announcement:
        """Make a new version and return its announcement.

        Scalars that are not given keep their values. Raises ``ConfigError`` if the policy is
        another one, and ``Diverged`` if it has become NaN.
        """
        return self.commit(self.prepare(policy, scalars))

    def prepare(
        self,
        policy: Policy,
        scalars: Mapping[str, float],
        lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext(),  # noqa: B008
    ) -> Prepared:
        """Copy a new version's weights and compare it with those in use; nothing is published yet.

        :meth:`publish` is this and :meth:`commit`. ``lock`` guards what other threads change: the
        versions in use and the probe. It is never held while a policy is evaluated.
        """
        check_numbers(policy, self.version)
        scalars = {**self._published, **scalars}
        weights = pack(policy, self._manifest, self.version + 1, self._pool)
        newest, before = (each.buffer.view(np.int64) for each in (weights, self.newest))
        changed = not np.array_equal(newest, before)
        divergences: dict[int, float] = {}
        if self._rule.needs_divergence and len(self.probe):
            began = time.perf_counter()
            with lock:
                # Until the commit a shard may take up the newest version or the one requested.
                used = {*self._used(), self.version}
                kept = {version: self._kept.get(version) for version in used}
                rows = self.probe.rows() if self._probe_is_new(scalars) else None
            divergences = self._divergences(weights, kept, rows, scalars)
            self.evaluation_seconds += time.perf_counter() - began
        return Prepared(weights, scalars, divergences, changed)

    def commit(self, prepared: Prepared) -> Announcement:
        """Make a prepared version the newest; return its announcement."""
        weights, scalars, divergences, changed = prepared
        self.version = weights.version
        self._same_since = self.version if changed else self._same_since
        used = {*self._used(), self.version}
        kept = {**self._kept, self.version: weights}
        self._kept = {version: kept[version] for version in kept if version in used}
        self.announcements += 1
        self._published = dict(scalars)
        if divergences:
            # A shard may have got a version that was replaced while it was on its way.
            divergences = {version: divergences.get(version, math.inf) for version in self._used()}
        self.announced = Announcement(
            self.version, divergences, scalars, self._same_since, weights.digest
        )
        return self.announced

    def _divergences(
        self,
        newest: Weights,
        kept: Mapping[int, Weights | None],
        rows: Mapping[str, Column] | None,
        scalars: Mapping[str, float],
    ) -> dict[int, float]:
        """Return the divergence from each version in use to the weights that become the newest."""
        if rows is not None:
            self._take_probe(rows, scalars)
        self._evaluated = {v: d for v, d in self._evaluated.items() if v in kept}
        with torch.inference_mode():
            becomes = self._evaluate(newest)
            return {
                version: math.inf
                if weights is None
                else mean_divergence(self._evaluate(weights), becomes)
                for version, weights in kept.items()
            }

    def _probe_is_new(self, scalars: Mapping[str, float]) -> bool:
        """Whether all of the probe has been replaced since it was taken, or the scalars have.

        Until then the distributions of versions in use need not be computed again: a
        publish costs one evaluation, that of the new version.
        """
        if not self._evaluated or self._scalars != scalars:
            return True
        return self.probe.added - self._probed >= len(self.probe)

    def _take_probe(self, rows: Mapping[str, Column], scalars: Mapping[str, float]) -> None:
        """Compare versions on these rows from now on."""
        seen = {name: torch.from_numpy(column) for name, column in rows.items()}
        self._observations = self._layout.nest_arrays([seen[name] for name in self._obs_names])
        allowed = seen.get("action_mask")
        if allowed is None and isinstance(self._observations, dict):
            allowed = self._observations.get("action_mask")
        initial = self._scratch.initial_state(len(seen["env"]))
        state = {name: seen.get(f"state.{name}", tensor) for name, tensor in initial.items()}
        self._context = Context(seen["env"], scalars, state, allowed)
        self._probed, self._scalars = self.probe.added, dict(scalars)
        self._evaluated = {}

    def _evaluate(self, weights: Weights) -> Distribution:
        found = self._evaluated.get(weights.version)
        if found is None:
            assign_views(self._scratch, self._manifest, weights)
            found = self._scratch.distribution(self._observations, self._context)
            self._evaluated[weights.version] = found
        return found
