"""The on-policy store: joins the fragments of an update, and returns every row once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from clusterenv.data.batch import Batch, Rollout
from clusterenv.data.buffer_pool import BufferPool
from clusterenv.data.checks import check_choice, check_instance, check_whole
from clusterenv.data.summary import Summary
from clusterenv.errors import ConfigError, EmptyStore, StaleBatch

__all__ = ["Rollout", "RolloutStats", "RolloutStore"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RolloutStats:
    """Counters of a store since it was created."""

    accepted_rows: int = 0
    taken_rows: int = 0
    """Returned to the learner."""
    dropped_rows: int = 0
    """Dropped because of ``max_lag``."""
    dropped_batches: int = 0


class RolloutStore(Summary):
    """Joins the fragments of one update, and returns every accepted row exactly once.

    A rollout may contain fragments of several collectors with the same horizon and columns; env
    numbers are then not unique.

    Parameters
    ----------
    max_lag
        Maximum number of versions that a batch may lag behind; ``None`` for no limit.
    stale
        What to do with a batch that lags more: ``"refuse"`` raises :class:`StaleBatch`,
        ``"count"`` drops it and counts its rows in :attr:`stats`.

    Examples
    --------
    >>> store = RolloutStore(max_lag=2, stale="count")
    >>> store.rows
    0

    With a collector, one update's rows are::

        for batch in collector.rollout():
            store.add(batch, newest_version=version)
        rollout = store.take()
        rollout["obs"].shape  # [time, env, …]
    """

    def __init__(
        self, *, max_lag: int | None = None, stale: Literal["refuse", "count"] = "refuse"
    ) -> None:
        if max_lag is not None:
            right = "RolloutStore(max_lag=0) takes the newest version only, max_lag=None any"
            check_whole("max_lag", max_lag, right)
        right = "RolloutStore(stale='refuse') raises, stale='count' drops and counts"
        check_choice("stale", stale, ("refuse", "count"), right)
        self.max_lag = max_lag
        self.stale = stale
        self._batches: list[Batch] = []
        self._stats = RolloutStats()
        self._buffers = BufferPool()

    def _summary(self) -> Mapping[str, Any]:
        return {
            "rows": self.rows,
            "batches": len(self._batches),
            "max_lag": self.max_lag,
            "taken_rows": self._stats.taken_rows,
            "dropped_rows": self._stats.dropped_rows,
        }

    @property
    def rows(self) -> int:
        """Rows that the next :meth:`take` returns."""
        return sum(batch.num_rows for batch in self._batches)

    @property
    def stats(self) -> RolloutStats:
        """Rows accepted, taken and dropped so far."""
        return self._stats

    def add(self, batch: Batch, newest_version: int) -> bool:
        """Add a fragment, unless it lags too far behind.

        Its arrays are referenced, not copied, until :meth:`take`. The lag is counted from
        ``newest_version``, the version that the fragment's collector published last.

        Returns
        -------
        bool
            Whether the batch was accepted; ``False`` only with ``stale="count"``.

        Raises
        ------
        StaleBatch
            If the batch lags more than ``max_lag`` versions and ``stale="refuse"``.
        ConfigError
            If its horizon or columns differ from those of the other fragments, a column is text,
            or its version is newer than ``newest_version``.
        """
        check_instance("batch", batch, Batch, "store.add(batch, newest_version=version)")
        right = "store.add(batch, newest_version=collector.publish(policy))"
        newest_version = check_whole("newest_version", newest_version, right)
        for name in batch.names:
            if batch.flat(name).dtype == object:
                raise ConfigError(
                    f"column {name!r} is text, and a rollout is tensors; collect without it: "
                    "Collector(…, text='drop')"
                )
        lag = newest_version - batch.policy_version
        if lag < 0:
            raise ConfigError(
                f"the batch was acted by version {batch.policy_version}, but newest_version="
                f"{newest_version}; pass what the last publish returned: {right}"
            )
        if self.max_lag is not None and lag > self.max_lag:
            if self.stale == "refuse":
                raise StaleBatch(
                    f"the batch of shard {batch.shard} was acted by version "
                    f"{batch.policy_version}, {lag} behind version {newest_version}, and "
                    f"max_lag={self.max_lag}; accept it with RolloutStore(max_lag={lag}) or "
                    f"drop such batches with RolloutStore(max_lag={self.max_lag}, stale='count')"
                )
            self._count(dropped_rows=batch.num_rows, dropped_batches=1)
            return False
        _check_alike(self._batches[0] if self._batches else batch, batch)
        self._batches.append(batch)
        self._count(accepted_rows=batch.num_rows)
        return True

    def take(self) -> Rollout:
        """Return all rows held as one rollout and empty the store.

        Fragments are joined along the environment axis, ordered by run, shard and incarnation;
        those of one shard in the order of arrival. The rollout owns its memory.

        Raises
        ------
        EmptyStore
            If nothing was added since the last call.
        """
        if not self._batches:
            raise EmptyStore(
                "the store holds no rows; add a batch before taking: "
                "store.add(batch, newest_version=version); rollout = store.take()"
            )
        batches = sorted(self._batches, key=lambda b: (b.run, b.shard, b.incarnation))
        columns = [{name: batch[name] for name in batch.names} for batch in batches]
        rollout = Rollout(
            columns=_joined(columns, 1, self._buffers),
            tail_rows=_joined_tail_rows(batches),
            tail=_joined([batch.tail for batch in batches], 0, self._buffers),
            state=_joined([batch.state for batch in batches], 0, self._buffers),
        )
        self._count(taken_rows=self.rows)
        self._batches = []
        return rollout

    def _count(self, **more: int) -> None:
        counted = {name: getattr(self._stats, name) + n for name, n in more.items()}
        self._stats = replace(self._stats, **counted)


def _layout(batch: Batch) -> dict[str, str]:
    """Return what must be equal in all batches of a rollout, by name."""
    layout = {"horizon": str(batch.horizon)}
    columns = {name: batch[name] for name in batch.names}
    parts = {"column": (columns, 2), "tail": (batch.tail, 1), "state": (batch.state, 1)}
    for part, (arrays, axes) in parts.items():
        for name, array in arrays.items():
            layout[f"{part} {name!r}"] = f"{array.dtype} {array.shape[axes:]}"
    return layout


def _check_alike(first: Batch, batch: Batch) -> None:
    expected, got = _layout(first), _layout(batch)
    for part in [*expected, *(part for part in got if part not in expected)]:
        if expected.get(part) != got.get(part):
            raise ConfigError(
                f"the batch of shard {batch.shard} does not fit the batches held: {part} expected "
                f"{expected.get(part, 'none')}, got {got.get(part, 'none')}; take() what is held "
                "before adding batches that differ"
            )


def _joined(
    parts: list[dict[str, Array]], axis: int, buffers: BufferPool
) -> dict[str, torch.Tensor]:
    """Join the arrays of all batches: the only copy between socket and learner."""
    joined = {}
    for name, first in parts[0].items():
        arrays = [part[name] for part in parts]
        length = sum(array.shape[axis] for array in arrays)
        out = buffers.empty((*first.shape[:axis], length, *first.shape[axis + 1 :]), first.dtype)
        joined[name] = torch.from_numpy(np.concatenate(arrays, axis, out=out))
    return joined


def _joined_tail_rows(batches: list[Batch]) -> torch.Tensor:
    total = sum(batch.num_envs for batch in batches)
    joined, offset = [], 0
    for batch in batches:
        time, env = np.divmod(batch.tail_rows, batch.num_envs)
        joined.append(time * total + offset + env)
        offset += batch.num_envs
    return torch.from_numpy(np.concatenate(joined).astype(np.int64, copy=False))
