"""Where each environment's rows end, so that the next batch can go on from there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clusterenv.batch import Batch
from clusterenv.errors import ConfigError
from clusterenv.schema import Column

__all__ = ["Links"]

Ints = npt.NDArray[np.int64]
_ENVS = 1 << 24  # more than there will be; a wrong number must not take all memory


class Links:
    """The newest row of every environment: its number, and where it is from."""

    def __init__(self) -> None:
        self._row = self._place = self._source = np.empty(0, np.int64)
        self._sources: dict[tuple[int, int], int] = {}
        self._known: dict[bytes, slice | Ints] = {}

    def add(self, batch: Batch, start: int, first: int) -> tuple[Ints, Ints]:
        """Take a batch whose rows begin at ``start``; return which rows go on from which.

        A row goes on from another if both are of one episode, one incarnation of one shard,
        and follow each other; ``first`` is the oldest row that is still there.

        Returns
        -------
        before, after
            Numbers of rows.
        """
        width, end = batch.num_envs, start + batch.num_rows
        env = batch.flat("env")[:width]
        source = self._sources.setdefault((batch.shard, batch.incarnation), len(self._sources))
        heads = _places(batch, slice(width))
        ends = _places(batch, slice(batch.num_rows - width, None))
        at = self._at(env)
        before, place = self._row[at], self._place[at]
        goes_on = self._source[at] == source
        if not isinstance(at, slice):
            again = np.flatnonzero(env[1:] == env[:-1])  # tracks of one environment
            before[again + 1], place[again + 1], goes_on[again + 1] = (
                *(end - width + again, ends[again]),
                True,
            )
        goes_on &= place == heads - 1
        goes_on &= before >= first
        found = goes_on.nonzero()[0]
        pairs = before[found], start + found
        # Of an environment that is there twice, the later stays.
        self._row[at] = np.arange(end - width, end)
        self._place[at], self._source[at] = ends, source
        return pairs

    def _at(self, env: Column) -> slice | Ints:
        """Return where environments are; mostly these are neighbours, and always the same."""
        key = env.tobytes()
        known = self._known.get(key)
        if known is not None:
            return known
        low, high = int(env.min()), int(env.max())
        if not 0 <= low <= high < _ENVS:
            raise ConfigError(
                f"the column 'env' goes from {low} to {high}; it numbers all environments, from 0"
            )
        self._grow(high + 1)
        neighbours = (env[1:] == env[:-1] + 1).all()
        at = slice(low, high + 1) if neighbours else env.astype(np.int64)
        if neighbours:
            self._known[key] = at
        return at

    def _grow(self, envs: int) -> None:
        missing = envs - len(self._row)
        if missing > 0:
            more = np.full(missing, -1)
            self._row, self._place, self._source = (
                np.concatenate([part, more]) for part in (self._row, self._place, self._source)
            )


def _places(batch: Batch, rows: slice) -> Ints:
    """Return episode and step of rows as one number; the next step's is one more."""
    episode = batch.flat("episode")[rows].astype(np.int64)
    episode <<= 32
    episode += batch.flat("step")[rows]
    return episode
