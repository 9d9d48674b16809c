"""Reads one commit of a directory while another process may write the next ones.

The files of a commit are mapped when it is opened, so they stay readable after a later commit
removes them. Each file is checked before it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset

from clusterenv.data.arrow import MOST_ITEMS, from_sparse
from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_path
from clusterenv.data.ipc import record_batches
from clusterenv.errors import StoreDamaged, StoreUnreadable
from clusterenv.store.files import map_file
from clusterenv.store.journal.frames import from_record_batch
from clusterenv.store.journal.manifest import MANIFEST, Segment, StoreManifest, read_manifest

if TYPE_CHECKING:
    from clusterenv.store.samplers.sampler import Sampler

__all__ = ["Snapshot", "is_store", "open_snapshot"]

_TRIES = 100  # one is nearly always enough: mapping files is faster than a commit


def is_store(directory: str | Path) -> bool:
    """Whether a directory holds a saved store or a journal, damaged or not."""
    path = check_path("directory", directory, "is_store('replay')")
    with contextlib.suppress(OSError):  # such as a name that is too long
        return (path / MANIFEST).is_file()
    return False


def open_snapshot(directory: str | Path) -> Snapshot:
    """Open the last commit of a saved store, a journal or a collection.

    Another process may write to the directory meanwhile.

    Raises
    ------
    StoreUnreadable
        If there is no store, or its format is another one.
    StoreDamaged
        If the manifest was altered.
    """
    path = check_path("directory", directory, "open_snapshot('replay')")
    manifest = read_manifest(path)
    for _ in range(_TRIES):
        snapshot = Snapshot.of(path, manifest)
        if snapshot.complete:
            return snapshot
        before, manifest = manifest, read_manifest(path)
        if (before.segments, before.state) == (manifest.segments, manifest.state):
            return snapshot  # the files are missing, not replaced by a new commit
    raise StoreUnreadable(
        f"{directory} was not read: its files were removed by new commits before they could be "
        f"opened, {_TRIES} times; stop the process that writes there, or let it commit less often"
    )


class _File:
    """A file of a commit: its mapped bytes, or what is wrong with it."""

    def __init__(self, path: Path, segment: Segment) -> None:
        self.path = path
        self._crc32 = segment.crc32
        self.buffer = pa.py_buffer(b"")
        self.fault: str | None = None
        """Found when it was opened: it is missing, unreadable, or has another size."""
        try:
            self.buffer = map_file(path)
        except FileNotFoundError:
            self.fault = "is missing"
        except OSError as error:
            self.fault = f"cannot be read: {error}"
        else:
            size = self.buffer.size
            if size != segment.nbytes:
                self.fault = f"was cut or extended: {size:,} bytes instead of {segment.nbytes:,}"

    @functools.cached_property
    def fault_inside(self) -> str | None:
        """Found when all bytes are read."""
        if self.fault is not None:
            return self.fault
        same = zlib.crc32(self.buffer) == self._crc32
        return None if same else "was altered: its checksum differs"


@dataclass(frozen=True)
class Snapshot:
    """One commit of a directory; see :func:`open_snapshot`."""

    directory: Path
    manifest: StoreManifest
    _files: Mapping[str, _File]

    @classmethod
    def of(cls, directory: Path, manifest: StoreManifest) -> Snapshot:
        """Map the files that a manifest names."""
        # In the order in which a commit removes them.
        segments = [*([] if manifest.state is None else [manifest.state]), *manifest.segments]
        files = {segment.file: _File(directory / segment.file, segment) for segment in segments}
        return cls(directory, manifest, files)

    @property
    def rows(self) -> int:
        """Rows in all files."""
        return self.manifest.rows

    @property
    def end(self) -> int:
        """Rows ever written, including removed ones."""
        return self.manifest.end

    @property
    def note(self) -> Mapping[str, Any]:
        """The note given with the commit."""
        return self.manifest.note

    @property
    def complete(self) -> bool:
        """Whether all files exist and have the right size."""
        return all(file.fault is None for file in self._files.values())

    @property
    def damaged(self) -> list[str]:
        """Names of the files of rows that are missing or were altered; reads all bytes."""
        return [s.file for s in self.manifest.segments if self._fault(s, True) is not None]

    def without_damaged(self, checksums: bool = True) -> Snapshot:
        """Return a snapshot without the files of rows that are missing or were altered."""
        good = [s for s in self.manifest.segments if self._fault(s, checksums) is None]
        return dataclasses.replace(
            self, manifest=dataclasses.replace(self.manifest, segments=tuple(good))
        )

    def check(self, checksums: bool = True) -> None:
        """Raise ``StoreDamaged`` if a file of rows is missing, cut or, by its checksum, altered."""
        for segment in self.manifest.segments:
            self._check(segment, checksums)

    def batches(self) -> Iterator[Batch]:
        """Yield all batches, oldest first; raise ``StoreDamaged`` at the first damaged file."""
        for segment in self.manifest.segments:
            yield from self.batches_of(segment)

    def batches_of(self, segment: Segment) -> Iterator[Batch]:
        """Yield the batches of one file; raises as :meth:`batches`."""
        self._check(segment)
        file = self._files[segment.file]
        with _reading(file.path):
            batches = list(record_batches(file.buffer))
            if len(batches) != len(segment.blocks):
                raise ValueError(f"{len(batches)} batches, not {len(segment.blocks)}")
        for index, (count, num_envs, version) in enumerate(segment.blocks):
            with _reading(file.path):
                rows = batches[index]
                if rows.num_rows != count:
                    raise ValueError(f"batch {index} has {rows.num_rows} rows, not {count}")
                rows.validate(full=True)
                batch = from_record_batch(rows, num_envs, version, self.manifest.stack)
            yield batch

    def dataset(self) -> pyarrow.dataset.Dataset:
        """Return all rows as a dataset of the mapped files, unchecked.

        Rows of arrays are lists in every column. If files differ in their columns, the dataset has
        those of the first.
        """
        batches: list[pa.RecordBatch] = []
        for segment in self.manifest.segments:
            file = self._files[segment.file]
            with _reading(file.path):
                for rows in record_batches(file.buffer):
                    schema = batches[0].schema if batches else _with_lists(rows.schema)
                    batches += (_with_columns(part, schema) for part in _parts(rows))
        return _MappedDataset(batches)

    def read(self, columns: list[str]) -> pa.Table:
        """Load columns of all rows, unchecked; raise ``StoreDamaged`` if a file cannot be read."""
        with _reading(self.directory):
            return self.dataset().to_table(columns=columns)

    def restore(self, sampler: Sampler) -> None:
        """Restore the state of a sampler; raise ``StoreDamaged`` if it is damaged or another's."""
        segment = self.manifest.state
        if segment is None:
            with _reading(self.directory / MANIFEST):
                sampler.restore({})
            return
        file = self._files[segment.file]
        if file.fault_inside is not None:
            raise StoreDamaged(
                f"{file.path} {file.fault_inside}; all {self.manifest.rows:,} rows are readable, "
                "without their priorities or what else the sampler keeps: "
                f"ReplayStore.load({str(self.directory)!r}, skip_damaged=True)"
            )
        with _reading(file.path):
            (arrays,) = record_batches(file.buffer)
            arrays.validate(full=True)
            pairs = zip(arrays.schema, arrays.columns, strict=True)
            # A copy, which is an array even if it has no axes.
            state = {field.name: np.array(from_sparse(field, a)[1][0]) for field, a in pairs}
            sampler.restore(state)

    def _check(self, segment: Segment, checksums: bool = True) -> None:
        fault = self._fault(segment, checksums)
        if fault is None:
            return
        good = self.without_damaged(checksums).manifest
        raise StoreDamaged(
            f"{self.directory / segment.file} {fault}; {good.rows:,} of {self.manifest.rows:,} "
            f"rows, in {len(good.segments)} of {len(self.manifest.segments)} files, are readable: "
            f"ReplayStore.load({str(self.directory)!r}, skip_damaged=True)"
        )

    def _fault(self, segment: Segment, checksums: bool) -> str | None:
        file = self._files[segment.file]
        return file.fault_inside if checksums else file.fault


class _MappedDataset(pyarrow.dataset.InMemoryDataset):  # type: ignore[misc]
    """Record batches of mapped files; sent to another process, it contains their rows."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        super().__init__(batches, batches[0].schema if batches else pa.schema([]))
        self._batches = batches

    def __repr__(self) -> str:
        rows = sum(batch.num_rows for batch in self._batches)
        return f"Dataset(rows={rows:,}, columns=[{', '.join(self.schema.names)}])"

    def __reduce__(self) -> tuple[Any, ...]:
        return _MappedDataset, (self._batches,)


def _with_lists(schema: pa.Schema) -> pa.Schema:
    """Return a schema in which arrays of fixed size are lists, as in columns with null rows.

    Files hold both: a list of fixed size needs no offsets, but takes its space for null too. The
    cast shares the memory of the values.
    """
    return pa.schema(
        field.with_type(pa.list_(field.type.value_type))
        if pa.types.is_fixed_size_list(field.type)
        else field
        for field in schema
    )


def _parts(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield rows in parts of which every column fits into a list of Arrow."""
    fixed = (field.type for field in rows.schema if pa.types.is_fixed_size_list(field.type))
    items = max((kind.list_size for kind in fixed), default=1)
    count = max(1, MOST_ITEMS // max(1, items))
    yield from (rows.slice(start, count) for start in range(0, rows.num_rows, count))


def _with_columns(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows with these columns; null where they have none of the name."""
    if rows.schema.equals(schema, check_metadata=True):
        return rows
    names = set(rows.schema.names)
    columns = [
        rows.column(field.name).cast(field.type)
        if field.name in names
        else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.record_batch(columns, schema=schema)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise ``StoreDamaged`` if a file is malformed: a forged file can have a valid checksum."""
    try:
        yield
    except (pa.ArrowException, ArithmeticError, LookupError, OSError, TypeError, ValueError) as e:
        raise StoreDamaged(f"{path} was not written by a store: {e}") from e
