"""The result of a call of ``ClusterEnv``, assembled from the answers of the shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clusterenv.data.infos import VectorInfo, merge, merge_vector
from clusterenv.data.spaces import Column, Layout
from clusterenv.simulation.engines.base import Infos, Slot

__all__ = ["Result", "Rows"]

Rows = npt.NDArray[np.intp]


class Result:
    """Arrays that answers are received into, and the infos that came with them."""

    def __init__(self, layout: Layout, n: int, ids: Rows | None = None) -> None:
        self.slot = Slot.empty(layout, n)
        self.n = n
        self.ids = ids
        """Global indices of the environments; ``None`` for all."""
        self._infos: dict[int, list[tuple[Any, Rows]]] = {}
        self.chosen: dict[str, Column] = {}
        self.states: list[tuple[Rows, dict[str, Column]]] = []
        """Some rows of each shard, and their policy's recurrent state there."""

    def report(self, shard: int, infos: Infos, places: Rows) -> None:
        """Add infos of a shard, given the rows that they belong to."""
        self._infos.setdefault(shard, []).append((infos, places))

    def take(self, other: Result, rows: Rows, places: Rows) -> None:
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
