"""Which rows of a new batch continue rows that are stored already."""

from __future__ import annotations

import numpy as np

from clusterenv.data.batch import Batch
from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError
from clusterenv.store.table.slots import Ints

__all__ = ["Continuations", "Envs"]

Envs = tuple[bytes, int, int]
"""Env numbers of a batch as bytes; their minimum and maximum, if the combination is new."""
_MAX_ENVS = 1 << 24  # a wrong number must not exhaust the memory


class _Group:
    """Environments that share batches in a fixed order, and where each of them ended."""

    __slots__ = ("_dtypes", "_episodes", "_steps", "at", "noted", "row", "source")

    def __init__(self, at: slice, batch: Batch) -> None:
        self.at = at
        self._dtypes = batch.flat("episode").dtype, batch.flat("step").dtype

    def end_with(self, batch: Batch, source: int, row: int, noted: bool) -> None:
        """Store the last time row of a batch, numbered from ``row`` on."""
        width = batch.num_envs
        self.source = source
        self.row = row
        self.noted = noted  # in the arrays of all environments
        self._episodes = batch.flat("episode")[-width:].tobytes()
        self._steps = (batch.flat("step")[-width:] + 1).tobytes()

    def continued(self, batch: Batch, source: int, first: int) -> Ints | None:
        """Return which environments a batch continues; ``None`` for all of them."""
        width = batch.num_envs
        episode, step = batch.flat("episode")[:width], batch.flat("step")[:width]
        if source != self.source:
            return np.empty(0, np.int64)
        same = self._steps == step.tobytes() and self._episodes == episode.tobytes()
        if same and self.row >= first:
            return None
        episodes, steps = self._ends()
        continues = (episodes == episode) & (steps == step)
        continues[: max(0, first - self.row)] = False
        found: Ints = continues.nonzero()[0]
        return found

    def places(self) -> Ints:
        return _place(*self._ends()) - 1

    def _ends(self) -> tuple[Column, Column]:
        """Return the episode of each environment, and its next step."""
        episode, step = self._dtypes
        return np.frombuffer(self._episodes, episode), np.frombuffer(self._steps, step)


class Continuations:
    """The newest row of every environment, by run: two collectors number theirs alike."""

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}

    def check(self, batch: Batch) -> Envs:
        """Return the environments of a batch, or raise ``ConfigError`` if they are invalid."""
        env = batch.flat("env")[: batch.num_envs]
        key = env.tobytes()
        run = self._runs.get(batch.run)
        if run is not None and key in run.groups:
            return key, 0, 0
        low, high = int(env.min()), int(env.max())
        others = sum(len(other.row) for other in self._runs.values() if other is not run)
        if not 0 <= low <= high < _MAX_ENVS - others:
            raise ConfigError(
                f"the column 'env' goes from {low} to {high}; it numbers all environments, from 0"
            )
        return key, low, high

    def add(
        self, batch: Batch, envs: Envs, start: int, first: int
    ) -> tuple[range, range] | tuple[Ints, Ints]:
        """Register a batch with rows from ``start`` on; return which rows continue which.

        A row continues another if both belong to the same run, shard, incarnation and episode,
        and their steps are consecutive. ``first`` is the oldest row that was not evicted. The row
        numbers are ranges if all environments continue.
        """
        run = self._runs.get(batch.run)
        if run is None:
            # Forget runs without rows: a store may see any number of runs.
            self._runs = {number: old for number, old in self._runs.items() if old.end > first}
            run = self._runs[batch.run] = _Run()
        return run.add(batch, envs, start, first)


class _Run:
    """The newest row of every environment of one run."""

    def __init__(self) -> None:
        # By number of environment; -1 for those that have not been seen.
        self.row = self._place = self._source = np.empty(0, np.int64)
        self._sources: dict[tuple[int, int], int] = {}  # by shard and incarnation
        self.groups: dict[bytes, _Group] = {}
        self.end = 0
        """Number of the row after the newest."""

    def add(
        self, batch: Batch, envs: Envs, start: int, first: int
    ) -> tuple[range, range] | tuple[Ints, Ints]:
        width = batch.num_envs
        self.end = start + batch.num_rows
        last = self.end - width
        source = self._sources.setdefault((batch.shard, batch.incarnation), len(self._sources))
        key, low, high = envs
        group = self.groups.get(key)
        if group is not None:
            at, row = group.continued(batch, source, first), group.row
            group.end_with(batch, source, last, noted=False)
            if at is None:
                return range(row, row + width), range(start, start + width)
            return row + at, start + at
        self._note_groups()
        env = batch.flat("env")[:width]
        where = self._where(env, low, high)
        pairs = self._compare(batch, where, env, source, start, first)
        if isinstance(where, slice):
            group = self.groups[key] = _Group(where, batch)
            group.end_with(batch, source, last, noted=True)
        return pairs

    def _compare(
        self, batch: Batch, at: slice | Ints, env: Column, source: int, start: int, first: int
    ) -> tuple[Ints, Ints]:
        """Compare each environment with its newest row."""
        width, end = batch.num_envs, start + batch.num_rows
        episode, step = batch.flat("episode"), batch.flat("step")
        heads, ends = _place(episode[:width], step[:width]), _place(episode[-width:], step[-width:])
        before, place = self.row[at], self._place[at]
        continues = self._source[at] == source
        if not isinstance(at, slice):
            again = np.flatnonzero(env[1:] == env[:-1])  # tracks of one environment
            before[again + 1], place[again + 1] = end - width + again, ends[again]
            continues[again + 1] = True
        continues &= place == heads - 1
        continues &= before >= first
        found = continues.nonzero()[0]
        pairs = before[found], start + found
        # If an environment is there twice, the later row wins.
        self.row[at] = np.arange(end - width, end)
        self._place[at], self._source[at] = ends, source
        return pairs

    def _note_groups(self) -> None:
        """Bring the arrays of all environments up to date."""
        for group in self.groups.values():
            if not group.noted:
                at = group.at
                self.row[at] = np.arange(group.row, group.row + at.stop - at.start)
                self._place[at], self._source[at] = group.places(), group.source
                group.noted = True

    def _where(self, env: Column, low: int, high: int) -> slice | Ints:
        """Return the index of environments in the arrays; usually a slice."""
        missing = high + 1 - len(self.row)
        if missing > 0:
            more = np.full(missing, -1)
            self.row, self._place, self._source = (
                np.concatenate([part, more]) for part in (self.row, self._place, self._source)
            )
        # No environment is in two groups.
        self.groups = {
            key: group
            for key, group in self.groups.items()
            if group.at.stop <= low or group.at.start > high
        }
        adjacent = (env[1:] == env[:-1] + 1).all()
        return slice(low, high + 1) if adjacent else env.astype(np.int64)


def _place(episode: Column, step: Column) -> Ints:
    """Return episode and step of rows as one number; one more is the next step."""
    place = episode.astype(np.int64)
    place <<= 32
    place += step
    return place
