"""The off-policy store: rows stay, a learner samples them, and a crash loses none committed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_flag, check_path
from clusterenv.errors import ConfigError, SchemaMismatch, StoreDamaged, StoreUnreadable
from clusterenv.store.journal.journal import Journal
from clusterenv.store.journal.manifest import MANIFEST, as_json
from clusterenv.store.journal.manifest_fields import generator_of
from clusterenv.store.journal.snapshot import Snapshot, forged, open_snapshot
from clusterenv.store.ratio import Ratio
from clusterenv.store.samplers import Sampler, alike, described, from_description, shown
from clusterenv.store.sampling import Replay
from clusterenv.store.table.ring import Ring
from clusterenv.store.table.specs import specs_of
from clusterenv.store.table.stacks import Stack

__all__ = ["ReplayStore"]


class ReplayStore(Replay):
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
        then stored once. If only some of a Dict's observations are stacks:
        ``Stack(4, only=("obs.image",))``.
    side
        Room for observations that follow no row: the ends of episodes and fragments, as a
        part of ``capacity``. If there are more, the oldest rows leave earlier.
    seed
        Of the samples.

    Examples
    --------
    >>> store = ReplayStore(100_000)
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
        if directory is not None:
            directory = check_path("directory", directory, "ReplayStore(..., directory='replay')")
        if journal is not None:
            journal = check_path("journal", journal, "ReplayStore(..., journal='replay')")
        if directory is not None and journal is not None and _same(directory, journal):
            raise ConfigError(
                f"directory and journal are both {str(journal)!r}; the one is room to work in, "
                "the other a record: ReplayStore(..., directory='run/columns', "
                "journal='run/journal')"
            )
        self.note: Mapping[str, Any] = {}
        """What was given with the last commit."""
        self._journal: Journal | None = None
        self._journal_lacks_rows = False
        super().__init__(
            capacity,
            sampler=sampler,
            schema=schema,
            directory=directory,
            ratio=ratio,
            stack=stack,
            side=side,
            seed=seed,
        )
        opened: Journal | None = None
        try:
            if journal is not None:
                opened = Journal(journal, stack=self._stack)
                self._go_on(opened)
                self._journal = opened
        except BaseException:
            if opened is not None:
                opened.close()
            self.close()
            raise

    def add(self, batch: Batch) -> None:
        """Copy a batch in, and write it to the journal if there is one.

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
        StoreNotWritten
            If the journal cannot be written; the rows are in the store all the same.
        """
        with self._lock:
            if self._journal is not None:
                self._journal.check_process()
            super().add(batch)
            if self._journal is not None and not self._journal_lacks_rows:
                self._journal_lacks_rows = True
                self._journal.append(batch)
                self._journal_lacks_rows = False

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
            self._journal.check_process()
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
            target = check_path("directory", directory, "store.save('replay')")
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
            If there is no store, or one of another format.
        StoreDamaged
            If a file is missing or was altered: which, and what is still readable.
        """
        path = check_path("directory", directory, "ReplayStore.load('replay')")
        check_flag("skip_damaged", skip_damaged, "ReplayStore.load('replay', skip_damaged=True)")
        snapshot = open_snapshot(path)
        manifest, kept = snapshot.manifest, snapshot.manifest.store
        if not kept and not manifest.segments:
            raise StoreUnreadable(f"{directory} holds no store: nothing was committed there yet")
        if manifest.stack is not None:
            options.setdefault("stack", manifest.stack)
        if capacity is None:
            capacity = kept.get("capacity", max(1, manifest.rows))
        if sampler is None and kept:
            sampler = from_description(kept["sampler"], snapshot.directory / MANIFEST)
        store = cls(capacity, sampler=sampler, **{"side": kept.get("side", 0.1), **options})
        try:
            store._load(snapshot, skip_damaged)
        except BaseException:
            store.close()
            raise
        if options.get("seed") is not None:
            store._rng = np.random.default_rng(options["seed"])
        return store

    def close(self) -> None:
        """Release files and memory; rows that were not committed are not in the journal."""
        with self._lock:
            super().close()
            if self._journal is not None:
                self._journal.close()

    # Inside

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
        self._load(Snapshot.of(journal.directory, journal.manifest), skip_damaged=False)

    def _load(self, snapshot: Snapshot, skip_damaged: bool) -> None:
        if self._added:
            raise ConfigError(
                f"the journal holds rows already, to which those of {snapshot.directory} cannot be "
                "added: ReplayStore.load(..., journal='a new directory')"
            )
        whole = not (skip_damaged and snapshot.damaged)
        if not whole:
            snapshot = snapshot.without_damaged()
        ratio, self.ratio = self.ratio, None  # it speaks of the future
        try:
            self._add_all(snapshot)
        finally:
            self.ratio = ratio
        self.note, kept = snapshot.manifest.note, snapshot.manifest.store
        if kept:
            self._sampled, self._rng = kept["sampled"], generator_of(kept["random"])
            if self._ring is not None and whole and kept["position"]:
                self._restore(snapshot, self._ring, skip_damaged)

    def _add_all(self, snapshot: Snapshot) -> None:
        manifest = snapshot.manifest
        for segment in manifest.segments:
            for batch in snapshot.batches_of(segment):
                try:
                    if self._ring is None:
                        self._allocate(specs_of(batch))
                    if not self._added and self._ring is not None:
                        self._ring.start_at(manifest.end - manifest.rows)
                    self.add(batch)
                except (ConfigError, SchemaMismatch) as error:
                    file = snapshot.directory / segment.file
                    raise type(error)(f"{file} cannot be loaded: {error}") from error

    def _restore(self, snapshot: Snapshot, ring: Ring, skip_damaged: bool) -> None:
        """Let rows leave that had left, and the sampler go on; unless there are other rows."""
        manifest, kept = snapshot.manifest, snapshot.manifest.store
        position = kept["position"]
        if kept["capacity"] == self.capacity and ring.first <= position["first"]:
            ring.go_on_from(position)
        same = (ring.first, ring.end) == (position["first"], manifest.end)
        if not same or not alike(kept["sampler"], described(self.sampler)):
            return
        file = MANIFEST if manifest.state is None else manifest.state.file
        try:
            state = snapshot.state()
            with forged(snapshot.directory / file):
                self.sampler.restore(state)
        except StoreDamaged:
            if not skip_damaged:
                raise


def _same(left: str | Path, right: str | Path) -> bool:
    return Path(left).resolve() == Path(right).resolve()
