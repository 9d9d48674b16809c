"""The off-policy store: rows stay, and a learner samples them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from clusterenv.batch import Batch
from clusterenv.errors import (
    ClosedError,
    ConfigError,
    EmptyStore,
    RatioError,
    StoreDamaged,
    StoreUnreadable,
)
from clusterenv.store.journal import Journal
from clusterenv.store.manifest import Manifest, as_json, read_manifest
from clusterenv.store.memory import InFiles, InMemory
from clusterenv.store.ratio import Ratio
from clusterenv.store.reading import read_batches, read_state, without_damaged
from clusterenv.store.ring import Ring, bytes_needed
from clusterenv.store.samplers import (
    Recent,
    Sampler,
    Uniform,
    alike,
    described,
    from_description,
    shown,
)
from clusterenv.store.specs import Specs, specs_of, specs_of_schema
from clusterenv.store.stacks import Stack

__all__ = ["ReplayStats", "ReplayStore"]

_LEAST_SIDE = 1024  # observations beside the rows that every store has room for


@dataclass(frozen=True)
class ReplayStats:
    """What a store holds, and what went through it since it was begun."""

    rows: int
    capacity: int
    added_rows: int
    sampled_rows: int
    evicted_rows: int
    nbytes: int
    oldest_version: int
    newest_version: int


@runtime_checkable
class _Source(Protocol):
    """A collector, to the store: batches, and how many are there without waiting."""

    @property
    def ready(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


class ReplayStore:
    """Keeps the newest rows of a collector and hands out samples of them.

    Parameters
    ----------
    capacity
        Rows at most; the oldest make room for the newest.
    sampler
        Which rows a sample has: :class:`Uniform`, :class:`Prioritized`, :class:`NStep`,
        :class:`Sequences`, :class:`Recent`, or one of your own.
    schema
        Arrow schema of the batches, to take the memory at once; by default with the first
        batch. It says nothing of recurrent state: leave it out for such policies.
    directory
        Where the columns are, as files, if they are more than memory holds.
    journal
        Where the rows are written as they come, to go on from after a crash: whatever is
        there already is loaded. See :meth:`commit`.
    ratio
        How many rows are sampled for each row added; ``None`` for any number.
    stack
        Frames stacked in each observation, such as 4 or ``Stack(4, axis=-1)``: each frame is
        then stored once.
    side
        Room for observations that follow no row: the ends of episodes and fragments, as a
        part of ``capacity``. If there are more, the oldest rows leave earlier.
    seed
        Of the samples.

    Examples
    --------
    >>> store = ReplayStore(100_000, sampler=Uniform())
    >>> len(store), store.capacity
    (0, 100000)

    With a collector, learning while it collects::

        for sample in store.feed(collector, 256):
            loss = learn(sample["obs"], sample["action"], …)
    """

    def __init__(
        self,
        capacity: int,
        *,
        sampler: Sampler | None = None,
        schema: pa.Schema | None = None,
        directory: str | Path | None = None,
        journal: str | Path | None = None,
        ratio: Ratio | float | None = None,
        stack: Stack | int | None = None,
        side: float = 0.1,
        seed: int | None = None,
    ) -> None:
        if not isinstance(capacity, (int, np.integer)) or capacity < 1:
            raise ConfigError(f"capacity={capacity!r} is no number of rows: ReplayStore(100_000)")
        if not 0 < side <= 1:
            raise ConfigError(f"side={side} is not between 0 and 1: ReplayStore(..., side=0.1)")
        if directory is not None and journal is not None and _same(directory, journal):
            raise ConfigError(
                f"directory and journal are both {str(journal)!r}; the one is room to work in, "
                "the other a record: ReplayStore(..., directory='run/columns', "
                "journal='run/journal')"
            )
        self.capacity = int(capacity)
        self.sampler: Sampler = Uniform() if sampler is None else sampler
        self.ratio = Ratio(ratio) if isinstance(ratio, (int, float)) else ratio
        if self.ratio is not None:
            self.ratio.check(self.capacity)
            if isinstance(self.sampler, Recent):
                raise ConfigError(
                    f"Recent counts the uses of each batch itself, and leaves nothing to "
                    f"{self.ratio}: ReplayStore(..., sampler=Recent(4, uses=2)), without ratio="
                )
        self._stack = Stack(stack) if isinstance(stack, int) else stack
        self._side_part = side
        self._rng = np.random.default_rng(seed)
        self._lock = threading.RLock()
        self._ring: Ring | None = None
        self._sampled = 0
        self._batch_rows = 0
        self._sample_rows = 0
        self._nothing_to_draw = False  # though there are rows
        self.closed = False
        self.note: Mapping[str, Any] = {}
        """What was given with the last commit."""
        self._memory = InMemory() if directory is None else InFiles(Path(directory))
        self._journal: Journal | None = None
        self._journal_lacks_rows = False
        opened: Journal | None = None
        try:
            if schema is not None:
                self._allocate(specs_of_schema(schema))
            if journal is not None:
                opened = Journal(journal, stack=self._stack)
                self._go_on(opened)
                self._journal = opened
        except BaseException:
            if opened is not None:
                opened.close()
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
        RatioError
            If the learner is too far behind; the batch is not lost, sample and add it again.
        StoreTooLarge
            With the first batch, if the columns do not fit.
        StoreNotWritten
            If the journal cannot be written; the rows are in the store all the same.
        """
        with self._lock:
            self._check_open()
            if batch.num_rows <= self.capacity:  # what is refused now will come again
                self._batch_rows = max(self._batch_rows, batch.num_rows)
            if not self.may_add(batch.num_rows):
                raise RatioError(
                    f"the learner is behind: {self._added:,} rows were added and "
                    f"{self._sampled:,} sampled, with {self.ratio}; sample before adding more, "
                    "or let store.feed(collector, n) do it"
                )
            if self._ring is None:
                self._allocate(specs_of(batch))
            assert self._ring is not None
            self.sampler.check(batch)
            block = self._ring.add(batch)
            self.sampler.added(block, batch)
            if self._journal is not None and not self._journal_lacks_rows:
                self._journal_lacks_rows = True
                self._journal.append(batch)
                self._journal_lacks_rows = False

    def _allocate(self, specs: Specs) -> None:
        def needed(capacity: int) -> int:
            return bytes_needed(specs, capacity, self._side_of(capacity), self._stack)

        self._memory.check(needed, self.capacity)
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
            Rows, or sequences; :class:`Recent` decides by itself.
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
        if n is not None and (not isinstance(n, (int, np.integer)) or n < 1):
            raise ConfigError(f"sample({n!r}): how many rows? sample(256)")
        with self._lock:
            self._check_open()
            ring = self._ring
            if ring is None or not len(ring):
                raise EmptyStore("the store holds no rows; add a batch first: store.add(batch)")
            also = tuple(name for name in columns if name not in ring.specs.obs)
            for name in also:
                if name not in ring.columns:
                    raise ConfigError(
                        f"there is no column {name!r}; there are {', '.join(ring.columns)}"
                    )
            if n is not None:
                self._sample_rows = max(self._sample_rows, n)
                if not self.may_sample(n):
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
        rows, values = _array(indices), _array(priorities)
        if rows.ndim != 1 or rows.shape != values.shape:
            raise ConfigError(
                f"{rows.shape} indices and {values.shape} priorities; one number per index: "
                "store.update_priorities(sample['indices'], error.abs())"
            )
        with self._lock:
            self._check_open()
            if self._ring is None:
                raise EmptyStore("the store holds no rows; add a batch first: store.add(batch)")
            if not np.issubdtype(rows.dtype, np.integer) or (
                len(rows) and not (rows.min() >= 0 and rows.max() < self._added)
            ):
                raise ConfigError(
                    f"indices are those of a sample, from 0 to {self._added - 1:,}, got {rows}: "
                    "store.update_priorities(sample['indices'], error.abs())"
                )
            self.sampler.update(rows, values)

    # Learner and collection in step

    def may_sample(self, n: int) -> bool:
        """Whether there are rows, and the ratio lets the learner take ``n`` now."""
        if self.ratio is None:
            return len(self) > 0
        if self._batch_rows:
            self.ratio.check_sizes(self._batch_rows, n)
        counts = {"added": self._added, "sampled": self._sampled}
        return self.ratio.may_sample(n, rows=self._batch_rows, **counts)

    def may_add(self, rows: int) -> bool:
        """Whether the ratio lets a batch of ``rows`` rows come now."""
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
        it wait for a batch. It ends when the source does.

        Parameters
        ----------
        source
            A :class:`clusterenv.Collector`, or any iterable of batches.
        n, options
            As for :meth:`sample`.
        """
        self._sample_rows = max(self._sample_rows, n or 0)
        batches = iter(source)
        must_wait = not self.may_sample(n or 1)  # a store with rows may owe the learner samples
        while True:
            waiting = source.ready if isinstance(source, _Source) else 1
            while must_wait or (waiting > 0 and self.may_add(self._batch_rows)):
                batch = next(batches, None)
                if batch is None:
                    return
                self.add(batch)
                waiting -= 1
                must_wait = not self.may_sample(n or 1)
            try:
                sample = self.sample(n, **options)
            except (EmptyStore, RatioError):
                must_wait = True
                continue
            yield sample

    # To disk and back

    def commit(self, **note: Any) -> None:
        """Make all rows in the journal count, with priorities, random state and ``note``.

        After a crash, the journal is as it was after the last commit that returned.

        Parameters
        ----------
        **note
            Kept with it, as JSON: which checkpoint of the learner belongs to these rows,
            for example. By default the note of the commit before stays.
        """
        with self._lock:
            self._check_open()
            if self._journal is None:
                raise ConfigError("this store keeps no journal: ReplayStore(..., journal='replay')")
            note = note or dict(self.note)
            as_json(note, "a note")
            before, self.note = self.note, note
            lacks, self._journal_lacks_rows = self._journal_lacks_rows, True
            try:
                if lacks:  # it could not be written meanwhile
                    self._write_all(self._journal)
                else:
                    self._write(self._journal, keep=len(self))
            except BaseException:
                self.note = before
                raise
            self._journal_lacks_rows = False

    def save(self, directory: str | Path) -> None:
        """Write everything to a directory; what it held before stays until all is written."""
        with self._lock:
            self._check_open()
            target = Path(directory)
            if self._journal is not None and _same(target, self._journal.directory):
                raise ConfigError(f"{directory} is this store's journal: store.commit()")
            journal = Journal(target, stack=self._stack)
            try:
                self._write_all(journal)
            finally:
                journal.close()

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        capacity: int | None = None,
        sampler: Sampler | None = None,
        skip_damaged: bool = False,
        **options: Any,
    ) -> ReplayStore:
        """Return the store that was saved, or journaled, in a directory.

        Parameters
        ----------
        directory
            It is only read; to go on with a journal, pass it as ``journal=`` instead.
        capacity, sampler
            By default those of the store that was saved.
        skip_damaged
            Whether to leave out files that were altered, instead of raising.
        options
            As for the constructor: ``directory``, ``ratio``, … With ``seed``, samples begin
            anew; with ``journal``, all rows are written to it.

        Raises
        ------
        StoreUnreadable
            If there is no store, or one of a newer version.
        StoreDamaged
            If a file is missing or was altered: which, and what is still readable.
        """
        path = Path(directory)
        manifest = read_manifest(path)
        kept = manifest.store
        if not kept and not manifest.segments:
            raise StoreUnreadable(f"{directory} holds no store: nothing was committed there yet")
        if manifest.stack is not None:
            options.setdefault("stack", Stack(*manifest.stack))
        if capacity is None:
            capacity = kept.get("capacity", max(1, manifest.rows))
        if sampler is None and kept:
            sampler = from_description(kept["sampler"])
        store = cls(capacity, sampler=sampler, **{"side": kept.get("side", 0.1), **options})
        try:
            store._load(path, manifest, skip_damaged)
        except BaseException:
            store.close()
            raise
        if options.get("seed") is not None:
            store._rng = np.random.default_rng(options["seed"])
        return store

    def close(self) -> None:
        """Release files and memory; rows that were not committed are not in the journal."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            if self._ring is not None:
                self._ring.release()
            self._ring = None
            if self._journal is not None:
                self._journal.close()
            self._memory.close()

    def __enter__(self) -> ReplayStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Inside

    @property
    def _added(self) -> int:
        return 0 if self._ring is None else self._ring.end

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("this ReplayStore is closed; make a new one")

    def _write(self, journal: Journal, **options: Any) -> None:
        settings = {
            "capacity": self.capacity,
            "side": self._side_part,
            "sampler": described(self.sampler),
            "random": self._rng.bit_generator.state,
            "sampled": self._sampled,
            "position": {} if self._ring is None else self._ring.position,
        }
        state = self.sampler.state() if self._ring is not None else {}
        journal.commit(**options, end=self._added, store=settings, state=state, note=self.note)

    def _write_all(self, journal: Journal) -> None:
        """Write all rows anew; what the journal has stays until this is done."""
        for block in self._ring.blocks if self._ring else ():
            assert self._ring is not None
            journal.append(self._ring.batch(block))
        self._write(journal, replace=True)

    def _go_on(self, journal: Journal) -> None:
        kept = journal.manifest.store
        if kept and kept["capacity"] != self.capacity:
            raise ConfigError(
                f"the journal {journal.directory} is of a store with capacity={kept['capacity']:_}"
                f", not {self.capacity:_}; load it into another: ReplayStore.load(...)"
            )
        if kept and not alike(kept["sampler"], described(self.sampler)):
            raise ConfigError(
                f"the journal {journal.directory} is of a store with sampler="
                f"{shown(kept['sampler'])}, not {shown(described(self.sampler))}; load it into "
                "another: ReplayStore.load(...)"
            )
        self._load(journal.directory, journal.manifest, skip_damaged=False)

    def _load(self, directory: Path, manifest: Manifest, skip_damaged: bool) -> None:
        if self._added:
            raise ConfigError(
                f"the journal holds rows already, to which those of {directory} cannot be added: "
                "ReplayStore.load(..., journal='a new directory')"
            )
        written = manifest
        if skip_damaged:
            manifest = without_damaged(directory, manifest)
        ratio, self.ratio = self.ratio, None  # it speaks of the future
        try:
            for index, batch in enumerate(read_batches(directory, manifest)):
                if self._ring is None:
                    self._allocate(specs_of(batch))
                if index == 0 and self._ring is not None:
                    self._ring.start_at(manifest.end - manifest.rows)
                self.add(batch)
        finally:
            self.ratio = ratio
        self.note = manifest.note
        kept = manifest.store
        if kept:
            self._sampled = kept["sampled"]
            self._rng.bit_generator.state = kept["random"]
        if kept and self._ring is not None and manifest == written:
            self._restore(directory, manifest, self._ring, skip_damaged)

    def _restore(self, directory: Path, manifest: Manifest, ring: Ring, skip_damaged: bool) -> None:
        """Let rows leave that had left, and the sampler go on; unless there are other rows."""
        kept = manifest.store
        if kept["capacity"] == self.capacity and ring.first <= kept["position"]["first"]:
            ring.go_on_from(kept["position"])
        same = (ring.first, ring.end) == (kept["position"]["first"], manifest.end)
        if not same or not alike(kept["sampler"], described(self.sampler)):
            return
        try:
            state = read_state(directory, manifest)
        except StoreDamaged:
            if not skip_damaged:
                raise
        else:
            self.sampler.restore(state)


def _array(values: npt.ArrayLike | torch.Tensor) -> npt.NDArray[Any]:
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)


def _same(left: str | Path, right: str | Path) -> bool:
    return Path(left).resolve() == Path(right).resolve()
