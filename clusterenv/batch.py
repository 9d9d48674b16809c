"""A fragment as the head sees it: an Arrow record batch and views of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from clusterenv.arrow import to_arrow
from clusterenv.fragment import Cut
from clusterenv.schema import Column

__all__ = ["Batch"]


class Batch:
    """One fragment of one shard.

    ``batch["obs"]`` and the other columns are NumPy arrays shaped ``[horizon, envs, …]`` that
    share the record batch's memory, except booleans, which Arrow keeps as bits: do not write
    into them.

    Attributes
    ----------
    tail_rows
        Rows whose next observation is not the observation one time row below: every row
        that ended an episode, and every row of the last time step.
    tail
        The true next observations of these rows, by observation column; for a finished
        episode its true final observation.
    state
        Recurrent state at the first time row, ``[envs, …]``.
    run, shard, incarnation, policy_version
        Where the rows are from; ``run`` is that of the collector. The version is that of the
        first time row, where tracks differ the oldest; a row's own is in the column ``version``.
    cuts
        Episodes that were cut because their environment failed and was rebuilt, and why.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        num_envs: int,
        *,
        tail_rows: npt.NDArray[np.int64],
        tail: Mapping[str, Column],
        state: Mapping[str, Column],
        run: int,
        shard: int,
        incarnation: int,
        policy_version: int,
        cuts: Sequence[Cut] = (),
    ) -> None:
        self._columns = dict(columns)
        self.num_rows = len(columns["reward"])
        self.num_envs = num_envs
        self.horizon = self.num_rows // num_envs
        self.tail_rows = tail_rows
        self.tail = dict(tail)
        self.state = dict(state)
        self.run = run
        self.shard = shard
        self.incarnation = incarnation
        self.policy_version = policy_version
        self.cuts = list(cuts)

    @functools.cached_property
    def record_batch(self) -> pa.RecordBatch:
        """All rows, time-major: row ``t * num_envs + e``."""
        fields, arrays = zip(*(to_arrow(n, c) for n, c in self._columns.items()), strict=True)
        names = ("run", "shard", "incarnation", "num_envs")
        metadata = {name: str(getattr(self, name)) for name in names}
        return pa.record_batch(list(arrays), schema=pa.schema(fields, metadata))

    @property
    def names(self) -> list[str]:
        """The columns' names."""
        return list(self._columns)

    def flat(self, name: str) -> Column:
        """Return a column with one row after the other, as in the record batch."""
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; there are {', '.join(self.names)}") from None

    def __getitem__(self, name: str) -> Column:
        flat = self.flat(name)
        return flat.reshape(self.horizon, self.num_envs, *flat.shape[1:])

    def torch(self) -> dict[str, torch.Tensor]:
        """Return all columns as tensors that share the batch's memory."""
        return {name: torch.from_numpy(self[name]) for name in self.names}

    def __repr__(self) -> str:
        return (
            f"Batch(shard={self.shard}, policy_version={self.policy_version}, "
            f"horizon={self.horizon}, num_envs={self.num_envs}, columns={self.names})"
        )
