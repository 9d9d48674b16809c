"""The off-policy store: keeps rows for a learner to sample, and commits them to disk."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy.typing as npt
import pyarrow as pa
import torch

from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_flag, check_instance, check_path, check_whole
from clusterenv.data.processes import hold_at_fork
from clusterenv.data.summary import Summary, decimals
from clusterenv.errors import ClosedError, ConfigError, EmptyStore
from clusterenv.store import persistence
from clusterenv.store.journal.snapshot import open_snapshot
from clusterenv.store.rate_limiter import RateLimiter, Ratio, check_source
from clusterenv.store.replay_buffer import ReplayBuffer, ReplayStats, check_priorities
from clusterenv.store.samplers.sampler import Sampler, Uniform, check_sampler
from clusterenv.store.table.schema import schema_of_arrow
from clusterenv.store.table.stacks import Stack

__all__ = ["ReplayStore"]

_MAX_SAMPLE = 2**20  # rows, of a store with a smaller capacity


class ReplayStore(Summary):
    """Keeps the newest rows of a collector, and returns samples of them.

    Parameters
    ----------
    capacity
        Maximum number of rows; new rows replace the oldest.
    sampler
        Which rows to sample: :class:`Uniform` (default), :class:`Prioritized`, :class:`NStep`,
        :class:`Sequences`, :class:`Recent`, or a custom :class:`Sampler`.
    schema
        Arrow schema of the batches, to allocate memory immediately instead of with the first
        batch. It does not describe recurrent state: omit it for recurrent policies.
    directory
        Keep the columns in memory-mapped files of this directory.
    journal
        Write rows to this directory as they are added, to resume after a crash: rows that it
        holds already are loaded. See :meth:`commit`.
    ratio
        Rows to sample per row added; ``None`` for no limit.
    stack
        Frames stacked in each observation, such as 4 or ``Stack(4, axis=-1)``: each frame is
        then stored once. If only some of a Dict's observations are stacks:
        ``Stack(4, only=("obs.image",))``.
    side
        Slots for observations that no row holds (ends of episodes and fragments), as a part of
        ``capacity``. If they run out, the oldest rows are evicted earlier.
    seed
        Seed of the samples.

    Examples
    --------
    >>> store = ReplayStore(100_000)
    >>> len(store), store.capacity
    (0, 100000)

    To learn while a collector collects::

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
        directory, journal = persistence.check_paths(directory, journal)
        self.capacity = check_whole("capacity", capacity, "ReplayStore(100_000)", least=1)
        self._max_sample = max(self.capacity, _MAX_SAMPLE)
        self.sampler = check_sampler(Uniform() if sampler is None else sampler)
        self._limiter = RateLimiter(ratio, self.capacity, self.sampler)
        self._lock = threading.RLock()
        hold_at_fork(self._lock)
        self.note: Mapping[str, Any] = {}
        """The note of the last commit."""
        self.closed = False
        self._journal: persistence.StoreJournal | None = None
        self._buffer = ReplayBuffer(self.capacity, self.sampler, directory, stack, side, seed)
        try:
            if schema is not None:
                self._buffer.allocate(schema_of_arrow(schema))
            if journal is not None:
                self._journal = persistence.StoreJournal(journal, self._buffer, self._add)
                self.note = self._journal.journal.manifest.note
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._buffer)

    def _summary(self) -> Mapping[str, Any]:
        if self.closed:
            return {"capacity": self.capacity, "closed": True}
        journal = None if self._journal is None else self._journal.journal.directory
        given = {"ratio": self.ratio, "journal": journal}
        return {
            "rows": len(self),
            "capacity": self.capacity,
            "sampler": type(self.sampler).__name__,
            "megabytes": decimals(self.nbytes / 1e6),
            **{name: value for name, value in given.items() if value is not None},
        }

    @property
    def ratio(self) -> Ratio | None:
        """Rows to sample per row added; ``None`` for no limit."""
        return self._limiter.ratio

    @ratio.setter
    def ratio(self, ratio: Ratio | None) -> None:
        self._limiter.ratio = ratio

    @property
    def nbytes(self) -> int:
        """Bytes of the columns; 0 before they are allocated."""
        return self.stats.nbytes

    @property
    def stats(self) -> ReplayStats:
        """Contents and counters."""
        with self._lock:
            return self._buffer.stats

    def add(self, batch: Batch) -> None:
        """Copy a batch into the store, and write it to the journal if there is one.

        Raises
        ------
        SchemaMismatch
            If its columns are not those of the store.
        ConfigError
            If it is refused for another reason, such as its size; the store has not changed.
        RatioError
            If the learner is too far behind; sample, then add the batch again.
        StoreTooLarge
            With the first batch, if the columns do not fit.
        StoreNotWritten
            If the journal cannot be written; the rows are in the store nevertheless.
        """
        check_instance("batch", batch, Batch, "store.add(next(iter(collector)))")
        with self._lock:
            self._check_open(writing=True)
            self._add(batch, limited=True)

    def _add(self, batch: Batch, limited: bool = False) -> None:
        buffer, limiter, rows = self._buffer, self._limiter, batch.num_rows
        admitted = buffer.check(batch)
        limiter.batch_rows = max(limiter.batch_rows, rows)
        if limited:
            limiter.check_add(rows, buffer.added, buffer.sampled)
        buffer.add(batch, admitted)
        if self._journal is not None:
            self._journal.append(batch)

    def sample(
        self, n: int | None = None, *, columns: Iterable[str] = (), tensors: bool = False
    ) -> dict[str, Any]:
        """Return rows as a dictionary of arrays, which the caller may change.

        Keys are ``obs``, ``action``, ``reward``, ``next_obs``, ``terminated``, ``truncated``
        (``obs.<key>`` for Dict observations), ``indices``, ``weights``, those that the sampler
        adds, and ``columns``.

        Parameters
        ----------
        n
            Number of rows or sequences; omit it for :class:`Recent`. At most ``capacity`` or
            2**20, whichever is larger.
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
        if n is not None and not (type(n) is int and 0 < n <= self._max_sample):
            n = self._check_n(n)
        if tensors is not False:
            tensors = check_flag("tensors", tensors, "sample(256, tensors=True)")
        with self._lock:
            self._check_open()
            buffer, limiter = self._buffer, self._limiter
            also = buffer.check_columns(columns)
            if n is not None:
                limiter.check_sample(n, buffer.added, buffer.sampled)
            try:
                found = buffer.sample(n, also)
            except EmptyStore:
                limiter.starved = True
                raise
            limiter.starved = False
        return {k: torch.from_numpy(v) for k, v in found.items()} if tensors else found

    def update_priorities(
        self, indices: npt.ArrayLike | torch.Tensor, priorities: npt.ArrayLike | torch.Tensor
    ) -> None:
        """Set the priorities of the rows ``sample["indices"]``: absolute errors, one per index.

        Rows that were evicted meanwhile are ignored.
        """
        rows, values = check_priorities(indices, priorities)
        with self._lock:
            self._check_open()
            self._buffer.update_priorities(rows, values)

    def may_sample(self, n: int) -> bool:
        """Whether there are rows, and the ratio allows sampling ``n`` of them now."""
        buffer, n = self._buffer, self._check_n(n)
        return self._limiter.may_sample(n, buffer.added, buffer.sampled) and len(self) > 0

    def may_add(self, rows: int) -> bool:
        """Whether the ratio allows adding a batch of ``rows`` rows now."""
        rows = check_whole("rows", rows, "store.may_add(batch.num_rows)")
        return self._limiter.may_add(rows, self._buffer.added, self._buffer.sampled)

    def feed(
        self, source: Iterable[Batch], n: int | None = None, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield samples of ``n`` rows, and add the batches of a collector meanwhile.

        Between two samples, it adds the batches that have arrived, as far as the ratio allows;
        batches that are not taken hold the shards back. It waits for a batch only when it may not
        sample. A batch that is larger than the ratio allows is postponed until the learner has
        caught up, or until the next call of ``feed``. It ends when the source does.

        Parameters
        ----------
        source
            A :class:`clusterenv.Collector`, or any iterable of batches.
        n, options
            As for :meth:`sample`.

        Raises
        ------
        RatioError
            If the slack of the ratio is too small for these batches and samples.
        """
        check_source(source)
        return self._limiter.feed(self, source, None if n is None else self._check_n(n), options)

    def commit(self, **note: Any) -> None:
        """Commit all rows to the journal, with priorities, random state and ``note``.

        After a crash, the journal is as it was after the last commit that returned.

        Parameters
        ----------
        **note
            Saved as JSON, for example the name of the learner's checkpoint that belongs to these
            rows. By default the previous note stays.
        """
        with self._lock:
            self._check_open(writing=True)
            if self._journal is None:
                raise ConfigError("this store keeps no journal: ReplayStore(..., journal='replay')")
            self._journal.commit(note or self.note)
            self.note = self._journal.journal.manifest.note

    def save(self, directory: str | Path) -> None:
        """Write everything to a directory; its previous contents stay valid until then."""
        with self._lock:
            self._check_open()
            path = check_path("directory", directory, "store.save('replay')")
            own = None if self._journal is None else self._journal.journal.directory.resolve()
            if path.resolve() == own:
                raise ConfigError(f"{directory} is this store's journal: store.commit()")
            persistence.save(path, self._buffer, self.note)

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
        """Return a store with the contents of a saved store or a journal.

        Parameters
        ----------
        directory
            It is only read; to resume a journal, pass it as ``journal=`` instead.
        capacity, sampler
            By default those of the saved store.
        skip_damaged
            Whether to skip damaged files instead of raising.
        options
            As for the constructor: ``directory``, ``ratio``, … ``seed`` replaces the saved random
            state; with ``journal``, all rows are written to it.

        Raises
        ------
        StoreUnreadable
            If there is no store, or its format is another one.
        StoreDamaged
            If a file is missing or was altered; the message says which, and what is readable.
        """
        path = check_path("directory", directory, "ReplayStore.load('replay')")
        check_flag("skip_damaged", skip_damaged, "ReplayStore.load('replay', skip_damaged=True)")
        snapshot = open_snapshot(path)
        store = cls(**{**persistence.saved_options(snapshot, capacity, sampler), **options})
        seeded = options.get("seed") is not None
        try:
            persistence.restore(snapshot, store._buffer, store._add, skip_damaged, not seeded)
        except BaseException:
            store.close()
            raise
        store.note = snapshot.note
        return store

    def close(self) -> None:
        """Release files and memory; uncommitted rows are not in the journal."""
        with self._lock:
            if not self.closed:
                self.closed = True
                self._limiter.postponed.clear()
                self._buffer.close()
                if self._journal is not None:
                    self._journal.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_n(self, n: Any) -> int:
        return check_whole("n", n, "store.sample(256)", least=1, most=self._max_sample)

    def _check_open(self, writing: bool = False) -> None:
        if self.closed:
            raise ClosedError("this ReplayStore is closed; make a new one")
        self._buffer.storage.check_process()
        if writing and self._journal is not None:
            self._journal.journal.check_process()
