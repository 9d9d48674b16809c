"""What a learner receives: a ``Batch`` of NumPy arrays, a ``Rollout`` of tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from clusterenv.data.fragment import Cut
from clusterenv.data.record_batch import ORIGIN, STATE, Sparse, ascending, next_of, to_record_batch
from clusterenv.data.spaces import Array, Column
from clusterenv.data.summary import Summary
from clusterenv.data.tensordict import to_tensordict
from clusterenv.errors import ConfigError

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Batch", "Rollout", "Sealed"]


@dataclass(frozen=True)
class Sealed:
    """A fragment as its worker has sealed it: an Arrow IPC message."""

    schema: pa.Schema
    """Of the message, without metadata: equal for all shards with the same columns."""
    message: Array
    """The bytes of the message."""
    record_batch: pa.RecordBatch
    """Views of the message."""


class Batch(Summary):
    """One fragment of one shard as NumPy arrays; :meth:`torch` returns the same as tensors.

    ``batch["obs"]`` and the other columns are shaped ``[horizon, envs, …]`` and share the record
    batch's memory, except booleans, which Arrow stores as bits, and text. Do not write into them.

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
        Origin of the rows; ``run`` identifies the collector. ``policy_version`` is the oldest
        version that acted in the first time row; the column ``version`` has that of every row.
    cuts
        Episodes that were cut because their environment failed and was rebuilt, and why.
    sealed
        The message that the batch was received as; ``None`` if it was made otherwise.
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
        sealed: Sealed | None = None,
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
        self.sealed = sealed

    def with_columns(self, columns: Mapping[str, Column]) -> Batch:
        """Return a batch with further columns of as many rows."""
        more = copy.copy(self)
        more.__dict__.pop("record_batch", None)
        more._columns = {**self._columns, **columns}
        more.sealed = None
        return more

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the message, which holds the columns once more, when it is pickled."""
        state = {**self.__dict__, "sealed": None}
        state.pop("record_batch", None)
        return state

    @functools.cached_property
    def record_batch(self) -> pa.RecordBatch:
        """All rows, time-major: row ``t * num_envs + e``, with tails, state and origin.

        It is the record batch that the worker sent; see :doc:`/collecting` for its columns.
        """
        if self.sealed is not None:
            return self.sealed.record_batch
        names = (*ORIGIN, "num_envs")
        metadata = {name: str(getattr(self, name)) for name in names}
        return to_record_batch(self._columns, self.origin, self.sparse, metadata)

    @property
    def origin(self) -> dict[str, int]:
        """Run, shard and incarnation."""
        return {name: getattr(self, name) for name in ORIGIN}

    @property
    def sparse(self) -> dict[str, Sparse]:
        """Tails and state as the record batch has them: by column, the rows and their values."""
        rows, tail = ascending(self.tail_rows, self.tail)
        sparse = {next_of(name): (rows, column) for name, column in tail.items()}
        for name, column in self.state.items():
            sparse[STATE + name] = (np.arange(len(column)), column)
        return sparse

    @property
    def names(self) -> list[str]:
        """The columns' names."""
        return list(self._columns)

    def flat(self, name: str) -> Column:
        """Return a column as flat rows, as in the record batch."""
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; there are {', '.join(self.names)}") from None

    def __getitem__(self, name: str) -> Column:
        flat = self.flat(name)
        return flat.reshape(self.horizon, self.num_envs, *flat.shape[1:])

    def next_obs(self) -> dict[str, Column]:
        """Return the true next observation of every row, by observation column.

        Each is ``[horizon, envs, …]``: the observation one time row below, or that in ``tail``
        if the row has one. Where an episode ended, it is the episode's final observation.
        """
        n, shifted = self.num_envs, {}
        for name, tail in self.tail.items():
            flat = self.flat(name)
            following = np.concatenate([flat[n:], flat[-n:]])
            following[self.tail_rows] = tail
            shifted[name] = following.reshape(self.horizon, n, *flat.shape[1:])
        return shifted

    def torch(self) -> Rollout:
        """Return columns, tail and state as tensors that share the batch's memory.

        Text has no tensor form and is left out.
        """
        return Rollout(
            _tensors({name: self[name] for name in self.names}),
            torch.from_numpy(self.tail_rows),
            _tensors(self.tail),
            _tensors(self.state),
        )

    def tensordict(self) -> TensorDict:
        """Return the rows with TorchRL's keys; see :meth:`clusterenv.Rollout.tensordict`."""
        return self.torch().tensordict()

    def _summary(self) -> Mapping[str, Any]:
        return {
            "shard": self.shard,
            "policy_version": self.policy_version,
            "horizon": self.horizon,
            "num_envs": self.num_envs,
            "columns": f"[{', '.join(self.names)}]",
        }


@dataclass(frozen=True, repr=False)
class Rollout(Summary):
    """Rows of one horizon as tensors: of one batch, or of several batches side by side.

    Parameters
    ----------
    columns
        One tensor per column of the batches, each ``[time, env, …]``.
    tail_rows
        Flat rows (``t * num_envs + e``) whose next observation is not the one a time
        row below: every row that ended an episode and every row of the last time step.
    tail
        The true next observations of these rows, one tensor per observation column.
    state
        The recurrent state at the first time step, each ``[env, …]``; empty if the
        policy has none.
    """

    columns: dict[str, Tensor]
    tail_rows: Tensor
    tail: dict[str, Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)

    def _summary(self) -> Mapping[str, Any]:
        horizon, num_envs = self.columns["reward"].shape[:2]
        names = f"[{', '.join(self.columns)}]"
        return {"horizon": horizon, "num_envs": num_envs, "columns": names}

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; there are {sorted(self.columns)}") from None

    def next_obs(self) -> dict[str, Tensor]:
        """Return the true next observation of every row; see :meth:`clusterenv.Batch.next_obs`."""
        shifted = {}
        for name, tail in self.tail.items():
            obs = self.columns[name]
            following = torch.cat([obs[1:], obs[-1:]])
            following.flatten(0, 1)[self.tail_rows] = tail
            shifted[name] = following
        return shifted

    def split(self, parts: int) -> list[Rollout]:
        """Return several rollouts, each with a share of the environments and all time rows.

        Parameters
        ----------
        parts
            How many; they are as equal in size as can be.

        Raises
        ------
        ConfigError
            If there are fewer environments than parts.
        """
        envs = self.columns["reward"].shape[1]
        if not 1 <= parts <= envs:
            raise ConfigError(
                f"a rollout of {envs} environments cannot be split into {parts} parts, as the time "
                f"rows of an environment stay together: split({min(max(parts, 1), envs)})"
            )
        if parts == 1:
            return [self]
        at, env = self.tail_rows // envs, self.tail_rows % envs
        found = []
        for chosen in torch.arange(envs).tensor_split(parts):
            first, count = int(chosen[0]), len(chosen)
            mine = (env >= first) & (env < first + count)
            found.append(
                Rollout(
                    {name: column[:, chosen] for name, column in self.columns.items()},
                    at[mine] * count + env[mine] - first,
                    {name: tail[mine] for name, tail in self.tail.items()},
                    {name: state[chosen] for name, state in self.state.items()},
                )
            )
        return found

    def tensordict(self) -> TensorDict:
        """Return the rows as TorchRL's losses, estimators and buffers expect them.

        The batch size is ``[env, time]``, where the columns are ``[time, env]``. The tensors share
        the columns' memory. :func:`clusterenv.to_tensordict` lists the key of each column.

        Raises
        ------
        ConfigError
            If tensordict, which comes with TorchRL, is not installed.
        """
        following = {f"next_{name}": tensor for name, tensor in self.next_obs().items()}
        rows = to_tensordict({**self.columns, **following}).transpose(0, 1)
        rows.names = [None, "time"]
        return rows


def _tensors(columns: Mapping[str, Column]) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(column) for name, column in columns.items() if column.dtype != object
    }
