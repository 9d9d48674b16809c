"""Rows from disk: each file is checked before it is used."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from clusterenv.arrow import from_sparse
from clusterenv.batch import Batch
from clusterenv.errors import StoreDamaged
from clusterenv.store.manifest import Manifest, Segment
from clusterenv.store.segments import from_segment
from clusterenv.store.stacks import Stack

__all__ = ["check_files", "forged", "read_batches", "read_state", "without_damaged"]


def read_batches(
    directory: Path, manifest: Manifest, skip_damaged: bool = False
) -> Iterator[Batch]:
    """Yield all batches, oldest first.

    Raises
    ------
    StoreDamaged
        At the first file that is missing or was altered, unless it is to be skipped.
    """
    for segment in manifest.segments:
        fault = _fault(directory, segment)
        if fault is not None and skip_damaged:
            continue
        if fault is not None:
            raise _damaged(directory, manifest, segment, fault)
        yield from _batches(directory / segment.file, segment, manifest.stack)


def check_files(directory: Path, manifest: Manifest, checksums: bool = True) -> None:
    """Raise if a file of rows is missing or was altered.

    Parameters
    ----------
    checksums
        Whether all bytes are read; otherwise only the sizes are compared.
    """
    for segment in manifest.segments:
        fault = _fault(directory, segment, checksums)
        if fault is not None:
            raise _damaged(directory, manifest, segment, fault, checksums)


def read_state(directory: Path, manifest: Manifest) -> dict[str, npt.NDArray[Any]]:
    """Return what the sampler remembered.

    Raises
    ------
    StoreDamaged
        If the file is missing or was altered.
    """
    if manifest.state is None:
        return {}
    fault = _fault(directory, manifest.state)
    if fault is not None:
        raise StoreDamaged(
            f"{directory / manifest.state.file} {fault}; all {manifest.rows:,} rows are readable, "
            "without their priorities or what else the sampler keeps: "
            f"ReplayStore.load({str(directory)!r}, skip_damaged=True)"
        )
    path = directory / manifest.state.file
    with forged(path), pa.memory_map(str(path)) as source:
        arrays = pa.ipc.open_file(source).get_batch(0)
        arrays.validate(full=True)
        return {
            field.name: from_sparse(field, array)[1][0].copy()
            for field, array in zip(arrays.schema, arrays.columns, strict=True)
        }


def without_damaged(directory: Path, manifest: Manifest, checksums: bool = True) -> Manifest:
    """Return the manifest of the files of rows that are as they were written."""
    good = [s for s in manifest.segments if _fault(directory, s, checksums) is None]
    return dataclasses.replace(manifest, segments=tuple(good))


def _damaged(
    directory: Path, manifest: Manifest, segment: Segment, fault: str, checksums: bool = True
) -> StoreDamaged:
    """Return the error about a file of rows, which says what is still readable."""
    good = without_damaged(directory, manifest, checksums)
    return StoreDamaged(
        f"{directory / segment.file} {fault}; {good.rows:,} of {manifest.rows:,} rows, in "
        f"{len(good.segments)} of {len(manifest.segments)} files, are readable: "
        f"ReplayStore.load({str(directory)!r}, skip_damaged=True)"
    )


def _batches(path: Path, segment: Segment, stack: Stack | None) -> Iterator[Batch]:
    with forged(path), pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        for index, (_, num_envs, version) in enumerate(segment.blocks):
            rows = reader.get_batch(index)
            rows.validate(full=True)
            yield from_segment(rows, num_envs, version, stack)


@contextlib.contextmanager
def forged(path: Path) -> Iterator[None]:
    """Raise if a file is not what it claims: checksums do not keep a stranger from lying."""
    try:
        yield
    except (pa.ArrowException, ArithmeticError, LookupError, OSError, TypeError, ValueError) as e:
        raise StoreDamaged(f"{path} was not written by a store: {e}") from e


def _fault(directory: Path, segment: Segment, checksums: bool = True) -> str | None:
    """Say what is wrong with a file, if anything is."""
    path = directory / segment.file
    crc = 0
    try:
        size = path.stat().st_size
        if size != segment.nbytes:
            return f"was cut or extended: {size:,} bytes instead of {segment.nbytes:,}"
        if not checksums:
            return None
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                crc = zlib.crc32(chunk, crc)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    return None if crc == segment.crc32 else "was altered: its checksum differs"
