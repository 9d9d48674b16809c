"""The store as a whole: memory, files, saving and loading."""

from __future__ import annotations

import json
import os
import re
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from batches import Fleet, Frames, TwoLeaves, Vector, all_of, fill, same, transitions
from stores import EVERY_KIND, Kind, files, go_on_alike, no_file_larger_than

import clusterenv
from clusterenv.errors import (
    ClosedError,
    ClusterEnvError,
    ConfigError,
    SchemaMismatch,
    StoreDamaged,
    StoreInUse,
    StoreNotWritten,
    StoreTooLarge,
    StoreUnreadable,
)
from clusterenv.store import (
    NStep,
    Prioritized,
    Recent,
    ReplayStore,
    Sampler,
    Sequences,
    Uniform,
)
from clusterenv.store.samplers.sum_tree import SumTree
from clusterenv.store.table import storage


def filled(batches: int = 12, **options: Any) -> tuple[ReplayStore, list[Any]]:
    store = ReplayStore(101, sampler=Uniform(replace=False), seed=0, **options)
    return store, fill(store, Fleet(), batches)


def check(store: ReplayStore, rows: list[Any]) -> None:
    same(all_of(store), transitions(rows[len(rows) - len(store) :], Vector()))


# Saving and loading


@EVERY_KIND
def test_a_loaded_store_goes_on_as_the_one_that_was_saved(kind: Kind, tmp_path: Path) -> None:
    store, fleet = kind.new(), kind.batches()
    for turn in range(22):
        kind.use(store, fleet)
        if turn in (2, 13, 20):
            store.save(tmp_path)
            loaded = ReplayStore.load(tmp_path)
            assert loaded.stats == store.stats
            same(loaded.sample(kind.n), store.sample(kind.n))
    store.save(tmp_path)
    go_on_alike(kind, store, ReplayStore.load(tmp_path), fleet)


def test_a_store_that_was_loaded_saves_as_well_as_the_first(tmp_path: Path) -> None:
    store, rows = filled()
    for turn in range(3):
        store.save(tmp_path / str(turn))
        store = ReplayStore.load(tmp_path / str(turn))
    check(store, rows)


def test_an_empty_store_is_saved_and_loaded(tmp_path: Path) -> None:
    ReplayStore(55, sampler=Prioritized(0.9), seed=4).save(tmp_path)
    loaded, twin = ReplayStore.load(tmp_path), ReplayStore(55, sampler=Prioritized(0.9), seed=4)
    assert (len(loaded), loaded.capacity) == (0, 55)
    for store in (loaded, twin):
        fill(store, Fleet(), 3)
    same(loaded.sample(9), twin.sample(9))


def test_saving_replaces_what_was_saved_before_and_leaves_no_file_behind(tmp_path: Path) -> None:
    for batches in (12, 3):
        store, rows = filled(batches)
        store.save(tmp_path)
        assert sorted(name.split("-")[0] for name in files(tmp_path)) == ["manifest.json", "rows"]
        check(ReplayStore.load(tmp_path), rows)


def test_a_disk_that_fills_up_during_a_save_leaves_the_old_state(tmp_path: Path) -> None:
    store = ReplayStore(101, sampler=Prioritized(), seed=0)
    rows = fill(store, Fleet(), 5)
    store.save(tmp_path)
    before = files(tmp_path)
    size = max(len(content) for content in before.values())
    for limit in (0, 100, 700, 3000, size // 2, size - 1):
        with (
            no_file_larger_than(limit),
            pytest.raises(StoreNotWritten, match=rf"{tmp_path} could not be .* 60 rows, is as it"),
        ):
            store.save(tmp_path)
        assert files(tmp_path) == before
    check(ReplayStore.load(tmp_path, sampler=Uniform(replace=False)), rows)
    store.save(tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_a_first_save_that_fails_leaves_nothing_that_looks_like_a_store(tmp_path: Path) -> None:
    store, _ = filled()
    for limit in (0, 2000):
        with no_file_larger_than(limit), pytest.raises(StoreNotWritten):
            store.save(tmp_path / "new")
        with pytest.raises(StoreUnreadable, match="holds no store"):
            ReplayStore.load(tmp_path / "new")
    assert not list((tmp_path / "new").glob("*.part"))


def test_a_larger_or_smaller_store_takes_the_rows(tmp_path: Path) -> None:
    store, rows = filled()
    store.save(tmp_path)
    larger = ReplayStore.load(tmp_path, capacity=500)
    assert len(larger) == len(store)
    check(larger, rows)
    smaller = ReplayStore.load(tmp_path, capacity=40, sampler=Prioritized())
    assert 36 <= len(smaller) <= 40
    with pytest.raises(ConfigError, match=r"capacity must be .*got 0"):
        ReplayStore.load(tmp_path, capacity=0)


def test_another_sampler_takes_the_rows(tmp_path: Path) -> None:
    store, rows = filled()
    store.save(tmp_path)
    loaded = ReplayStore.load(tmp_path, sampler=Prioritized())
    assert len(loaded.sample(50)["weights"]) == 50
    loaded.save(tmp_path)
    check(ReplayStore.load(tmp_path, sampler=Uniform(replace=False)), rows)


def test_a_seed_given_when_loading_counts(tmp_path: Path) -> None:
    store, _ = filled()
    store.save(tmp_path)
    drawn = [ReplayStore.load(tmp_path, seed=s).sample(20)["indices"].tolist() for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_directory_without_a_store_says_how_one_gets_there(tmp_path: Path) -> None:
    with pytest.raises(StoreUnreadable, match=rf"{tmp_path} holds no store.*store\.save\("):
        ReplayStore.load(tmp_path)
    with pytest.raises(StoreUnreadable, match="holds no store"):
        ReplayStore.load(tmp_path / "nowhere")


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a regular file")
    below = tmp_path / "file" / "x"
    store, _ = filled(2)
    with pytest.raises(StoreUnreadable, match=rf"{below} cannot be written.*directory of your own"):
        store.save(below)
    with pytest.raises(StoreUnreadable, match=r"cannot be (read|written)"):
        ReplayStore.load(below)
    with pytest.raises(StoreUnreadable, match=r"cannot be written"):
        ReplayStore(10, directory=below)
    with pytest.raises(StoreUnreadable, match=r"cannot be written"):
        ReplayStore(10, journal=below)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    store, _ = filled(2)
    with pytest.raises(StoreUnreadable, match=rf"{tmp_path}.* cannot be written"):
        store.save(tmp_path / "x")


def manifest_of(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    envelope = json.loads((directory / "manifest.json").read_text())
    return envelope, json.loads(envelope["manifest"])


def forge(directory: Path, envelope: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Write a manifest whose checksum is right."""
    text = json.dumps(manifest)
    envelope = {**envelope, "manifest": text, "crc32": zlib.crc32(text.encode())}
    (directory / "manifest.json").write_text(json.dumps(envelope))


def test_a_store_of_a_newer_version_is_refused_and_kept(tmp_path: Path) -> None:
    store, _ = filled()
    store.save(tmp_path)
    envelope, manifest = manifest_of(tmp_path)
    forge(tmp_path, {**envelope, "format": 5}, manifest)
    before = files(tmp_path)
    for attempt in (
        lambda: ReplayStore.load(tmp_path),
        lambda: store.save(tmp_path),
        lambda: ReplayStore(101, journal=tmp_path),
    ):
        with pytest.raises(StoreUnreadable, match=r"has format 5, .* reads 3 and 4; .*pip install"):
            attempt()
    assert files(tmp_path) == before


def test_a_store_of_an_older_format_is_named_with_what_to_do_and_kept(tmp_path: Path) -> None:
    store, _ = filled()
    store.save(tmp_path)
    envelope, manifest = manifest_of(tmp_path)
    forge(tmp_path, {**envelope, "format": 2}, manifest)
    before = files(tmp_path)
    for attempt in (
        lambda: ReplayStore.load(tmp_path),
        lambda: store.save(tmp_path),
        lambda: ReplayStore(101, journal=tmp_path),
        lambda: clusterenv.open_dataset(tmp_path),
    ):
        with pytest.raises(
            StoreUnreadable,
            match=r"has format 2, .* reads 3 and 4; an older .*rows-\d+\.arrow\. .*store\.save\(",
        ):
            attempt()
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b"])
def test_a_manifest_that_names_files_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    store, _ = filled()
    store.save(tmp_path)
    envelope, manifest = manifest_of(tmp_path)
    manifest["segments"][0]["file"] = name
    forge(tmp_path, envelope, manifest)
    with pytest.raises(
        StoreDamaged, match=rf"manifest\.json .* segments\[0\]: file is '{name}', not"
    ):
        ReplayStore.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'{"format": 4}',
        b'{"format": 4, "crc32": 5, "manifest": 7}',
        b'{"format": 4, "crc32": 0, "manifest": ""}',
        b"\xff\xfe\x00",
        None,
    ],
)
def test_a_damaged_manifest_says_what_is_readable(content: bytes | None, tmp_path: Path) -> None:
    store, rows = filled()
    store.save(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"capacity", b"capacitx", 1) if content is None
                     else content)  # fmt: skip
    before = files(tmp_path)
    for attempt in (
        lambda: ReplayStore.load(tmp_path),
        lambda: store.save(tmp_path),
        lambda: ReplayStore(101, journal=tmp_path),
    ):
        with pytest.raises(StoreDamaged, match=r"manifest\.json was altered .*rows-\d+\.arrow"):
            attempt()
    assert files(tmp_path) == before
    (name,) = [name for name in before if name.startswith("rows")]
    with pa.memory_map(str(tmp_path / name)) as source:  # what the message promises
        table = pa.ipc.open_stream(source).read_all()
        assert table["step"].to_pylist() == [row.step for row in rows[-len(store) :]]


def test_rows_beside_a_missing_manifest_are_told_of_and_not_removed(tmp_path: Path) -> None:
    store, _ = filled()
    store.save(tmp_path)
    (tmp_path / "manifest.json").unlink()
    before = files(tmp_path)
    said = set()
    for attempt in (
        lambda: store.save(tmp_path),
        lambda: ReplayStore(101, journal=tmp_path),
        lambda: ReplayStore.load(tmp_path),
        lambda: clusterenv.open_dataset(tmp_path),
    ):
        with pytest.raises(StoreDamaged, match=r"manifest\.json is missing.*from a copy") as error:
            attempt()
        said.add(str(error.value))
    (message,) = said
    assert re.search(
        r"open_stream reads .*: rows-\d+\.arrow\. .*another directory: store\.save", message
    )
    assert files(tmp_path) == before
    store.save(tmp_path / "new")  # what the message proposes


def test_files_of_others_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "my-data.arrow").write_text("mine")
    (tmp_path / "rows-of-mine.arrow").write_text("mine")
    store, rows = filled()
    for _ in range(2):
        store.save(tmp_path)
    check(ReplayStore.load(tmp_path), rows)
    assert (tmp_path / "my-data.arrow").read_text() == "mine"
    assert (tmp_path / "rows-of-mine.arrow").read_text() == "mine"


def test_a_forged_file_of_rows_is_an_error_and_no_crash(tmp_path: Path) -> None:
    store, _ = filled()
    store.save(tmp_path)
    envelope, manifest = manifest_of(tmp_path)
    path = tmp_path / manifest["segments"][0]["file"]
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(60):
        content = bytearray(good)
        for at in rng.integers(0, len(content), 4):
            content[at] = rng.integers(256)
        path.write_bytes(content)
        manifest["segments"][0]["crc32"] = zlib.crc32(content)
        forge(tmp_path, envelope, manifest)
        try:
            ReplayStore.load(tmp_path).sample(5)
        except ClusterEnvError:
            pass  # what is not refused fits, and has other numbers


@pytest.mark.parametrize(
    ("sampler", "state"),
    [
        (Prioritized, {"power": np.ones(84)}),
        (Prioritized, {"powers": np.ones(1), "largest": np.ones(1)}),
        (Prioritized, {"powers": -np.ones(84), "largest": np.ones(1)}),
        (Prioritized, {"powers": np.ones(84), "largest": np.ones(0)}),
        (Prioritized, {}),
        (lambda: Recent(4, 2), {"starts": np.array([5]), "used": np.array([0])}),
        (lambda: Recent(4, 2), {"starts": np.array([0]), "used": np.array([], np.int64)}),
        (lambda: Sequences(4), {"initial.h": np.zeros(3, np.float32)}),
    ],
)
def test_a_forged_state_names_its_file(
    tmp_path: Path, sampler: Callable[[], Sampler], state: dict[str, Any]
) -> None:
    fleet, store = Fleet(), ReplayStore(101, sampler=sampler())
    for _ in range(7):
        store.add(fleet.next()[0])
    assert len(store) == 84
    monkey = pytest.MonkeyPatch()
    monkey.setattr(store.sampler, "state", lambda: state)
    store.save(tmp_path)
    monkey.undo()
    name = r"state-\d+\.arrow" if state else r"manifest\.json"
    with pytest.raises(StoreDamaged, match=name + " was not written by a store"):
        ReplayStore.load(tmp_path)
    assert len(ReplayStore.load(tmp_path, skip_damaged=True)) == 84


@pytest.mark.parametrize("name", ["sampled", "random", "position"])
def test_a_forged_manifest_is_named(tmp_path: Path, name: str) -> None:
    store, _ = filled()
    store.save(tmp_path)
    envelope, manifest = manifest_of(tmp_path)
    del manifest["store"][name]
    forge(tmp_path, envelope, manifest)
    with pytest.raises(StoreDamaged, match=r"manifest\.json was not written by a store"):
        ReplayStore.load(tmp_path)


def test_nothing_on_disk_is_pickled() -> None:
    store = Path(storage.__file__).parents[1]
    data, names = store.parent / "data", ("arrow", "ipc", "record_batch")
    for path in [*store.rglob("*.py"), *(data / f"{name}.py" for name in names)]:
        assert not re.search(r"pickle|np\.load|torch\.load|marshal|shelve", path.read_text()), path


# Memory


def test_a_capacity_that_does_not_fit_names_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for free in (3_000_000, 300_000_000):
        monkeypatch.setattr(storage, "available_memory", lambda free=free: free)
        batch = Fleet(Frames()).next()[0]
        store = ReplayStore(10**9, stack=4)
        message = r"=1,000,000,000 takes .* GB of memory, .*; capacity=([\d_]+) fits.*directory="
        with pytest.raises(StoreTooLarge, match=message) as caught:
            store.add(batch)
        fits = int(re.search(message, str(caught.value))[1])  # type: ignore[index]
        ReplayStore(fits, stack=4).add(batch)
        with pytest.raises(StoreTooLarge):
            ReplayStore(int(fits * 1.02), stack=4).add(batch)


@pytest.mark.parametrize("directory", [False, True])
@pytest.mark.parametrize(
    "sampler",
    [Prioritized, lambda: NStep(3, 0.9, Prioritized()), lambda: Sequences(3, 0, 0, Prioritized())],
)
def test_priorities_count_as_memory(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sampler: Callable[[], Sampler],
    directory: bool,
) -> None:
    batch = Fleet().next()[0]
    plain = ReplayStore(100_000)
    plain.add(batch)
    SumTree(1)  # imports Numba, if it is installed
    tracemalloc.start()
    kept = SumTree(100_000)
    tree = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert tree > 100_000 * 16 > len(kept.leaves)
    needed = tree + (0 if directory else plain.nbytes)
    options = {"directory": tmp_path} if directory else {}
    for free, fits in ((needed * 0.99, False), (needed * 1.06, True)):
        monkeypatch.setattr(storage, "available_memory", lambda free=free: int(free))
        with ReplayStore(100_000, sampler=sampler(), **options) as store:
            if fits:
                store.add(batch)
            else:
                with pytest.raises(StoreTooLarge, match=r"of memory.*; capacity=[\d_]+ fits"):
                    store.add(batch)


def test_when_nothing_fits_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "available_memory", lambda: 50)
    with pytest.raises(StoreTooLarge, match="no capacity fits"):
        filled(1)


def test_a_schema_takes_the_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Fleet(TwoLeaves()).next()[0]
    schema = batch.record_batch.schema
    store = ReplayStore(1000, schema=schema)
    assert store.nbytes > 1000 * (8 + 32)
    store.add(batch)
    twin = ReplayStore(1000)
    twin.add(batch)
    assert store.nbytes == twin.nbytes
    monkeypatch.setattr(storage, "available_memory", lambda: 10_000)
    with pytest.raises(StoreTooLarge, match=r"capacity=1,000 takes"):
        ReplayStore(1000, schema=schema)


def test_a_store_with_a_schema_resumes_its_journal(tmp_path: Path) -> None:
    schema = Fleet().next()[0].record_batch.schema
    with ReplayStore(1000, schema=schema, journal=tmp_path) as store:
        fill(store, Fleet(), 3)
        store.commit()
        rows = len(store)
    with ReplayStore(1000, schema=schema, journal=tmp_path) as store:
        assert len(store) == rows


def test_a_schema_that_no_batch_can_have_is_refused() -> None:
    schema = Fleet().next()[0].record_batch.schema
    with pytest.raises(SchemaMismatch, match=r"'name' is text, .*text='drop'"):
        ReplayStore(1000, schema=schema.append(pa.field("name", pa.string())))
    with pytest.raises(SchemaMismatch, match="no column 'reward'"):
        ReplayStore(1000, schema=schema.remove(schema.get_field_index("reward")))


def test_a_plain_list_in_a_schema_is_a_vector() -> None:
    batch = Fleet().next()[0]
    fields = [pa.field(f.name, f.type) for f in batch.record_batch.schema]
    store = ReplayStore(1000, schema=pa.schema(fields))
    store.add(batch)
    assert len(store) == 12


def test_a_limit_of_the_container_counts_without_files_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_CGROUP", tmp_path)
    whole = storage.available_memory()
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\ninactive_file 2500000\nslab 7\n")
    assert storage.available_memory() == 3_500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert storage.available_memory() > whole / 2


def test_the_store_says_what_it_takes() -> None:
    store, _ = filled(1)
    assert store._buffer.ring is not None
    assert store.nbytes == store.stats.nbytes > 101 * (6 * 4 + 4 + 1 + 1 + 8 + 4 * 4 + 8)


# Columns in files


@EVERY_KIND
def test_columns_in_files_give_the_same_samples(kind: Kind, tmp_path: Path) -> None:
    left, right = kind.new(), kind.new(directory=tmp_path)
    go_on_alike(kind, left, right, kind.batches())
    assert type(right.sample(kind.n)["reward"]) is np.ndarray
    right.close()
    assert not (tmp_path / "columns").exists()


def test_columns_in_files_are_on_disk_and_go_when_the_store_is_closed(tmp_path: Path) -> None:
    store, rows = filled(directory=tmp_path / "store")
    on_disk = sum(path.stat().st_size for path in (tmp_path / "store/columns").iterdir())
    assert on_disk == store.nbytes
    check(store, rows)
    store.close()
    store.close()
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["lock"]


def test_what_a_killed_process_left_makes_room(tmp_path: Path) -> None:
    filled(directory=tmp_path)[0].close()
    (tmp_path / "columns").mkdir()
    (tmp_path / "columns" / "obs").write_bytes(b"x" * 1000)
    store, rows = filled(directory=tmp_path)
    check(store, rows)
    store.close()


def test_a_directory_of_columns_that_no_store_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "columns").mkdir()
    (tmp_path / "columns" / "precious").write_text("mine")
    with pytest.raises(StoreUnreadable, match=r"columns is there, and no store made it"):
        ReplayStore(100, directory=tmp_path)
    assert (tmp_path / "columns" / "precious").read_text() == "mine"


def test_keys_with_slashes_have_files_too(tmp_path: Path) -> None:
    batch = Fleet().next()[0]
    columns = {"obs.left/../arm": batch.flat("obs")}
    columns |= {name: batch.flat(name) for name in batch.names if name != "obs"}
    tail = {"obs.left/../arm": batch.tail["obs"]}
    batch._columns, batch.tail = columns, tail
    with ReplayStore(100, directory=tmp_path / "a") as store:
        store.add(batch)
        assert store.sample(3)["next_obs.left/../arm"].shape == (3, 6)
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = ReplayStore(10**13, directory=tmp_path)
    with pytest.raises(StoreTooLarge, match=rf"of the disk of {tmp_path}.*capacity=[\d_]+ fits$"):
        store.add(Fleet().next()[0])
    assert not list((tmp_path / "columns").iterdir())
    store.close()


def test_a_file_that_cannot_be_as_large_is_refused(tmp_path: Path) -> None:
    store = ReplayStore(100_000, directory=tmp_path)
    with (
        no_file_larger_than(1000),
        pytest.raises(StoreTooLarge, match=r"columns/steps needs 1\.6 MB"),
    ):
        store.add(Fleet().next()[0])
    store.close()


def test_one_directory_for_columns_and_journal_is_refused_with_two_that_work(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"directory='run/columns', journal='run/journal'"):
        ReplayStore(100, directory=tmp_path, journal=str(tmp_path / "." / ""))
    with ReplayStore(100, directory=tmp_path / "columns", journal=tmp_path / "journal") as store:
        fill(store, Fleet(), 2)
        store.commit()


def test_two_stores_of_one_process_do_not_share_a_directory(tmp_path: Path) -> None:
    with ReplayStore(100, directory=tmp_path) as store:
        with pytest.raises(StoreInUse, match=r"in this process; close that store"):
            ReplayStore(100, directory=tmp_path)
        with pytest.raises(StoreInUse, match=r"in this process"):
            store.save(tmp_path)
    ReplayStore(100, directory=tmp_path).close()


# The end


def test_a_closed_store_says_so_and_holds_no_memory() -> None:
    store, _ = filled()
    obs = store._buffer.ring.columns["obs"]  # type: ignore[union-attr]
    store.close()
    for call in (
        lambda: store.sample(3),
        lambda: store.add(Fleet().next()[0]),
        lambda: store.update_priorities([0], [1.0]),
        lambda: store.commit(),
        lambda: store.save("nowhere"),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert not store.sampler.ring.columns  # type: ignore[attr-defined]
    assert len(obs) > 101  # the arrays of a sample stay valid


def test_adding_and_sampling_from_two_threads_mixes_no_rows() -> None:
    fleet = Fleet(shards=1, envs=4, horizon=16, episode=8)
    store = ReplayStore(300, sampler=Prioritized(), seed=0)
    added = fill(store, fleet, 3)
    batches = [fleet.next() for _ in range(150)]

    def add() -> None:
        for batch, _ in batches:
            store.add(batch)

    thread = threading.Thread(target=add)
    thread.start()
    samples = []
    while thread.is_alive():
        samples.append(store.sample(32))
        store.update_priorities(samples[-1]["indices"], np.ones(32))
    thread.join()
    for _, rows in batches:
        added += rows
    for sample in samples[:: len(samples) // 50 + 1]:
        same(sample, transitions([added[at] for at in sample["indices"]], Vector()))


def test_the_counters_tell_what_went_through() -> None:
    store, _ = filled(12)
    store.sample(40)
    stats = store.stats
    assert (stats.added_rows, stats.sampled_rows, stats.capacity) == (144, 40, 101)
    assert stats.rows == len(store) == stats.added_rows - stats.evicted_rows
    assert (stats.oldest_version, stats.newest_version) == (4, 12)


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "uniform"}, r"sampler='uniform' is no sampler: .*sampler=Uniform\(\)\)"),
        ({"sampler": Prioritized}, r"sampler=Prioritized is a class; .*Prioritized\(\.\.\.\)"),
        ({"sampler": zip()}, r"is no sampler"),
        ({"ratio": "8"}, r"samples_per_insert must be a number, .*got '8': Ratio\(8\)"),
        ({"seed": -1}, r"seed=-1 .*ReplayStore\(\.\.\., seed=1\)"),
        ({"seed": "one"}, r"seed='one' .*ReplayStore\(\.\.\., seed=1\)"),
        ({"stack": "4"}, r"stack='4' .*stack=4"),
        ({"schema": 5}, r"schema must be a Schema, got 5: .*schema=batch\.record_batch\.schema"),
        ({"directory": 5}, r"directory=5 is no path .*: ReplayStore\(\.\.\., directory='replay'\)"),
        ({"directory": "a\0b"}, r"directory='a\\x00b' is no path \(embedded null byte\)"),
        ({"journal": b"x"}, r"journal=b'x' is no path .*: ReplayStore\(\.\.\., journal='replay'\)"),
        ({"journal": ""}, r"journal='' is no path \(empty\)"),
        ({"journal": "x" * 5000}, r"is no path \(too long\)"),
        ({"side": None}, "side must be a number, above 0 and at most 1, got None"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused_with_the_right_call(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplayStore(1000, **settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.add(None), r"batch must be a Batch, got None: store\.add\("),
        (lambda store: store.save(5), r"directory=5 is no path .*: store\.save\('replay'\)"),
        (lambda store: ReplayStore.load(5), r"directory=5 is no path .*ReplayStore\.load\('"),
        (lambda store: store.sample(True), r"n must be an integer, at least 1.*got True: store\."),
        (lambda store: store.sample(10**30), r"n must be an integer.*at most 1,048,576, got 1000"),
        (lambda store: store.sample(4, columns=5), r"columns must be a list of names, got 5"),
        (lambda store: store.sample(4, columns="obs"), r"columns must be .*got 'obs': sample\("),
        (lambda store: store.sample(4, tensors="x"), "tensors must be True or False, got 'x'"),
        (lambda store: store.may_sample("4"), "n must be an integer, at least 1.*got '4'"),
        (lambda store: store.may_add(None), "rows must be an integer, at least 0, got None"),
        (lambda store: store.feed(5, 4), r"feed\(\) takes a Collector, or batches, got 5"),
        (lambda store: store.feed([], "4"), "n must be an integer, at least 1.*got '4'"),
        (lambda store: store.update_priorities([0], ["x"]), r"priorities must be numbers, got \["),
        (lambda store: store.update_priorities([[0], 1], [1.0]), "indices must be numbers, got"),
        (lambda store: store.update_priorities([0], [1e300]), r"priorities\[0\] is 1e[+]300"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_and_the_store_goes_on(
    call: Callable[[ReplayStore], Any], message: str
) -> None:
    store = ReplayStore(100, sampler=Prioritized())
    store.add(Fleet().next()[0])
    with pytest.raises(ConfigError, match=message):
        call(store)
    assert len(store.sample(4)["reward"]) == 4


class HalfASampler:
    """Draws, and does nothing else."""

    def draw(self, n: int | None, rng: np.random.Generator) -> None: ...


def test_a_sampler_that_lacks_methods_is_told_which() -> None:
    with pytest.raises(
        ConfigError, match=r"has no attach, check, added, .*HalfASampler\(Uniform\)"
    ):
        ReplayStore(1000, sampler=HalfASampler())  # type: ignore[arg-type]
