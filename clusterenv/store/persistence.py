"""Saves a replay buffer to a journal, and restores it from a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_path
from clusterenv.errors import ConfigError, SchemaMismatch, StoreDamaged, StoreUnreadable
from clusterenv.store.journal.manifest import generator_of
from clusterenv.store.samplers.sampler import compatible, describe, format_description
from clusterenv.store.table.schema import schema_of

if TYPE_CHECKING:
    from clusterenv.store.journal.journal import Journal
    from clusterenv.store.journal.snapshot import Snapshot
    from clusterenv.store.replay_buffer import ReplayBuffer

__all__ = ["StoreJournal", "check_journal", "check_paths", "restore", "saved_options", "write_all"]


class StoreJournal:
    """The journal of a store: each batch as it is added, and commits.

    If a batch could not be written, the next commit writes all rows of the store again.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._lacks_rows = False

    def is_in(self, directory: Path) -> bool:
        """Whether this is the directory of the journal."""
        return directory.resolve() == self.journal.directory.resolve()

    def append(self, batch: Batch) -> None:
        """Write a batch."""
        if not self._lacks_rows:
            self._lacks_rows = True
            self.journal.append(batch)
            self._lacks_rows = False

    def commit(self, buffer: ReplayBuffer, note: Mapping[str, Any]) -> None:
        """Commit all rows of the store, the state of its sampler, and a note."""
        lacks_rows, self._lacks_rows = self._lacks_rows, True
        if lacks_rows:
            write_all(self.journal, buffer, note)
        else:
            self.journal.commit(keep=len(buffer), note=note, **_contents(buffer))
        self._lacks_rows = False


def write_all(journal: Journal, buffer: ReplayBuffer, note: Mapping[str, Any]) -> None:
    """Write and commit all rows; the previous commit stays valid until then."""
    if buffer.ring is not None:
        for block in buffer.ring.blocks:
            journal.append(buffer.ring.batch(block))
    journal.commit(replace=True, note=note, **_contents(buffer))


def _contents(buffer: ReplayBuffer) -> dict[str, Any]:
    """Return what a commit saves besides the rows."""
    ring, sampler = buffer.ring, buffer.sampler
    settings = {
        "capacity": buffer.capacity,
        "side": buffer.side,
        "sampler": describe(sampler),
        "random": buffer.rng.bit_generator.state,
        "sampled": buffer.sampled,
        "position": {} if ring is None else ring.position,
    }
    state = {} if ring is None else sampler.state()
    return {"end": buffer.added, "store": settings, "state": state}


def check_paths(
    directory: str | Path | None, journal: str | Path | None
) -> tuple[Path | None, Path | None]:
    """Return the directories of a store's columns and of its journal, which must differ."""
    if directory is not None:
        directory = check_path("directory", directory, "ReplayStore(..., directory='replay')")
    if journal is not None:
        journal = check_path("journal", journal, "ReplayStore(..., journal='replay')")
    if directory is not None and journal is not None and directory.resolve() == journal.resolve():
        raise ConfigError(
            f"directory and journal are both {str(journal)!r}; the one is room to work in, "
            "the other a record: ReplayStore(..., directory='run/columns', "
            "journal='run/journal')"
        )
    return directory, journal


def check_journal(journal: Journal, buffer: ReplayBuffer) -> None:
    """Raise ``ConfigError`` if a journal belongs to a store with other settings."""
    saved, found = journal.manifest.store, describe(buffer.sampler)
    if saved and saved["capacity"] != buffer.capacity:
        raise ConfigError(
            f"the journal {journal.directory} is of a store with capacity={saved['capacity']:_}"
            f", not {buffer.capacity:_}; load it into another: ReplayStore.load(...)"
        )
    if saved and not compatible(saved["sampler"], found):
        raise ConfigError(
            f"the journal {journal.directory} is of a store with sampler="
            f"{format_description(saved['sampler'])}, not {format_description(found)}; load it "
            "into another: ReplayStore.load(...)"
        )


def saved_options(snapshot: Snapshot) -> dict[str, Any]:
    """Return constructor arguments of the store that was saved; the sampler is not among them.

    Raises ``StoreUnreadable`` if nothing was saved.
    """
    manifest, saved = snapshot.manifest, snapshot.manifest.store
    if not saved and not manifest.segments:
        raise StoreUnreadable(
            f"{snapshot.directory} holds no store: nothing was committed there yet"
        )
    capacity = saved.get("capacity", max(1, manifest.rows))
    return {"capacity": capacity, "side": saved.get("side", 0.1), "stack": manifest.stack}


def restore(
    snapshot: Snapshot,
    buffer: ReplayBuffer,
    add: Callable[[Batch], None],
    skip_damaged: bool = False,
) -> None:
    """Restore rows, random state and sampler of a snapshot; ``add`` adds a batch.

    Raises ``ConfigError`` if the buffer holds rows already, or a batch cannot be added;
    ``StoreDamaged`` if a file is missing or was altered, unless ``skip_damaged``.
    """
    if buffer.added:
        raise ConfigError(
            f"the journal holds rows already, to which those of {snapshot.directory} cannot be "
            "added: ReplayStore.load(..., journal='a new directory')"
        )
    damaged = skip_damaged and bool(snapshot.damaged)
    if damaged:
        snapshot = snapshot.without_damaged()
    _add_rows(snapshot, buffer, add)
    saved = snapshot.manifest.store
    if saved:
        buffer.sampled, buffer.rng = saved["sampled"], generator_of(saved["random"])
        if not damaged and saved["position"]:
            _restore_sampler(snapshot, buffer, skip_damaged)


def _add_rows(snapshot: Snapshot, buffer: ReplayBuffer, add: Callable[[Batch], None]) -> None:
    for segment in snapshot.manifest.segments:
        for batch in snapshot.batches_of(segment):
            try:
                ring = buffer.ring
                if ring is None:
                    ring = buffer.allocate(schema_of(batch))
                if not ring.end:
                    ring.start_at(snapshot.end - snapshot.rows)
                add(batch)
            except (ConfigError, SchemaMismatch) as error:
                file = snapshot.directory / segment.file
                raise type(error)(f"{file} cannot be loaded: {error}") from error


def _restore_sampler(snapshot: Snapshot, buffer: ReplayBuffer, skip_damaged: bool) -> None:
    """Evict the rows that had been evicted, and restore the state of the sampler.

    The state is not restored if the buffer holds other rows, or its sampler is of another kind.
    """
    ring, saved = buffer.ring, snapshot.manifest.store
    if ring is None:
        return
    position: Mapping[str, int] = saved["position"]
    if saved["capacity"] == buffer.capacity and ring.first <= position["first"]:
        ring.resume(position)
    same_rows = (ring.first, ring.end) == (position["first"], snapshot.end)
    if not same_rows or not compatible(saved["sampler"], describe(buffer.sampler)):
        return
    try:
        snapshot.restore(buffer.sampler)
    except StoreDamaged:
        if not skip_damaged:
            raise
