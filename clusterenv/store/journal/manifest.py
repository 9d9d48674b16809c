"""``manifest.json``, which names the committed files of a directory and holds a store's state.

A forged manifest can have a valid checksum, so all values are checked when it is read. They are
checked before writing too: what is written must be readable later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import reprlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clusterenv.data.checks import is_number, is_whole
from clusterenv.errors import ConfigError, StoreDamaged, StoreUnreadable
from clusterenv.store.files import create, read_file
from clusterenv.store.table.stacks import Stack

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Segment",
    "StoreManifest",
    "as_json",
    "check_block",
    "generator_of",
    "read_manifest",
    "row_files",
    "write_manifest",
]

FORMAT = 4
_READABLE = (3, FORMAT)  # up to format 3 segments were Arrow IPC files, since then streams
MANIFEST = "manifest.json"
_MAX = 2**62  # row numbers are int64, and are added to each other
_DEPTH = 8  # nested samplers
_GENERATORS = {kind.__name__: kind for kind in (np.random.PCG64, np.random.PCG64DXSM)}


@dataclass(frozen=True)
class Segment:
    """A file of rows, or of a sampler's state; raise ``ConfigError`` if a value is invalid."""

    file: str
    rows: int
    nbytes: int
    crc32: int
    blocks: tuple[tuple[int, int, int], ...]
    """Rows, environments and policy version of each batch."""

    def __post_init__(self) -> None:
        name = r"(rows|state)-[0-9]{8,}\.arrow"
        if not isinstance(self.file, str) or not re.fullmatch(name, self.file):
            raise _invalid("file", self.file, "a name such as 'rows-00000000.arrow'")
        _check_whole("nbytes", self.nbytes, 1)
        _check_whole("crc32", self.crc32, 0, 2**32 - 1)
        _check_whole("rows", self.rows)
        for block in self.blocks:
            check_block(block)
        total = sum(rows for rows, _, _ in self.blocks)
        if self.rows != total:
            raise _invalid("rows", self.rows, f"the {total} rows of its blocks")


@dataclass(frozen=True)
class StoreManifest:
    """The committed files and a store's state; raise ``ConfigError`` if a value is invalid."""

    end: int = 0
    """Rows ever written, including removed ones."""
    segments: tuple[Segment, ...] = ()
    stack: Stack | None = None
    store: Mapping[str, Any] = field(default_factory=dict)
    """State of the store: capacity, sampler, random state."""
    state: Segment | None = None
    """The file of the sampler's state."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """Given by the user with the last commit."""

    def __post_init__(self) -> None:
        files: set[str] = set()
        for at, segment in enumerate(self.segments):
            name = segment.file
            if not name.startswith("rows-") or name in files or not segment.rows:
                raise _invalid(f"segments[{at}].file", name, "a file with rows, named once")
            files.add(name)
        if self.state is not None and (not self.state.file.startswith("state-") or self.state.rows):
            raise _invalid("state.file", self.state.file, "a file of a sampler's state")
        _check_whole("end", self.end, self.rows)
        for name in ("store", "note"):
            if not isinstance(getattr(self, name), Mapping):
                raise _invalid(name, getattr(self, name), "a dictionary")
        if self.store:
            _check_store(self.store, self.end)

    @property
    def rows(self) -> int:
        """Rows in all segments."""
        return sum(segment.rows for segment in self.segments)


def _parse(found: Any) -> StoreManifest:
    """Return the manifest of decoded JSON; raise ``ConfigError`` that names an invalid value."""
    _check_keys("it", found, "end", "segments", "stack", "store", "state", "note")
    segments, stack, state = found["segments"], found["stack"], found["state"]
    if not isinstance(segments, list):
        raise _invalid("segments", segments, "a list")
    if stack is not None:
        _check_keys("stack", stack, "size", "axis", "only")
    parts = {
        "segments": tuple(_segment(f"segments[{at}]", raw) for at, raw in enumerate(segments)),
        "stack": None if stack is None else Stack(**stack),
        "state": None if state is None else _segment("state", state),
    }
    return StoreManifest(**{**found, **parts})


def check_block(block: Any) -> None:
    """Raise ``ConfigError`` unless this is rows, environments and policy version of a batch."""
    if isinstance(block, (tuple, list)) and len(block) == 3 and all(map(is_whole, block)):
        rows, num_envs, version = block
        if 1 <= num_envs <= rows <= _MAX and not rows % num_envs and 0 <= version <= _MAX:
            return
    wanted = "whole numbers, of which the first is a multiple of the second"
    raise _invalid("(rows, environments, version) of a batch", block, wanted)


def generator_of(random: Any) -> np.random.Generator:
    """Return a generator with this state, or raise ``ConfigError``."""
    try:
        bits = _GENERATORS[random["bit_generator"]]()
        bits.state = random
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise _invalid("store.random", random, "the state of a generator") from error
    return np.random.Generator(bits)


def _segment(place: str, raw: Any) -> Segment:
    _check_keys(place, raw, "file", "rows", "nbytes", "crc32", "blocks")
    blocks = raw["blocks"]
    if not isinstance(blocks, list) or not all(isinstance(block, list) for block in blocks):
        raise _invalid(f"{place}.blocks", blocks, "a list of lists")
    try:
        return Segment(**{**raw, "blocks": tuple(tuple(block) for block in blocks)})
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _check_store(store: Mapping[str, Any], end: int) -> None:
    _check_keys("store", store, "capacity", "side", "sampler", "random", "sampled", "position")
    capacity, side = store["capacity"], store["side"]
    _check_whole("store.capacity", capacity, 1)
    if not (is_number(side) and 0 < side <= 1):
        raise _invalid("store.side", side, "a number above 0, at most 1")
    _check_sampler(store["sampler"])
    generator_of(store["random"])
    _check_whole("store.sampled", store["sampled"])
    position = store["position"]
    if position == {} and not end:  # no rows yet, and no columns
        return
    _check_keys("store.position", position, "first", "kept", "oldest")
    first = position["first"]
    _check_whole("store.position.first", first, 0, end)
    _check_whole("store.position.kept", position["kept"], 0, first)
    _check_whole("store.position.oldest", position["oldest"], max(0, first - capacity), first)


def _check_sampler(description: Any) -> None:
    place = "store.sampler"
    for _ in range(_DEPTH):
        _check_keys(place, description, "kind", "settings", "base")
        if not isinstance(description["kind"], str):
            raise _invalid(f"{place}.kind", description["kind"], "a name")
        if not isinstance(description["settings"], Mapping):
            raise _invalid(f"{place}.settings", description["settings"], "a dictionary")
        if description["base"] is None:
            return
        place, description = f"{place}.base", description["base"]
    raise _invalid(place, description, f"None: a sampler has at most {_DEPTH - 1} below it")


def _check_keys(place: str, found: Any, *keys: str) -> None:
    if not isinstance(found, Mapping) or set(found) != set(keys):
        raise _invalid(place, found, f"a dictionary of {', '.join(keys)}")


def _check_whole(place: str, value: Any, least: int = 0, most: int = _MAX) -> None:
    if not (is_whole(value) and least <= value <= most):
        raise _invalid(place, value, f"a whole number from {least:,} to {most:,}")


def _invalid(place: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{place} is {reprlib.repr(value)}, not {wanted}")


def read_manifest(directory: Path) -> StoreManifest:
    """Return the manifest of a directory, or raise ``StoreUnreadable`` or ``StoreDamaged``."""
    path = directory / MANIFEST
    try:
        raw = read_file(path)
    except FileNotFoundError:
        if row_files(directory):
            raise _damaged(directory, "is missing") from None
        below = sorted(str(found.parent) for found in directory.glob(f"*/{MANIFEST}"))
        written = f"a store is written there by store.save({str(directory)!r})"
        advice = f"there is one in {below[0]}" if below else f"there is no {MANIFEST}; {written}"
        raise StoreUnreadable(f"{directory} holds no store: {advice}") from None
    except OSError as error:
        raise StoreUnreadable(f"{path} cannot be read: {error}") from error
    try:
        envelope = json.loads(raw)
        version = envelope["format"]
        if is_whole(version) and version not in _READABLE:
            newer = "a newer one wrote it: pip install --upgrade clusterenv"
            older = f"an older one wrote it, and reads it. {_without_manifest(directory)}"
            raise StoreUnreadable(
                f"{path} has format {version}, and this version of ClusterEnv reads "
                f"{' and '.join(map(str, _READABLE))}; "
                f"{newer if version > FORMAT else older}"
            )
        text = envelope["manifest"]
        if not is_whole(version) or zlib.crc32(text.encode()) != envelope["crc32"]:
            raise _damaged(directory)
        found = json.loads(text)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(directory) from error
    try:
        return _parse(found)
    except ConfigError as error:
        raise _damaged(directory, f"was not written by a store: {error}") from error


def write_manifest(directory: Path, manifest: StoreManifest) -> None:
    """Replace the manifest atomically; if this raises ``OSError``, the previous one stays."""
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


def _damaged(directory: Path, fault: str = "was altered or cut") -> StoreDamaged:
    return StoreDamaged(
        f"{directory / MANIFEST} {fault}; put it back from a copy, if there is one. "
        f"{_without_manifest(directory)}"
    )


def row_files(directory: Path) -> list[Path]:
    """Return the files of rows in a directory, committed or not."""
    return sorted(directory.glob(f"rows-{'[0-9]' * 8}.arrow"))


def _without_manifest(directory: Path) -> str:
    files = ", ".join(path.name for path in row_files(directory))
    return (
        "The rows are Arrow streams that pyarrow.ipc.open_stream reads (of format 3 and before, "
        f"files that open_file reads): {files or 'none are left'}. "
        f"A new store needs another directory: store.save({str(directory / 'new')!r})"
    )


def as_json(value: Any, what: str) -> str:
    """Return a value, which may contain NumPy scalars, as JSON, or raise ``ConfigError``."""

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
