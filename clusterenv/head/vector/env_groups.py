"""Groups of environments of one shard, which one request addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clusterenv.data.pickling import dumps
from clusterenv.errors import ConfigError
from clusterenv.head.vector.result import Rows
from clusterenv.transport.messages import StepRequest

if TYPE_CHECKING:
    from clusterenv.head.fleet.fleet import Fleet

__all__ = ["EnvGroup", "EnvGroups"]


class EnvGroup(NamedTuple):
    """Environments of one shard that are stepped together."""

    shard: int
    span: slice
    """Global indices of all environments of the shard."""
    ids: Rows
    """Global indices of the group; read-only, as ``recv`` hands them out."""
    rows: slice | Rows | None
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

    def split(self, ids: Rows) -> Iterator[tuple[EnvGroup, slice | Rows]]:
        """Yield the groups of some environments, and their positions in ``ids``."""
        shards = self._shard_of[ids]
        if (shards == shards[0]).all():
            yield self.of(int(shards[0]), ids), slice(None)
            return
        for shard in np.unique(shards).tolist():
            at = np.flatnonzero(shards == shard)
            yield self.of(shard, ids[at]), at

    def of(self, shard: int, ids: Rows) -> EnvGroup:
        """Return the group of some environments of one shard."""
        handle = self._fleet.handles[shard]
        places: Rows = ids - handle.share.first
        rows: slice | Rows = places
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
