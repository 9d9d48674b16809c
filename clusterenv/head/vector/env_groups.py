"""Groups of environments that one request addresses, and the results that answers fill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from clusterenv.data.infos import VectorInfo, merge, merge_vector
from clusterenv.data.pickling import dumps
from clusterenv.data.spaces import Column, Layout
from clusterenv.errors import ConfigError
from clusterenv.simulation.engines.base import Infos, Slot
from clusterenv.transport.messages import StepRequest

if TYPE_CHECKING:
    from clusterenv.head.fleet.fleet import Fleet

__all__ = ["EnvGroup", "EnvGroups", "EnvIds", "Result"]

EnvIds = npt.NDArray[np.intp]
"""Indices of environments: of all, of a shard's, or of a result's rows."""


class EnvGroup(NamedTuple):
    """Environments of one shard that are stepped together."""

    shard: int
    span: slice
    """Global indices of all environments of the shard."""
    ids: EnvIds
    """Global indices of the group; read-only, as ``recv`` hands them out."""
    rows: slice | EnvIds | None
    """Indices of the group within the shard; ``None`` for all."""
    blob: bytes
    """Of a ``STEP`` with actions of the space's dtypes."""


class EnvGroups:
    """The groups of a fleet; those that a user sends repeatedly are cached."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        counts = [handle.share.count for handle in fleet.handles]
        self._shard_of = np.repeat(np.arange(len(counts)), counts)
        self.whole = [
            EnvGroup(handle.index, handle.span, handle.rows, None, b"") for handle in fleet.handles
        ]
        """All environments of each shard."""
        self._cache = {id(whole.ids): whole for whole in self.whole}

    def cached(self, ids: object) -> EnvGroup | None:
        """Return the group whose own array ``ids`` is, as ``recv`` handed it out."""
        return self._cache.get(id(ids))

    def split(self, ids: EnvIds) -> Iterator[tuple[EnvGroup, slice | EnvIds]]:
        """Yield the groups of some environments, and their positions in ``ids``."""
        shards = self._shard_of[ids]
        if (shards == shards[0]).all():
            yield self.of(int(shards[0]), ids), slice(None)
            return
        for shard in np.unique(shards).tolist():
            at = np.flatnonzero(shards == shard)
            yield self.of(shard, ids[at]), at

    def of(self, shard: int, ids: EnvIds) -> EnvGroup:
        """Return the group of some environments of one shard."""
        handle = self._fleet.handles[shard]
        places: EnvIds = ids - handle.share.first
        rows: slice | EnvIds = places
        if (places[1:] == places[:-1] + 1).all():  # neighbours: columns are viewed, not gathered
            rows = slice(int(places[0]), int(places[-1]) + 1)
            if rows == slice(0, handle.share.count):
                return self.whole[shard]
        if not self._fleet.description.partial:
            raise ConfigError(
                f"this engine steps whole shards: environments {handle.rows[0]} to "
                f"{handle.rows[-1]} together and in order, got {ids.tolist()}; "
                "pass info['env_id'] as recv() gave it"
            )
        ids.setflags(write=False)
        if len(self._cache) > 4 * len(self._shard_of):  # groups that are sent once fill it
            self._cache = {id(whole.ids): whole for whole in self.whole}
        blob = dumps(tuple(StepRequest(rows, None, [])))
        group = self._cache[id(ids)] = EnvGroup(shard, handle.span, ids, rows, blob)
        return group


class Result:
    """Arrays that answers are received into, and the infos that came with them."""

    def __init__(self, layout: Layout, n: int, ids: EnvIds | None = None) -> None:
        self.slot = Slot.empty(layout, n)
        self.n = n
        self.ids = ids
        """Global indices of the environments; ``None`` for all."""
        self._infos: dict[int, list[tuple[Any, EnvIds]]] = {}
        self.chosen: dict[str, Column] = {}
        self.states: list[tuple[EnvIds, dict[str, Column]]] = []
        """Some rows of each shard, and their policy's recurrent state there."""

    def report(self, shard: int, infos: Infos, places: EnvIds) -> None:
        """Add infos of a shard, given the rows that they belong to."""
        self._infos.setdefault(shard, []).append((infos, places))

    def take(self, other: Result, rows: EnvIds, places: EnvIds) -> None:
        """Copy rows of another result, and their infos, to the rows ``places`` of this one."""
        ours, theirs = ([*result.slot.obs, *result.slot[1:]] for result in (self, other))
        for column, values in zip(ours, theirs, strict=True):
            column[places] = values[rows]
        where = np.zeros(other.n, np.intp)
        where[rows] = places
        for shard, reports in other._infos.items():
            for infos, at in reports:
                self.report(shard, infos, where[at])

    def choose(self, chosen: dict[str, Column], into: slice) -> None:
        """Add the actions and other columns that the policy of a shard chose for some rows."""
        for name, values in chosen.items():
            if name not in self.chosen:
                self.chosen[name] = np.zeros((self.n, *values.shape[1:]), values.dtype)
            self.chosen[name][into] = values

    def info(self) -> dict[str, Any]:
        """Return all infos as Gymnasium's dictionary."""
        merged: dict[str, Any] = {}
        for shard in sorted(self._infos):  # answers arrive in any order
            for infos, places in self._infos[shard]:
                join: Any = merge_vector if isinstance(infos, VectorInfo) else merge
                join(merged, infos, places, self.n)
        return merged
