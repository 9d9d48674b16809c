"""Rows on disk: Arrow files and a manifest, complete at every moment.

A directory holds segments (Arrow IPC files), at most one file with what the sampler remembers,
and ``manifest.json``, which says which files count. A commit writes files beside, brings them to
the disk, and then replaces the manifest; whoever is killed in between leaves the state of the
commit before. Files that no manifest names are what a killed process left, and are removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clusterenv.batch import Batch
from clusterenv.errors import SchemaMismatch, StoreDamaged, StoreNotWritten, StoreUnreadable
from clusterenv.store.lock import DirectoryLock
from clusterenv.store.segments import from_segment, to_segment
from clusterenv.store.stacks import Stack

__all__ = [
    "FORMAT",
    "Journal",
    "Manifest",
    "Segment",
    "read_batches",
    "read_manifest",
    "read_state",
]

FORMAT = 1
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Segment:
    """One file of rows."""

    file: str
    rows: int
    nbytes: int
    crc32: int
    blocks: tuple[tuple[int, int, int], ...]
    """Rows, environments and policy version of each batch in it."""


@dataclass(frozen=True)
class Manifest:
    """What counts in a directory."""

    end: int = 0
    """Rows ever written, those that have left included."""
    segments: tuple[Segment, ...] = ()
    stack: tuple[int, int] | None = None
    """Size and axis of stacks of frames."""
    store: Mapping[str, Any] = field(default_factory=dict)
    """What makes the store again: capacity, sampler, random state."""
    state: Segment | None = None
    """The file of the sampler's state."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the user gave with the last commit."""

    @property
    def rows(self) -> int:
        """Rows in all segments."""
        return sum(segment.rows for segment in self.segments)


def read_manifest(directory: Path) -> Manifest:
    """Return what counts in a directory.

    Raises
    ------
    StoreUnreadable
        If there is none, or it is of a newer version.
    StoreDamaged
        If it was altered.
    """
    path = directory / _MANIFEST
    try:
        envelope = json.loads(path.read_bytes())
        text, crc = envelope["manifest"], envelope["crc32"]
        version = envelope["format"]
    except FileNotFoundError:
        raise StoreUnreadable(
            f"{directory} holds no store: there is no {_MANIFEST}; a store is written there by "
            f"store.save({str(directory)!r})"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(_damaged_manifest(directory)) from error
    if version != FORMAT:
        raise StoreUnreadable(
            f"{path} has format {version}, and this version of ClusterEnv reads {FORMAT}; "
            "install the version that wrote it: pip install --upgrade clusterenv"
        )
    if zlib.crc32(text.encode()) != crc:
        raise StoreDamaged(_damaged_manifest(directory))
    raw = json.loads(text)
    raw["segments"] = tuple(_segment(segment) for segment in raw["segments"])
    raw["state"] = None if raw["state"] is None else _segment(raw["state"])
    raw["stack"] = None if raw["stack"] is None else tuple(raw["stack"])
    return Manifest(**raw)


def _segment(raw: Mapping[str, Any]) -> Segment:
    if Path(raw["file"]).name != raw["file"]:
        raise StoreDamaged(f"a manifest names the file {raw['file']!r}, outside its directory")
    return Segment(**{**raw, "blocks": tuple(tuple(block) for block in raw["blocks"])})


def _damaged_manifest(directory: Path) -> str:
    files = sorted(path.name for path in directory.glob("*.arrow"))
    return (
        f"{directory / _MANIFEST} was altered or cut; the rows themselves are Arrow files that "
        f"pyarrow.ipc.open_file reads: {', '.join(files) or 'none are left'}"
    )


def read_batches(
    directory: Path, manifest: Manifest, skip_damaged: bool = False
) -> Iterator[Batch]:
    """Yield all batches, oldest first; each file is checked before it is used.

    Raises
    ------
    StoreDamaged
        At the first file that is missing or was altered, unless it is to be skipped.
    """
    stack = None if manifest.stack is None else Stack(*manifest.stack)
    for segment in manifest.segments:
        fault = _fault(directory, segment)
        if fault is not None and skip_damaged:
            continue
        if fault is not None:
            good = [other for other in manifest.segments if _fault(directory, other) is None]
            rows = sum(other.rows for other in good)
            raise StoreDamaged(
                f"{directory / segment.file} {fault}; {rows:,} of {manifest.rows:,} rows, in "
                f"{len(good)} of {len(manifest.segments)} files, are readable: "
                f"ReplayStore.load({str(directory)!r}, skip_damaged=True)"
            )
        with pa.memory_map(str(directory / segment.file)) as source:
            reader = pa.ipc.open_file(source)
            for index, (_, num_envs, version) in enumerate(segment.blocks):
                yield from_segment(reader.get_batch(index), num_envs, version, stack)


def read_state(directory: Path, manifest: Manifest) -> dict[str, npt.NDArray[Any]]:
    """Return what the sampler remembered."""
    if manifest.state is None:
        return {}
    fault = _fault(directory, manifest.state)
    if fault is not None:
        raise StoreDamaged(
            f"{directory / manifest.state.file} {fault}; all {manifest.rows:,} rows are readable, "
            f"without their priorities: ReplayStore.load({str(directory)!r}, skip_damaged=True)"
        )
    with pa.memory_map(str(directory / manifest.state.file)) as source:
        reader = pa.ipc.open_file(source)
        state: dict[str, npt.NDArray[Any]] = {}
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            name = str(np.asarray(batch.column("name"))[0]) if batch.num_rows else ""
            if name:
                state[name] = np.array(batch.column("value").flatten())
        return state


def _fault(directory: Path, segment: Segment) -> str | None:
    """Say what is wrong with a file, if anything is."""
    path = directory / segment.file
    try:
        size = path.stat().st_size
    except OSError:
        return "is missing"
    if size != segment.nbytes:
        return f"was cut or extended: {size:,} bytes instead of {segment.nbytes:,}"
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return None if crc == segment.crc32 else "was altered: its checksum differs"


class _Beside:
    """An Arrow file in the making, with its checksum."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self._part = path.with_name(f"{path.name}.part")
        self._file = self._part.open("wb")
        self._crc = 0
        self.schema = schema
        self._arrow = pa.ipc.new_file(pa.PythonFile(self, "w"), schema)

    # What pyarrow asks of a file

    closed = False

    def write(self, data: Any) -> int:
        self._crc = zlib.crc32(data, self._crc)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Leave closing to :meth:`seal`."""

    # What the journal asks

    def add(self, batch: pa.RecordBatch) -> None:
        self._arrow.write_batch(batch)

    def seal(self) -> tuple[int, int]:
        """Bring the file to the disk under its name; return its size and checksum."""
        self._arrow.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        nbytes = self._file.tell()
        self._file.close()
        self._part.rename(self.path)
        return nbytes, self._crc

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._part.unlink(missing_ok=True)


class Journal:
    """Writes batches to a directory, in commits.

    Parameters
    ----------
    directory
        Made if it is not there; if it holds rows, the journal goes on after them.
    stack
        How observations are stacked from frames; each frame is then written once.
    segment_rows
        Rows of a file, about.
    """

    def __init__(
        self, directory: str | Path, *, stack: Stack | None = None, segment_rows: int = 262_144
    ) -> None:
        self.directory = Path(directory)
        self._lock = DirectoryLock(self.directory)
        self._segment_rows = segment_rows
        self._stack = stack
        self._open: _Beside | None = None
        self._blocks: list[tuple[int, int, int]] = []
        self._sealed: list[Segment] = []
        try:
            found = (self.directory / _MANIFEST).is_file()
            self.manifest = read_manifest(self.directory) if found else Manifest()
            kept = None if self.manifest.stack is None else Stack(*self.manifest.stack)
            if found and kept != stack:
                raise SchemaMismatch(f"{directory} was begun with stack={kept}, not {stack}")
        except BaseException:
            self._lock.release()
            raise
        self._remove_strays()
        self._serial = 1 + max(
            (int(path.stem.split("-")[-1]) for path in self.directory.glob("*-*.arrow")), default=-1
        )

    @property
    def pending(self) -> int:
        """Rows that the next commit adds."""
        return sum(rows for rows, _, _ in self._blocks) + sum(s.rows for s in self._sealed)

    def append(self, batch: Batch) -> None:
        """Write a batch; it counts from the next commit on.

        Raises
        ------
        StoreNotWritten
            If the disk is full or gone; the last commit stays.
        """
        segment = to_segment(batch, self._stack)
        with self._writing():
            if self._open is not None and segment.schema != self._open.schema:
                self._seal()
            if self._open is None:
                self._open = _Beside(self._new_file("rows"), segment.schema)
            self._open.add(segment)
            self._blocks.append((batch.num_rows, batch.num_envs, batch.policy_version))
            if sum(rows for rows, _, _ in self._blocks) >= self._segment_rows:
                self._seal()

    def commit(
        self,
        *,
        keep: int | None = None,
        replace: bool = False,
        end: int | None = None,
        store: Mapping[str, Any] | None = None,
        state: Mapping[str, npt.NDArray[Any]] | None = None,
        note: Mapping[str, Any] | None = None,
    ) -> None:
        """Make everything that was appended count, at once.

        Parameters
        ----------
        keep
            Segments with none of the newest ``keep`` rows are removed.
        replace
            Whether what counted before is removed, all of it.
        end
            Number of the next row; by default all rows were counted from the beginning.
        store, state
            What makes the store again, and what its sampler remembers.
        note
            Kept with it; by default the note of the commit before.

        Raises
        ------
        StoreNotWritten
            If the disk is full or gone; the last commit stays.
        """
        with self._writing():
            self._commit(keep, replace, end, store, state, note)

    def _commit(
        self,
        keep: int | None,
        replace: bool,
        end: int | None,
        store: Mapping[str, Any] | None,
        state: Mapping[str, npt.NDArray[Any]] | None,
        note: Mapping[str, Any] | None,
    ) -> None:
        self._seal()
        old = self.manifest
        segments = [*(() if replace else old.segments), *self._sealed]
        if end is None:
            end = old.end + sum(segment.rows for segment in self._sealed)
        if keep is not None:
            total = sum(segment.rows for segment in segments)
            while segments and total - segments[0].rows >= keep:
                total -= segments.pop(0).rows
        new = Manifest(
            end,
            tuple(segments),
            None if self._stack is None else (self._stack.size, self._stack.axis),
            old.store if store is None else store,
            self._write_state(state) if state else None,
            old.note if note is None else note,
        )
        self._write_manifest(new)
        self.manifest, self._sealed = new, []
        self._remove_strays()

    def close(self) -> None:
        """Give up what was not committed, and let others into the directory."""
        self._give_up()
        self._lock.release()

    def _give_up(self) -> None:
        if self._open is not None:
            self._open.discard()
        self._open, self._blocks, self._sealed = None, [], []
        self._remove_strays()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            lost = self.pending
            self._give_up()
            raise StoreNotWritten(
                f"{self.directory} could not be written: {error}. The state of the last commit, "
                f"{self.manifest.rows:,} rows, is as it was; {lost:,} rows since then are not in it"
            ) from error

    def _seal(self) -> None:
        if self._open is None:
            return
        file, blocks = self._open, tuple(self._blocks)
        nbytes, crc = file.seal()
        self._open, self._blocks = None, []
        rows = sum(block[0] for block in blocks)
        self._sealed.append(Segment(file.path.name, rows, nbytes, crc, blocks))

    def _write_state(self, state: Mapping[str, npt.NDArray[Any]]) -> Segment:
        path = self._new_file("state")
        # One record batch per array, so that arrays of different length fit in one file.
        kind = pa.schema([("name", pa.string()), ("value", pa.list_(pa.float64()))])
        file = _Beside(path, kind)
        for name, values in state.items():
            rows = pa.array([np.asarray(values, np.float64)], kind.field("value").type)
            file.add(pa.record_batch([pa.array([name]), rows], schema=kind))
        nbytes, crc = file.seal()
        return Segment(path.name, 0, nbytes, crc, ())

    def _new_file(self, kind: str) -> Path:
        self._serial += 1
        return self.directory / f"{kind}-{self._serial - 1:08d}.arrow"

    def _write_manifest(self, manifest: Manifest) -> None:
        text = json.dumps(dataclasses.asdict(manifest))
        envelope = {"format": FORMAT, "crc32": zlib.crc32(text.encode()), "manifest": text}
        part = self.directory / f"{_MANIFEST}.part"
        with part.open("w") as file:
            json.dump(envelope, file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(self.directory / _MANIFEST)
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _remove_strays(self) -> None:
        kept = {segment.file for segment in (*self.manifest.segments, *self._sealed)}
        if self.manifest.state is not None:
            kept.add(self.manifest.state.file)
        if self._open is not None:
            kept.add(f"{self._open.path.name}.part")
        for kind in ("rows", "state"):
            for path in self.directory.glob(f"{kind}-{'[0-9]' * 8}.arrow*"):
                if path.name not in kept:
                    path.unlink(missing_ok=True)
