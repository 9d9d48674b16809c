"""Which environments of a shard are asked together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from clusterenv.data.pickling import dumps
from clusterenv.errors import ConfigError
from clusterenv.head.fleet.fleet import Fleet
from clusterenv.head.vector.result import Rows
from clusterenv.transport.messages import StepRequest

__all__ = ["Group", "Groups"]


class Group(NamedTuple):
    """Environments of one shard that are stepped together."""

    shard: int
    span: slice
    """The environments of the whole shard."""
    ids: Rows
    """Their global indices; read-only, as ``recv`` hands them out."""
    rows: slice | Rows | None
    """Their rows in the shard; ``None``: all."""
    blob: bytes
    """What a request says of them if the actions are as the space says."""


class Groups:
    """The groups that a user sends, known again when they are sent again.

    Parameters
    ----------
    fleet
        The shards.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        counts = [handle.share.count for handle in fleet.handles]
        self._shard_of = np.repeat(np.arange(len(counts)), counts)
        self.whole = [
            Group(handle.index, handle.span, handle.rows, None, b"") for handle in fleet.handles
        ]
        """All environments of each shard."""
        self._known = {id(whole.ids): whole for whole in self.whole}

    def known(self, ids: object) -> Group | None:
        """Return the group whose own ``ids`` these are."""
        return self._known.get(id(ids))

    def split(self, ids: Rows) -> Iterator[tuple[Group, slice | Rows]]:
        """Yield the groups of some environments, and where these are in ``ids``."""
        shards = self._shard_of[ids]
        if (shards == shards[0]).all():
            yield self.of(int(shards[0]), ids), slice(None)
            return
        for shard in np.unique(shards).tolist():
            at = np.flatnonzero(shards == shard)
            yield self.of(shard, ids[at]), at

    def of(self, shard: int, ids: Rows) -> Group:
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
        if len(self._known) > 4 * len(self._shard_of):  # somebody never sends a group twice
            self._known = {id(whole.ids): whole for whole in self.whole}
        blob = dumps(tuple(StepRequest(rows, None, [])))
        group = self._known[id(ids)] = Group(shard, handle.span, ids, rows, blob)
        return group
