"""Manifests with a valid checksum and impossible contents."""

from __future__ import annotations

import copy
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from batches import Fleet, Frames, changed, fill

import clusterenv
from clusterenv.errors import ConfigError, SchemaMismatch, StoreDamaged, StoreUnreadable
from clusterenv.store import Journal, NStep, Prioritized, ReplayStore, Uniform
from clusterenv.store.journal.manifest import FORMAT, read_manifest
from pipelines.tools.inspection import describe

VALUES = [None, "x", -1, 10**30, [], {}, True, float("nan"), 1, 0.5, ["x"], {"x": 1}]
READERS: list[Callable[[Path], Any]] = [
    ReplayStore.load,
    clusterenv.open_dataset,
    describe,
    lambda directory: ReplayStore.load(directory, sampler=Uniform(), skip_damaged=True),
]
Place = tuple[str | int, ...]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with two files of rows, a stack, a sampler on another, priorities and a note."""
    sampler = NStep(3, 0.9, Prioritized())
    fleet = Fleet(Frames(), horizon=8)
    options: dict[str, Any] = {"journal": tmp_path, "stack": 4, "side": 1.0, "seed": 1}
    with ReplayStore(200, sampler=sampler, **options) as store:
        for _ in range(2):
            fill(store, fleet, 2)
            store.sample(8)
            store.commit(args={"env": "Breakout"}, finished=False)
    return tmp_path


def parsed(directory: Path) -> dict[str, Any]:
    return dict(json.loads(json.loads((directory / "manifest.json").read_text())["manifest"]))


def forge(
    directory: Path, manifest: Any, envelope: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write a manifest whose checksum is right."""
    path = directory / "manifest.json"
    text = json.dumps(manifest)
    whole = json.loads(path.read_text()) | {"manifest": text, "crc32": zlib.crc32(text.encode())}
    path.write_text(json.dumps({**whole, **envelope}))


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield where everything in a manifest is, dictionaries and lists included."""
    if place:
        yield place
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(part, (*place, key))


def put(manifest: Any, place: Place, value: Any) -> Any:
    found = manifest = copy.deepcopy(manifest)
    for key in place[:-1]:
        found = found[key]
    found[place[-1]] = value
    return manifest


def check_readers(directory: Path, what: object) -> int:
    """Fail unless all readers work, or raise errors of ours that name a file; count these."""
    errors: list[str] = []
    for read in READERS:
        try:
            found = read(directory)
            if isinstance(found, ReplayStore):
                with found:
                    assert not len(found) or len(found.sample(8)["obs"]) == 8
        except (StoreDamaged, StoreUnreadable, ConfigError) as error:
            errors.append(str(error))
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
    for message in errors:
        named = rf"{directory}/(manifest\.json|(rows|state)-\d+\.arrow)"
        assert re.search(named, message), (what, message)
    return len(errors)


def test_a_manifest_with_any_wrong_value_is_named_or_read(directory: Path) -> None:
    good = parsed(directory)
    assert check_readers(directory, "as it was written") == 0
    tried = 0
    for place in places(good):
        for value in VALUES:
            forge(directory, put(good, place, value))
            errors = check_readers(directory, (place, value))
            harmless = place[0] == "note" and place != ("note",)
            assert not (errors and harmless), (place, value)
            tried += 1
    assert tried > 600


def test_a_manifest_that_lacks_a_key_or_has_another_is_named(directory: Path) -> None:
    good = parsed(directory)
    named = [place for place in places(good) if isinstance(place[-1], str) and place[0] != "note"]
    for *within, key in named:
        if within[-1:] == ["settings"]:  # all have defaults, or belong to samplers of one's own
            continue
        wrong = copy.deepcopy(good)
        found: Any = wrong
        for part in within:
            found = found[part]
        value = found.pop(key)
        forge(directory, wrong)
        assert check_readers(directory, (within, key)) == len(READERS), (within, key)
        if "random" not in within:  # NumPy's own
            found.update({key: value, "another": 5})
            forge(directory, wrong)
            assert check_readers(directory, (within, "another")) == len(READERS), within


@pytest.mark.parametrize("value", [None, "2", -1, 10**30, [], {}, True, float("nan"), 2.5])
@pytest.mark.parametrize("key", ["format", "crc32", "manifest"])
def test_an_envelope_with_a_wrong_value_is_named(directory: Path, key: str, value: Any) -> None:
    forge(directory, parsed(directory), {key: value})
    assert check_readers(directory, (key, value)) == len(READERS)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("segments", 1, "file"), "rows-00000000.arrow", r"segments\[1\]\.file .* named once"),
        (("segments", 0, "file"), "state-00000001.arrow", r"segments\[0\]\.file .* named once"),
        (("segments", 0, "file"), "lock", r"segments\[0\]: file is 'lock', not a name such as"),
        (("segments", 0, "rows"), 47, r"segments\[0\]: rows is 47, not the 48 rows of its blocks"),
        (("segments", 0, "blocks", 0), [24, 5, 0], "multiple of the second"),
        (("segments", 0, "blocks", 0), [24, 0, 0], "multiple of the second"),
        (("end",), 95, r"end is 95, not a whole number from 96"),
        (("store", "position", "first"), 97, r"store\.position\.first is 97, .* from 0 to 96"),
        (("store", "position", "oldest"), 97, r"store\.position\.oldest is 97"),
        (("store", "capacity"), 2**62 + 1, r"store\.capacity is 46116860184"),
        (("store", "sampler", "settings", "n"), 0, r"sampler is NStep.*got 0"),
        (("store", "sampler", "settings", "steps"), 3, r"sampler is NStep.* 'steps'"),
        (("store", "random", "state", "inc"), 2**128, r"store\.random is .* not the state of"),
        (("stack", "size"), 1, "stack=1 is no stack"),
    ],
)
def test_a_value_that_does_not_fit_the_others_is_named(
    directory: Path, place: Place, value: Any, message: str
) -> None:
    forge(directory, put(parsed(directory), place, value))
    with pytest.raises(StoreDamaged, match=rf"{directory}/manifest\.json .*{message}"):
        ReplayStore.load(directory)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("segments", 0, "blocks", 0, 1), 6, "cannot be loaded: .*next observation"),
        (("stack", "size"), 10**9, "older frames"),
        (("stack", "axis"), 2**60, "was not written by a store"),
        (("stack", "only"), ["obs.other"], "names 'obs.other'"),
    ],
)
def test_a_value_that_does_not_fit_the_rows_is_told_with_their_file(
    directory: Path, place: Place, value: Any, message: str
) -> None:
    forge(directory, put(parsed(directory), place, value))
    with pytest.raises(
        (StoreDamaged, SchemaMismatch), match=rf"{directory}/rows-00000000.*{message}"
    ):
        ReplayStore.load(directory)


def test_blocks_that_are_not_those_of_the_file_are_refused(directory: Path) -> None:
    good = parsed(directory)
    assert [block[:2] for block in good["segments"][0]["blocks"]] == [[24, 3]] * 2
    for blocks in ([[48, 3, 0]], [[24, 3, 0], [12, 3, 0], [12, 3, 0]], [[27, 3, 0], [21, 3, 0]]):
        forge(directory, put(good, ("segments", 0, "blocks"), blocks))
        with pytest.raises(StoreDamaged, match=rf"{directory}/rows-00000000\.arrow was not writ"):
            ReplayStore.load(directory)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_manifest_that_is_nested_too_deeply_is_named(directory: Path, opening: str) -> None:
    path = directory / "manifest.json"
    path.write_text(opening * 200_000)
    assert check_readers(directory, "envelope") == len(READERS)
    text = opening * 200_000
    envelope = {"format": FORMAT, "manifest": text, "crc32": zlib.crc32(text.encode())}
    path.write_text(json.dumps(envelope))
    assert check_readers(directory, "manifest") == len(READERS)


def test_samplers_that_are_nested_too_deeply_are_refused(directory: Path) -> None:
    manifest = parsed(directory)
    for _ in range(100):
        manifest["store"]["sampler"]["base"] = copy.copy(manifest["store"]["sampler"])
    forge(directory, manifest)
    assert check_readers(directory, "samplers") == len(READERS)


# What is written can be read


def test_a_journal_keeps_nothing_that_it_could_not_read_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    batch = Fleet().next()[0]
    with pytest.raises(ConfigError, match="multiple of the second"):
        journal.append(changed(batch, num_envs=5))
    journal.append(batch)
    wrong: list[dict[str, Any]] = [
        {"store": {"capacity": 5}},
        {"note": ["a list"]},
        {"end": 3},
        {"end": "x"},
    ]
    for options in wrong:
        with pytest.raises(ConfigError):
            journal.commit(**options)
    journal.commit(note={"fine": True})
    journal.close()
    assert read_manifest(tmp_path).rows == clusterenv.open_dataset(tmp_path).count_rows() == 12


def test_generators_of_ones_own_are_kept(tmp_path: Path) -> None:
    seed = np.random.Generator(np.random.PCG64DXSM(3))
    store = ReplayStore(101, seed=seed)  # type: ignore[arg-type]
    fill(store, Fleet(), 3)
    store.save(tmp_path)
    loaded = ReplayStore.load(tmp_path)
    assert loaded.sample(20)["indices"].tolist() == store.sample(20)["indices"].tolist()
