"""What a call of ``ClusterEnv`` returns, while the shards' answers arrive in any order."""

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
        self.ids = np.arange(n) if ids is None else ids
        self._infos: dict[int, list[tuple[Any, Rows]]] = {}
        self.chosen: dict[str, Column] = {}
        self.states: list[tuple[Rows, dict[str, Column]]] = []
        """Some rows of each shard, and their policy's recurrent state there."""

    def report(self, shard: int, infos: Infos, places: Rows) -> None:
        """Note the infos of a shard, and which rows they are of."""
        self._infos.setdefault(shard, []).append((infos, places))

    def take(self, other: Result, rows: Rows, places: Rows) -> None:
        """Take over some rows of another result, with everything reported of them."""
        ours, theirs = ([*result.slot.obs, *result.slot[1:]] for result in (self, other))
        for column, values in zip(ours, theirs, strict=True):
            column[places] = values[rows]
        where = np.zeros(other.n, np.intp)
        where[rows] = places
        for shard, reports in other._infos.items():
            for infos, at in reports:
                self.report(shard, infos, where[at])

    def choose(self, chosen: dict[str, Column], into: slice) -> None:
        """Note what the policy of a shard chose for some rows."""
        for name, values in chosen.items():
            if name not in self.chosen:
                self.chosen[name] = np.zeros((self.n, *values.shape[1:]), values.dtype)
            self.chosen[name][into] = values

    def info(self) -> dict[str, Any]:
        """Return Gymnasium's dictionary of everything that was reported."""
        merged: dict[str, Any] = {}
        for shard in sorted(self._infos):  # answers come in any order
            for infos, places in self._infos[shard]:
                join: Any = merge_vector if isinstance(infos, VectorInfo) else merge
                join(merged, infos, places, self.n)
        return merged
