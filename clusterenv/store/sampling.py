"""Rows that stay in memory, or in mapped files, and samples of them: no disk, no journal."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_flag, check_instance, check_names, check_whole, is_number
from clusterenv.data.processes import hold_at_fork
from clusterenv.errors import ClosedError, ConfigError, EmptyStore, RatioError, shown
from clusterenv.store.ratio import Ratio
from clusterenv.store.samplers import Recent, Sampler, Uniform, check_sampler
from clusterenv.store.table.admission import Admission
from clusterenv.store.table.links import Links
from clusterenv.store.table.memory import InFiles, InMemory
from clusterenv.store.table.ring import Ring, bytes_needed
from clusterenv.store.table.specs import Specs, specs_of, specs_of_schema
from clusterenv.store.table.stacks import Stack

__all__ = ["Replay", "ReplayStats"]

_LEAST_SIDE = 1024  # observations beside the rows that every store has room for
_MOST_SAMPLED = 2**20  # at a time, of a store that is smaller


@dataclass(frozen=True)
class ReplayStats:
    """What a store holds, and what went through it since it was begun."""

    rows: int
    """Held now."""
    capacity: int
    """Rows that it can hold."""
    added_rows: int
    sampled_rows: int
    """Handed out; a row counts as often as it was."""
    evicted_rows: int
    """That made room for newer ones."""
    nbytes: int
    """Of the columns, in memory or in mapped files."""
    oldest_version: int
    """Of the policies that acted in the rows held."""
    newest_version: int


@runtime_checkable
class _Source(Protocol):
    """A collector, to the store: batches, and how many are there without waiting."""

    @property
    def ready(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


class Replay:
    """Rows in preallocated columns, and samples of them; see :class:`clusterenv.ReplayStore`."""

    def __init__(
        self,
        capacity: int,
        *,
        sampler: Sampler | None = None,
        schema: pa.Schema | None = None,
        directory: str | Path | None = None,
        ratio: Ratio | float | None = None,
        stack: Stack | int | None = None,
        side: float = 0.1,
        seed: int | None = None,
    ) -> None:
        self.capacity = check_whole("capacity", capacity, "ReplayStore(100_000)", least=1)
        self._most = max(self.capacity, _MOST_SAMPLED)
        if not (is_number(side) and 0 < side <= 1):
            raise ConfigError(
                f"side={shown(side)} is not between 0 and 1: ReplayStore(..., side=0.1)"
            )
        if schema is not None:
            right = "ReplayStore(..., schema=batch.record_batch.schema)"
            check_instance("schema", schema, pa.Schema, right)
        self.sampler: Sampler = Uniform() if sampler is None else sampler
        check_sampler(self.sampler)
        self.ratio = ratio if ratio is None or isinstance(ratio, Ratio) else Ratio(ratio)
        if self.ratio is not None:
            self.ratio.check(self.capacity)
            if isinstance(self.sampler, Recent):
                raise ConfigError(
                    f"Recent counts the uses of each batch itself, and leaves nothing to "
                    f"{self.ratio}: ReplayStore(..., sampler=Recent(4, uses=2)), without ratio="
                )
        self._stack = stack if stack is None or isinstance(stack, Stack) else Stack(stack)
        self._side_part = float(side)
        self._rng = _generator(seed)
        self._lock = threading.RLock()
        hold_at_fork(self._lock)
        self._ring: Ring | None = None
        self._sampled = 0
        self._batch_rows = 0
        self._sample_rows = 0
        self._nothing_to_draw = False  # though there are rows
        self._early: deque[Batch] = deque()  # taken from a source before it was their turn
        self.closed = False
        self._memory = InMemory() if directory is None else InFiles(Path(directory))
        try:
            if schema is not None:
                self._allocate(specs_of_schema(schema))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return 0 if self._ring is None else len(self._ring)

    @property
    def nbytes(self) -> int:
        """Bytes of the columns; 0 before they are known."""
        return 0 if self._ring is None else self._ring.nbytes

    @property
    def stats(self) -> ReplayStats:
        """What there is, and what went through."""
        with self._lock:
            ring = self._ring
            versions = [block.policy_version for block in ring.blocks] if ring else []
            return ReplayStats(
                rows=len(self),
                capacity=self.capacity,
                added_rows=self._added,
                sampled_rows=self._sampled,
                evicted_rows=0 if ring is None else ring.first,
                nbytes=self.nbytes,
                oldest_version=min(versions, default=0),
                newest_version=max(versions, default=0),
            )

    # Rows in

    def add(self, batch: Batch) -> None:
        """Copy a batch in.

        Raises
        ------
        SchemaMismatch
            If its columns are not those of the store.
        ConfigError
            If it cannot be taken for another reason, such as its size; nothing has changed.
        RatioError
            If the learner is too far behind; the batch is not lost, sample and add it again.
        StoreTooLarge
            With the first batch, if the columns do not fit.
        """
        check_instance("batch", batch, Batch, "store.add(next(iter(collector)))")
        with self._lock:
            self._check_open()
            if self._ring is None:
                self._allocate_for(batch)
            assert self._ring is not None
            admitted = self._ring.check(batch)
            self.sampler.check(batch)
            if batch.num_rows > self._batch_rows:  # what is refused now will come again
                self._batch_rows = batch.num_rows
            if self.ratio is not None and not self.may_add(batch.num_rows):
                raise RatioError(
                    f"the learner is behind: {self._added:,} rows were added and "
                    f"{self._sampled:,} sampled, with {self.ratio}; sample before adding more, "
                    "or let store.feed(collector, n) do it"
                )
            block = self._ring.add(batch, admitted)
            self.sampler.added(block, batch)

    def _allocate_for(self, batch: Batch) -> None:
        """Take the memory for batches like this one, unless this one cannot be taken."""
        specs = specs_of(batch)
        admission = Admission(specs, self.capacity, self._side_of(self.capacity), self._stack)
        admission.check(batch, Links(), True)
        self._allocate(specs)

    def _allocate(self, specs: Specs) -> None:
        def columns(capacity: int) -> int:
            return bytes_needed(specs, capacity, self._side_of(capacity), self._stack)

        def sampler(capacity: int) -> int:
            found = getattr(self.sampler, "bytes_needed", None)  # one of your own need not have it
            return 0 if found is None else int(found(capacity))

        self._memory.check(columns, sampler, self.capacity)
        side, allocate = self._side_of(self.capacity), self._memory.allocate
        ring = Ring(specs, self.capacity, side, allocate, self._stack)
        self.sampler.attach(ring)
        self._ring = ring

    def _side_of(self, capacity: int) -> int:
        """Return how many observations have room beside the rows."""
        return max(round(self._side_part * capacity), min(capacity, _LEAST_SIDE))

    # Rows out

    def sample(
        self, n: int | None = None, *, columns: Iterable[str] = (), tensors: bool = False
    ) -> dict[str, Any]:
        """Return rows as a dictionary of arrays, which are the caller's own.

        Keys are ``obs``, ``action``, ``reward``, ``next_obs``, ``terminated``, ``truncated``
        (``obs.<key>`` for Dict observations), ``indices``, ``weights``, what the sampler adds,
        and ``columns``.

        Parameters
        ----------
        n
            Rows, or sequences; :class:`Recent` decides by itself. At most ``capacity``, or 2**20
            if that is more.
        columns
            Further columns of the batches, such as ``log_prob``.
        tensors
            Whether to return torch tensors.

        Raises
        ------
        EmptyStore
            If there is nothing to sample.
        RatioError
            If the learner is too far ahead; add a batch first.
        """
        if n is not None and not (type(n) is int and 0 < n <= self._most):
            n = self._rows(n)
        if tensors is not False:
            tensors = check_flag("tensors", tensors, "sample(256, tensors=True)")
        also: tuple[str, ...] = ()
        if type(columns) is not tuple or columns:
            also = check_names("columns", columns, "sample(256, columns=['log_prob'])")
        with self._lock:
            self._check_open()
            ring = self._ring
            if ring is None or not len(ring):
                raise EmptyStore("the store holds no rows; add a batch first: store.add(batch)")
            if also:
                also = tuple(name for name in also if name not in ring.specs.obs)
            for name in also:
                if name not in ring.columns:
                    raise ConfigError(
                        f"there is no column {name!r}; there are {', '.join(ring.columns)}"
                    )
            if n is not None:
                self._sample_rows = max(self._sample_rows, n)
                if self.ratio is not None and not self.may_sample(n):
                    raise RatioError(
                        f"the learner is ahead: {self._added:,} rows were added and "
                        f"{self._sampled:,} sampled, with {self.ratio}; add a batch before "
                        "sampling more, or let store.feed(collector, n) do it"
                    )
            try:
                rows, weights = self.sampler.draw(n, self._rng)
            except EmptyStore:
                self._nothing_to_draw = True
                raise
            self._nothing_to_draw = False
            found: dict[str, Any] = self.sampler.gather(rows, also)
            self._sampled += len(rows)
        found["indices"] = rows
        found["weights"] = weights
        return {k: torch.from_numpy(v) for k, v in found.items()} if tensors else found

    def update_priorities(
        self, indices: npt.ArrayLike | torch.Tensor, priorities: npt.ArrayLike | torch.Tensor
    ) -> None:
        """Set the priorities of sampled rows; those that have left meanwhile are ignored.

        Parameters
        ----------
        indices
            ``sample["indices"]``.
        priorities
            Absolute errors, one per index.
        """
        rows, values = _array("indices", indices), _array("priorities", priorities)
        if rows.ndim != 1 or rows.shape != values.shape:
            raise ConfigError(
                f"{rows.shape} indices and {values.shape} priorities; one number per index: "
                "store.update_priorities(sample['indices'], error.abs())"
            )
        with self._lock:
            self._check_open()
            if self._ring is None:
                raise EmptyStore("the store holds no rows; add a batch first: store.add(batch)")
            if rows.dtype.kind not in "iu" or (
                len(rows)
                and not (np.minimum.reduce(rows) >= 0 and np.maximum.reduce(rows) < self._added)
            ):
                raise ConfigError(
                    f"indices are those of a sample, from 0 to {self._added - 1:,}, got {rows}: "
                    "store.update_priorities(sample['indices'], error.abs())"
                )
            self.sampler.update(rows.astype(np.int64, copy=False), values)

    # Learner and collection in step

    def may_sample(self, n: int) -> bool:
        """Whether there are rows, and the ratio lets the learner take ``n`` now."""
        if not (type(n) is int and 0 < n <= self._most):
            n = self._rows(n)
        if self.ratio is None:
            return len(self) > 0
        if self._batch_rows:
            self.ratio.check_sizes(self._batch_rows, n)
        counts = {"added": self._added, "sampled": self._sampled}
        return self.ratio.may_sample(n, rows=self._batch_rows, **counts)

    def may_add(self, rows: int) -> bool:
        """Whether the ratio lets a batch of ``rows`` rows come now."""
        if not (type(rows) is int and rows >= 0):
            rows = check_whole("rows", rows, "store.may_add(batch.num_rows)")
        if self.ratio is None or not self._sample_rows or self._nothing_to_draw:
            return True  # whoever waits for rows to sample from must get them
        counts = {"added": self._added, "sampled": self._sampled}
        return self.ratio.may_add(rows, self._sample_rows, **counts)

    def feed(
        self, source: Iterable[Batch], n: int | None = None, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield samples of ``n`` rows, and add the batches of a collector meanwhile.

        Batches that have arrived are added between two samples, as far as the ratio allows:
        those that are not taken hold the shards back. Only when no sample may be taken does
        it wait for a batch. A batch that turns out to be too large for now is kept, and added
        once the learner has caught up, by the next call of ``feed`` if this one is left. It
        ends when the source does.

        Parameters
        ----------
        source
            A :class:`clusterenv.Collector`, or any iterable of batches.
        n, options
            As for :meth:`sample`.

        Raises
        ------
        RatioError
            If the ratio's slack stops both sides with these batches and samples.
        """
        if not isinstance(source, Iterable) or isinstance(source, (np.ndarray, torch.Tensor)):
            raise ConfigError(
                f"feed() takes a Collector, or batches, got {shown(source)}: "
                "store.feed(collector, 256)"
            )
        if n is not None:
            n = self._rows(n)
        return self._feed(source, n, options)

    def _feed(
        self, source: Iterable[Batch], n: int | None, options: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        self._sample_rows = max(self._sample_rows, n or 0)
        batches = iter(source)
        must_wait = not self.may_sample(n or 1)  # a store with rows may owe the learner samples
        while True:
            waiting = len(self._early) + (source.ready if isinstance(source, _Source) else 1)
            while must_wait or (waiting > 0 and self.may_add(self._batch_rows)):
                batch = self._next(batches)
                if batch is None:
                    return
                self._add_or_keep(batch)
                waiting -= 1
                must_wait = not self.may_sample(n or 1)
            try:
                sample = self.sample(n, **options)
            except (EmptyStore, RatioError):
                must_wait = True
                continue
            yield sample

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        """Return the batch that was kept, or else the next of a source."""
        with self._lock:
            if self._early:
                return self._early.popleft()
        return next(batches, None)

    def _add_or_keep(self, batch: Batch) -> None:
        try:
            self.add(batch)
        except RatioError:  # how large it is was not known before it came
            self._early.appendleft(batch)

    def close(self) -> None:
        """Release files and memory."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._early.clear()
            if self._ring is not None:
                self._ring.release()
            self._ring = None
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Inside

    @property
    def _added(self) -> int:
        return 0 if self._ring is None else self._ring.end

    def _rows(self, n: Any) -> int:
        """Return how many rows are to be sampled, or raise ``ConfigError``."""
        return check_whole("n", n, "store.sample(256)", least=1, most=self._most)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("this ReplayStore is closed; make a new one")
        self._memory.check_process()


def _generator(seed: Any) -> np.random.Generator:
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"seed={seed!r} is no whole number from 0 on ({error}): ReplayStore(..., seed=1)"
        ) from error


def _array(name: str, values: npt.ArrayLike | torch.Tensor) -> npt.NDArray[Any]:
    """Return numbers as an array."""
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
