"""Rows, and a sampler that draws from them: no rate limit, no journal, no lock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_names, check_number
from clusterenv.errors import ConfigError, EmptyStore, shown
from clusterenv.store.samplers.sampler import Sampler
from clusterenv.store.table.continuation import Continuations
from clusterenv.store.table.ring import Ring, bytes_needed
from clusterenv.store.table.schema import Admission, Admitted, TableSchema, schema_of
from clusterenv.store.table.stacks import Stack
from clusterenv.store.table.storage import FileStorage, MemoryStorage

__all__ = ["ReplayBuffer", "ReplayStats", "check_priorities"]

Array = npt.NDArray[Any]
Numbers = npt.ArrayLike | torch.Tensor
_MIN_SIDE = 1024  # side slots of every store, unless its capacity is smaller


@dataclass(frozen=True)
class ReplayStats:
    """Contents and counters of a store."""

    rows: int
    """Rows held now."""
    capacity: int
    """Maximum number of rows."""
    added_rows: int
    sampled_rows: int
    """Rows sampled; a row counts each time."""
    evicted_rows: int
    """Rows overwritten by newer ones."""
    nbytes: int
    """Bytes of the columns, in memory or in files."""
    oldest_version: int
    """Oldest policy version that acted in the rows held."""
    newest_version: int


class ReplayBuffer:
    """Rows and their sampler, with the arguments of :class:`ReplayStore`."""

    def __init__(
        self,
        capacity: int,
        sampler: Sampler,
        directory: Path | None = None,
        stack: Stack | int | None = None,
        side: float = 0.1,
        seed: int | None = None,
    ) -> None:
        self.capacity = capacity
        self.sampler = sampler
        # A custom sampler need not have this method.
        getattr(sampler, "check_capacity", lambda _: None)(capacity)
        self.side = check_number("side", side, "ReplayStore(..., side=0.1)", above=0, most=1)
        self.stack = stack if stack is None or isinstance(stack, Stack) else Stack(stack)
        try:
            self.rng = np.random.default_rng(seed)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"seed={seed!r} is no whole number from 0 on ({error}): ReplayStore(..., seed=1)"
            ) from error
        self.sampled = 0
        self.ring: Ring | None = None
        """The rows; ``None`` until the columns are known."""
        self.storage = MemoryStorage() if directory is None else FileStorage(directory)

    def __len__(self) -> int:
        return 0 if self.ring is None else len(self.ring)

    @property
    def added(self) -> int:
        return 0 if self.ring is None else self.ring.end

    @property
    def stats(self) -> ReplayStats:
        ring = self.ring
        versions = [block.policy_version for block in ring.blocks] if ring else []
        return ReplayStats(
            rows=len(self),
            capacity=self.capacity,
            added_rows=self.added,
            sampled_rows=self.sampled,
            evicted_rows=0 if ring is None else ring.first,
            nbytes=0 if ring is None else ring.nbytes,
            oldest_version=min(versions, default=0),
            newest_version=max(versions, default=0),
        )

    def allocate(self, schema: TableSchema) -> Ring:
        """Allocate columns and attach the sampler, or raise ``StoreTooLarge``."""

        def columns_bytes(capacity: int) -> int:
            return bytes_needed(schema, capacity, self._side_slots(capacity), self.stack)

        # A custom sampler need not have this method.
        sampler_bytes = getattr(self.sampler, "bytes_needed", lambda _: 0)
        self.storage.check(columns_bytes, sampler_bytes, self.capacity)
        side, allocate = self._side_slots(self.capacity), self.storage.allocate
        ring = Ring(schema, self.capacity, side, allocate, self.stack)
        self.sampler.attach(ring)
        self.ring = ring
        return ring

    def check(self, batch: Batch) -> Admitted:
        """Raise if a batch cannot be added; allocate the columns if it is the first."""
        ring = self.ring
        if ring is None:
            schema, side = schema_of(batch), self._side_slots(self.capacity)
            admission = Admission(schema, self.capacity, side, self.stack)
            admission.check(batch, Continuations(), True)  # allocate nothing if it is refused
            ring = self.allocate(schema)
        admitted = ring.check(batch)
        self.sampler.check(batch)
        return admitted

    def add(self, batch: Batch, admitted: Admitted) -> None:
        assert self.ring is not None
        self.sampler.added(self.ring.add(batch, admitted), batch)

    def check_columns(self, columns: Iterable[str]) -> tuple[str, ...]:
        """Return the columns that are not observations; raise unless there are rows with all."""
        names: tuple[str, ...] = ()
        if type(columns) is not tuple or columns:
            names = check_names("columns", columns, "sample(256, columns=['log_prob'])")
        ring = self.ring
        if ring is None or not len(ring):
            raise EmptyStore("the store holds no rows; add a batch first: store.add(batch)")
        for name in names:
            if name not in ring.columns:
                known = ", ".join(ring.columns)
                raise ConfigError(f"there is no column {name!r}; there are {known}")
        return tuple(name for name in names if name not in ring.schema.obs) if names else names

    def sample(self, n: int | None, columns: tuple[str, ...]) -> dict[str, Any]:
        """Draw and gather ``n`` rows, after :meth:`check_columns`."""
        rows, weights = self.sampler.draw(n, self.rng)
        found: dict[str, Any] = self.sampler.gather(rows, columns)
        self.sampled += len(rows)
        found["indices"] = rows
        found["weights"] = weights
        return found

    def update_priorities(self, rows: Array, priorities: Array) -> None:
        """Set the priorities of sampled rows, after :func:`check_priorities`."""
        if self.ring is None:
            raise EmptyStore("the store holds no rows; add a batch first: store.add(batch)")
        if rows.dtype.kind not in "iu" or (
            len(rows)
            and not (np.minimum.reduce(rows) >= 0 and np.maximum.reduce(rows) < self.ring.end)
        ):
            raise ConfigError(
                f"indices are those of a sample, from 0 to {self.ring.end - 1:,}, got {rows}: "
                "store.update_priorities(sample['indices'], error.abs())"
            )
        self.sampler.update(rows.astype(np.int64, copy=False), priorities)

    def close(self) -> None:
        if self.ring is not None:
            self.ring.release()
        self.ring = None
        self.storage.close()

    def _side_slots(self, capacity: int) -> int:
        return max(round(self.side * capacity), min(capacity, _MIN_SIDE))


def check_priorities(indices: Numbers, priorities: Numbers) -> tuple[Array, Array]:
    """Return indices and priorities as arrays of one length."""
    rows, values = _array("indices", indices), _array("priorities", priorities)
    if rows.ndim != 1 or rows.shape != values.shape:
        raise ConfigError(
            f"{rows.shape} indices and {values.shape} priorities; one number per index: "
            "store.update_priorities(sample['indices'], error.abs())"
        )
    return rows, values


def _array(name: str, values: Numbers) -> Array:
    try:
        given = values.detach().cpu() if isinstance(values, torch.Tensor) else values
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):  # nested lists, or a dtype of torch's own
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise ConfigError(
            f"{name} must be numbers, got {shown(values)}: "
            "store.update_priorities(sample['indices'], error.abs())"
        )
    return array
