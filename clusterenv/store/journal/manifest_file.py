"""Reads and writes ``manifest.json``, which names the committed files of a directory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from clusterenv.data.checks import is_whole
from clusterenv.errors import ConfigError, StoreDamaged, StoreUnreadable
from clusterenv.store.files import create, read_file
from clusterenv.store.journal.manifest import Manifest, parse

__all__ = ["FORMAT", "MANIFEST", "as_json", "read_manifest", "row_files", "write_manifest"]

FORMAT = 3
MANIFEST = "manifest.json"


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a directory.

    Raises ``StoreUnreadable`` if there is no store, its format is another one, or the manifest is
    not a regular file; ``StoreDamaged`` if it was altered, has invalid values, or is missing
    although there are rows.
    """
    path = directory / MANIFEST
    try:
        raw = read_file(path)
    except FileNotFoundError:
        if row_files(directory):
            raise StoreDamaged(_damaged(directory, "is missing")) from None
        below = sorted(str(found.parent) for found in directory.glob(f"*/{MANIFEST}"))
        written = f"a store is written there by store.save({str(directory)!r})"
        advice = f"there is one in {below[0]}" if below else f"there is no {MANIFEST}; {written}"
        raise StoreUnreadable(f"{directory} holds no store: {advice}") from None
    except OSError as error:
        raise StoreUnreadable(f"{path} cannot be read: {error}") from error
    try:
        envelope = json.loads(raw)
        version = envelope["format"]
        if is_whole(version) and version != FORMAT:
            raise StoreUnreadable(_other_format(directory, version))
        text = envelope["manifest"]
        if not is_whole(version) or zlib.crc32(text.encode()) != envelope["crc32"]:
            raise StoreDamaged(_damaged(directory))
        found = json.loads(text)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StoreDamaged(_damaged(directory)) from error
    try:
        return parse(found)
    except ConfigError as error:
        fault = f"was not written by a store: {error}"
        raise StoreDamaged(_damaged(directory, fault)) from error


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest atomically.

    Raises ``OSError`` if the disk is full or gone; the previous manifest stays.
    """
    text = as_json(dataclasses.asdict(manifest), "the manifest")
    envelope = {"format": FORMAT, "crc32": zlib.crc32(text.encode()), "manifest": text}
    part = directory / f"{MANIFEST}.part"
    try:
        with create(part) as file:
            file.write(json.dumps(envelope).encode())
            file.flush()
            os.fsync(file.fileno())
        _sync(directory)  # the files that it names must be on disk first
        part.rename(directory / MANIFEST)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # the commit has succeeded already
        _sync(directory)


def _damaged(directory: Path, fault: str = "was altered or cut") -> str:
    """Return the error message for an unreadable manifest: what is readable, and what to do."""
    return (
        f"{directory / MANIFEST} {fault}; put it back from a copy, if there is one. "
        f"{_without_manifest(directory)}"
    )


def row_files(directory: Path) -> list[Path]:
    """Return the files of rows in a directory, committed or not."""
    return sorted(directory.glob(f"rows-{'[0-9]' * 8}.arrow"))


def _other_format(directory: Path, version: int) -> str:
    has = f"has format {version}, and this version of ClusterEnv reads {FORMAT}"
    if version > FORMAT:
        advice = "a newer one wrote it: pip install --upgrade clusterenv"
    else:
        advice = f"an older one wrote it, and reads it. {_without_manifest(directory)}"
    return f"{directory / MANIFEST} {has}; {advice}"


def _without_manifest(directory: Path) -> str:
    files = ", ".join(path.name for path in row_files(directory))
    return (
        f"The rows are Arrow files that pyarrow.ipc.open_file reads: {files or 'none are left'}. "
        f"A new store needs another directory: store.save({str(directory / 'new')!r})"
    )


def as_json(value: Any, what: str) -> str:
    """Return a value as JSON; NumPy scalars are allowed.

    Raises ``ConfigError`` if it cannot be written as JSON.
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


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
