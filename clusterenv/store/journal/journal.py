"""Writes batches to Arrow streams, in atomic commits.

A directory holds segments (Arrow IPC streams), at most one file with the state of the sampler, and
``manifest.json``, which names the committed files. A commit writes new files, syncs them to disk,
and then replaces the manifest; a process that is killed meanwhile leaves the previous commit.
Files that the manifest does not name are leftovers of a killed process, and are removed.

Rows that a collector received are appended as the message that their worker sealed.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clusterenv.data.arrow import SparseRows, to_sparse
from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_flag, check_instance, check_path, check_whole
from clusterenv.data.ipc import END_OF_STREAM, MessageWriter
from clusterenv.data.spaces import Array
from clusterenv.errors import ClosedError, ConfigError, SchemaMismatch, StoreNotWritten, shown
from clusterenv.store.files import DirectoryLock, create
from clusterenv.store.journal.frames import with_frames_once
from clusterenv.store.journal.manifest import (
    MANIFEST,
    Segment,
    StoreManifest,
    as_json,
    check_block,
    read_manifest,
    row_files,
    write_manifest,
)
from clusterenv.store.table.stacks import Stack

__all__ = ["Journal"]


class _SegmentWriter:
    """Writes an Arrow stream under a temporary name, and computes its checksum.

    Every message is handed to the system at once: if the process is killed, the file is a stream
    of all rows before.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.schema = schema
        self._encoder: MessageWriter | None = None
        self._part = path.with_name(f"{path.name}.part")
        self._crc = 0
        self._file = create(self._part)
        try:
            self._write([schema.serialize()])
        except BaseException:
            self.discard()
            raise

    def takes(self, schema: pa.Schema) -> bool:
        """Whether rows with these columns can be appended."""
        return schema is self.schema or schema.equals(self.schema, check_metadata=True)

    def append(self, message: Array) -> None:
        """Append a message of a record batch with this schema."""
        self._write([message])

    def encode(self, rows: pa.RecordBatch) -> None:
        """Append a record batch with this schema."""
        if self._encoder is None:
            self._encoder = MessageWriter(self.schema)
        self._write(self._encoder.message(rows))

    def _write(self, pieces: Sequence[Array]) -> None:
        """Write a message; if that fails or is interrupted, none of it stays in the file."""
        at, crc = self._file.tell(), self._crc
        try:
            for piece in pieces:
                self._crc = zlib.crc32(piece, self._crc)
                self._file.write(piece)
            self._file.flush()
        except BaseException:
            self._crc = crc
            with contextlib.suppress(OSError):
                self._file.seek(at)
                self._file.truncate()
            raise

    def seal(self, blocks: tuple[tuple[int, int, int], ...] = ()) -> Segment:
        """End the stream, sync the file to disk and rename it."""
        self._write([END_OF_STREAM])
        os.fsync(self._file.fileno())
        nbytes = self._file.tell()
        self._file.close()
        self._part.rename(self.path)
        rows = sum(rows for rows, _, _ in blocks)
        return Segment(self.path.name, rows, nbytes, self._crc, blocks)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink(missing_ok=True)


class Journal:
    """Writes batches to a directory, in atomic commits.

    Parameters
    ----------
    directory
        Created if it does not exist; if it holds rows, the journal appends to them.
    stack
        How observations are stacked from frames; each frame is then written once.
    segment_rows
        Approximate number of rows per file.

    Raises
    ------
    StoreInUse
        If another store has locked the directory.
    StoreUnreadable
        If the directory cannot be written, or the store in it has another format.
    StoreDamaged
        If the manifest is missing although there are rows, or was altered.
    """

    def __init__(
        self, directory: str | Path, *, stack: Stack | None = None, segment_rows: int = 262_144
    ) -> None:
        self.directory = check_path("directory", directory, "Journal('replay')")
        if stack is not None:
            check_instance("stack", stack, Stack, "Journal('replay', stack=Stack(4))")
        check_whole("segment_rows", segment_rows, "Journal(..., segment_rows=262_144)", least=1)
        self._lock = DirectoryLock(self.directory)
        self._segment_rows = segment_rows
        self._stack = stack
        self._open: _SegmentWriter | None = None
        self._blocks: list[tuple[int, int, int]] = []
        self._sealed: list[Segment] = []
        self.closed = False
        self.manifest = StoreManifest()
        try:
            self._begin()
        except BaseException:
            self._lock.release()
            raise
        self._remove_strays()
        numbers = [int(path.name.split("-")[1].split(".")[0]) for path in self._files()]
        self._serial = 1 + max(numbers, default=-1)

    def _begin(self) -> None:
        if not os.path.lexists(self.directory / MANIFEST) and not row_files(self.directory):
            # Written before any row: a killed process never leaves rows without a manifest.
            with self._writing():
                write_manifest(self.directory, self.manifest)
            return
        found = self.manifest = read_manifest(self.directory)
        if (found.segments or found.store) and found.stack != self._stack:
            raise SchemaMismatch(
                f"{self.directory} was begun with stack={found.stack}, not {self._stack}; go on "
                "with that, or choose another directory"
            )

    @property
    def pending(self) -> int:
        """Rows that were appended since the last commit."""
        return sum(rows for rows, _, _ in self._blocks) + sum(s.rows for s in self._sealed)

    def append(self, batch: Batch) -> None:
        """Write a batch; it becomes valid with the next commit.

        Raises
        ------
        StoreNotWritten
            If the disk is full or gone; the last commit stays valid.
        ConfigError
            If it is not a batch of a collector, or its observations are not stacks as configured;
            nothing is written.
        """
        check_instance("batch", batch, Batch, "journal.append(batch)")
        self._check_open()
        if self._stack is not None:
            for name in self._stack.of(list(batch.tail)):
                self._stack.frame(batch.flat(name).shape[1:])
                self._stack.check(batch, name, thorough=not (self.pending or self.manifest.rows))
        block = batch.num_rows, batch.num_envs, batch.policy_version
        check_block(block)
        sealed = batch.sealed if self._stack is None else None
        if sealed is not None:
            schema = sealed.schema
        else:
            stack = self._stack
            rows = batch.record_batch if stack is None else with_frames_once(batch, stack)
            schema = rows.schema.remove_metadata()
        with self._writing():
            writer = self._writer_of(schema)
            self._blocks.append(block)
            try:
                if sealed is not None:
                    writer.append(sealed.message)
                else:
                    writer.encode(rows)
            except BaseException:
                self._blocks.pop()
                raise
            if sum(count for count, _, _ in self._blocks) >= self._segment_rows:
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
        """Make all appended batches valid, atomically.

        Parameters
        ----------
        keep
            Remove segments that hold none of the newest ``keep`` rows.
        replace
            Whether to remove everything that was committed before.
        end
            Number of the next row; by default, the count of all rows ever committed.
        store, state
            Settings and state of a :class:`ReplayStore`, and state of its sampler.
        note
            Saved with the commit; by default the note of the previous commit.

        Raises
        ------
        StoreNotWritten
            If the disk is full or gone; the last commit stays valid.
        ConfigError
            If an argument cannot be written to the manifest, such as a note that is not JSON;
            the last commit stays valid.
        """
        self._check_open()
        for name, count in (("keep", keep), ("end", end)):
            if count is not None:
                check_whole(name, count, f"journal.commit({name}=100_000)")
        check_flag("replace", replace, "journal.commit(replace=True)")
        for name, given in (("store", store), ("state", state), ("note", note)):
            if given is not None:
                check_instance(name, given, Mapping, f"journal.commit({name}={{'step': 7}})")
        for name, array in (state or {}).items():
            fits = isinstance(name, str) and isinstance(array, np.ndarray)
            if not fits or array.dtype.kind not in "biuf":
                raise ConfigError(
                    f"state must be arrays of numbers by name, got {shown(state)}: "
                    "journal.commit(state={'priorities': np.ones(4)})"
                )
        if note is not None:
            as_json(note, "a note")
        with self._writing():
            self._seal()
            old = self.manifest
            segments = [*(() if replace else old.segments), *self._sealed]
            if end is None:
                end = old.end + sum(segment.rows for segment in self._sealed)
            if keep is not None:
                total = sum(segment.rows for segment in segments)
                while segments and total - segments[0].rows >= keep:
                    total -= segments.pop(0).rows
            new = StoreManifest(
                end,
                tuple(segments),
                self._stack,
                old.store if store is None else store,
                self._write_state(state) if state else None,
                old.note if note is None else note,
            )
            write_manifest(self.directory, new)
            self.manifest, self._sealed = new, []
        self._remove_strays()

    def close(self) -> None:
        """Discard what was not committed, and unlock the directory.

        In a fork of the process that opened the journal, the files stay as they are.
        """
        if not self.closed:
            self.closed = True
            if self._lock.is_held:
                self._discard()
                self._lock.release()

    def rollback(self) -> None:
        """Discard what was appended since the last commit."""
        self._check_open()
        self._discard()

    def check_process(self) -> None:
        """Raise ``WrongProcess`` in a fork of the process that opened the journal."""
        self._lock.guard.check()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("this Journal is closed; make a new one")
        self.check_process()

    def _discard(self) -> None:
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
            self._discard()
            raise StoreNotWritten(
                f"{self.directory} could not be written: {error}. The state of the last commit, "
                f"{self.manifest.rows:,} rows, is as it was; {lost:,} rows since then are not in it"
            ) from error

    def _writer_of(self, schema: pa.Schema) -> _SegmentWriter:
        """Return the open segment, or a new one if there is none with these columns."""
        if self._open is not None and not self._open.takes(schema):
            self._seal()
        if self._open is None:
            self._open = _SegmentWriter(self._new_file("rows"), schema)
        return self._open

    def _seal(self) -> None:
        if self._open is None:
            return
        segment = self._open.seal(tuple(self._blocks))
        self._open, self._blocks = None, []
        self._sealed.append(segment)

    def _write_state(self, state: Mapping[str, npt.NDArray[Any]]) -> Segment:
        # One row that holds whole arrays of any length, dtype and shape.
        row = SparseRows(np.zeros(1, np.int64), 1)
        parts = [to_sparse(name, row, values[None]) for name, values in state.items()]
        fields, arrays = zip(*parts, strict=True)
        schema = pa.schema(fields)
        file = _SegmentWriter(self._new_file("state"), schema)
        try:
            file.encode(pa.record_batch(list(arrays), schema=schema))
            return file.seal()
        except BaseException:
            file.discard()
            raise

    def _new_file(self, kind: str) -> Path:
        self._serial += 1
        return self.directory / f"{kind}-{self._serial - 1:08d}.arrow"

    def _files(self) -> list[Path]:
        """Return the files of rows and states, committed or not, finished or not."""
        pattern = f"-{'[0-9]' * 8}.arrow*"
        return [*self.directory.glob(f"rows{pattern}"), *self.directory.glob(f"state{pattern}")]

    def _remove_strays(self) -> None:
        kept = {segment.file for segment in (*self.manifest.segments, *self._sealed)}
        if self.manifest.state is not None:
            kept.add(self.manifest.state.file)
        if self._open is not None:
            kept.add(f"{self._open.path.name}.part")
        for path in self._files():
            if path.name not in kept:
                with contextlib.suppress(OSError):  # the next commit tries again
                    path.unlink(missing_ok=True)
