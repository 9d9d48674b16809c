"""The file that says which files of a directory count."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clusterenv.errors import ConfigError, StoreDamaged, StoreUnreadable
from clusterenv.store.stacks import Stack

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Manifest",
    "Segment",
    "as_json",
    "damaged_manifest",
    "read_manifest",
    "write_manifest",
]

FORMAT = 2
MANIFEST = "manifest.json"


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
    stack: Stack | None = None
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
        If there is none, or it is of another format.
    StoreDamaged
        If it was altered.
    """
    path = directory / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise StoreUnreadable(
            f"{directory} holds no store: there is no {MANIFEST}; a store is written there by "
            f"store.save({str(directory)!r})"
        ) from None
    except OSError as error:
        raise StoreUnreadable(f"{path} cannot be read: {error}") from error
    try:
        envelope = json.loads(raw)
        text, crc, version = envelope["manifest"], envelope["crc32"], envelope["format"]
        if version != FORMAT:
            newer = isinstance(version, int) and version > FORMAT
            raise StoreUnreadable(
                f"{path} has format {version}, and this version of ClusterEnv reads {FORMAT}; it "
                f"was written by {'a newer' if newer else 'an older'} one, which reads it"
                f"{': pip install --upgrade clusterenv' if newer else ''}"
            )
        if zlib.crc32(text.encode()) != crc:
            raise StoreDamaged(damaged_manifest(directory))
        found = json.loads(text)
        segments = tuple(_segment(path, segment) for segment in found.pop("segments"))
        state, stack = found.pop("state"), found.pop("stack")
        return Manifest(
            segments=segments,
            state=None if state is None else _segment(path, state),
            stack=None if stack is None else Stack(**stack),
            **found,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreDamaged(damaged_manifest(directory)) from error


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest, all of it at once.

    Raises
    ------
    OSError
        If the disk is full or gone; the manifest before stays.
    """
    text = as_json(dataclasses.asdict(manifest), "the manifest")
    envelope = {"format": FORMAT, "crc32": zlib.crc32(text.encode()), "manifest": text}
    part = directory / f"{MANIFEST}.part"
    try:
        with part.open("w") as file:
            json.dump(envelope, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(directory)  # the files that it names come first
        part.rename(directory / MANIFEST)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # it counts already
        _sync(directory)


def damaged_manifest(directory: Path, fault: str = "was altered or cut") -> str:
    """Say what is still readable when a directory's manifest is not."""
    files = sorted(path.name for path in directory.glob("rows-*.arrow"))
    return (
        f"{directory / MANIFEST} {fault}; the rows themselves are Arrow files that "
        f"pyarrow.ipc.open_file reads: {', '.join(files) or 'none are left'}"
    )


def as_json(value: Any, what: str) -> str:
    """Return a value as JSON, NumPy's numbers included.

    Raises
    ------
    ConfigError
        If it cannot be written as JSON.
    """

    def number(part: Any) -> Any:
        if isinstance(part, np.generic):
            return part.item()
        raise TypeError(f"{part!r} is of type {type(part).__name__}")

    try:
        return json.dumps(value, default=number)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} is kept as JSON, but {error}; give numbers, strings, lists and dictionaries: "
            "store.commit(checkpoint='learner-7.pt', step=7000)"
        ) from error


def _segment(path: Path, raw: Mapping[str, Any]) -> Segment:
    if Path(raw["file"]).name != raw["file"]:
        raise StoreDamaged(f"{path} names the file {raw['file']!r}, outside its directory")
    return Segment(**{**raw, "blocks": tuple(tuple(block) for block in raw["blocks"])})


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
