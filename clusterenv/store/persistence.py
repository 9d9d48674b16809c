"""Saves a replay buffer to a journal, and restores it from a snapshot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_path
from clusterenv.errors import ConfigError, SchemaMismatch, StoreDamaged, StoreUnreadable
from clusterenv.store.journal.journal import Journal
from clusterenv.store.journal.manifest import MANIFEST, as_json, generator_of
from clusterenv.store.journal.snapshot import Snapshot
from clusterenv.store.replay_buffer import ReplayBuffer
from clusterenv.store.samplers.nstep import NStep
from clusterenv.store.samplers.prioritized import Prioritized
from clusterenv.store.samplers.recent import Recent
from clusterenv.store.samplers.sampler import Sampler, Uniform
from clusterenv.store.samplers.sequences import Sequences
from clusterenv.store.table.schema import schema_of

__all__ = ["StoreJournal", "check_paths", "restore", "save", "saved_options"]

_SAMPLERS = {kind.__name__: kind for kind in (Uniform, Prioritized, NStep, Sequences, Recent)}


class StoreJournal:
    """The journal of a store: each batch as it is added, and commits.

    Rows that it holds already are restored; ``add`` adds a batch to the store. If a batch could
    not be written, the next commit writes all rows of the store again.
    """

    def __init__(self, directory: Path, buffer: ReplayBuffer, add: Callable[[Batch], None]) -> None:
        self.journal = Journal(directory, stack=buffer.stack)
        self._buffer = buffer
        self._lacks_rows = False
        try:
            self._check_settings()
            restore(Snapshot.of(directory, self.journal.manifest), buffer, add)
        except BaseException:
            self.journal.close()
            raise

    def _check_settings(self) -> None:
        saved, buffer = self.journal.manifest.store, self._buffer
        if not saved:
            return
        was = f"capacity={saved['capacity']:_} and sampler={_as_code(saved['sampler'])}"
        now = f"capacity={buffer.capacity:_} and sampler={_as_code(_describe(buffer.sampler))}"
        if was != now:
            raise ConfigError(
                f"the journal {self.journal.directory} is of a store with {was}, not {now}; load "
                "it into another: ReplayStore.load(...)"
            )

    def append(self, batch: Batch) -> None:
        if not self._lacks_rows:
            self._lacks_rows = True
            self.journal.append(batch)
            self._lacks_rows = False

    def commit(self, note: Mapping[str, Any]) -> None:
        """Commit all rows of the store, the state of its sampler, and a note."""
        as_json(note, "a note")
        lacks_rows, self._lacks_rows = self._lacks_rows, True
        if lacks_rows:
            _write_all(self.journal, self._buffer, note)
        else:
            self.journal.commit(keep=len(self._buffer), note=note, **_contents(self._buffer))
        self._lacks_rows = False


def save(directory: Path, buffer: ReplayBuffer, note: Mapping[str, Any]) -> None:
    """Write everything to a directory; its previous contents stay valid until then."""
    with contextlib.closing(Journal(directory, stack=buffer.stack)) as journal:
        _write_all(journal, buffer, note)


def _write_all(journal: Journal, buffer: ReplayBuffer, note: Mapping[str, Any]) -> None:
    journal.rollback()
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
        "sampler": _describe(sampler),
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


def saved_options(
    snapshot: Snapshot, capacity: int | None, sampler: Sampler | None
) -> dict[str, Any]:
    """Return constructor arguments of the store that was saved, or the given values."""
    manifest, saved = snapshot.manifest, snapshot.manifest.store
    if not saved and not manifest.segments:
        raise StoreUnreadable(
            f"{snapshot.directory} holds no store: nothing was committed there yet"
        )
    if sampler is None and saved:
        sampler = _create_sampler(saved["sampler"], snapshot.directory / MANIFEST)
    if capacity is None:
        capacity = saved.get("capacity", max(1, manifest.rows))
    side = saved.get("side", 0.1)
    return {"capacity": capacity, "sampler": sampler, "side": side, "stack": manifest.stack}


def restore(
    snapshot: Snapshot,
    buffer: ReplayBuffer,
    add: Callable[[Batch], None],
    skip_damaged: bool = False,
    random: bool = True,
) -> None:
    """Restore rows, sampler and, if ``random``, random state; ``add`` adds a batch."""
    if buffer.added:
        raise ConfigError(
            f"the journal holds rows already, to which those of {snapshot.directory} cannot be "
            "added: ReplayStore.load(..., journal='a new directory')"
        )
    damaged = skip_damaged and bool(snapshot.damaged)
    if damaged:
        snapshot = snapshot.without_damaged()
    for segment in snapshot.manifest.segments:
        for batch in snapshot.batches_of(segment):
            try:
                ring = buffer.allocate(schema_of(batch)) if buffer.ring is None else buffer.ring
                if not ring.end:
                    ring.start_at(snapshot.end - snapshot.rows)
                add(batch)
            except (ConfigError, SchemaMismatch) as error:
                file = snapshot.directory / segment.file
                raise type(error)(f"{file} cannot be loaded: {error}") from error
    saved = snapshot.manifest.store
    if saved:
        buffer.sampled = saved["sampled"]
        if random:
            buffer.rng = generator_of(saved["random"])
        if not damaged and saved["position"]:
            _restore_sampler(snapshot, buffer, skip_damaged)


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
    if not same_rows or _as_code(saved["sampler"]) != _as_code(_describe(buffer.sampler)):
        return
    try:
        snapshot.restore(buffer.sampler)
    except StoreDamaged:
        if not skip_damaged:
            raise


def _describe(sampler: Sampler) -> dict[str, Any]:
    """Return the sampler's class name and arguments, for JSON."""
    base = getattr(sampler, "base", None)
    return {
        "kind": type(sampler).__name__,
        "settings": dict(sampler.settings()),
        "base": None if base is None else _describe(base),
    }


def _as_code(description: Mapping[str, Any]) -> str:
    """Return a described sampler as Python code, with ``...`` for its settings.

    Samplers with the same code can restore each other's state.
    """
    base = description["base"]
    below = "" if base is None else f", base={_as_code(base)}"
    return f"{description['kind']}(...{below})"


def _create_sampler(description: Mapping[str, Any], manifest: Path) -> Sampler:
    kind = _SAMPLERS.get(description["kind"])
    if kind is None:
        raise StoreUnreadable(
            f"{manifest} is of a store with a sampler {description['kind']!r} of your own; pass "
            f"it: ReplayStore.load(directory, sampler={description['kind']}(...))"
        )
    settings = dict(description["settings"])
    if description["base"] is not None:
        settings["base"] = _create_sampler(description["base"], manifest)
    try:
        sampler: Sampler = kind(**settings)
    except (TypeError, ValueError) as error:
        raise StoreDamaged(
            f"{manifest} was not written by a store: its sampler is "
            f"{_as_code(description)} with {settings}, but {error}"
        ) from error
    return sampler
