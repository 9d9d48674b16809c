"""Reading a directory while a store commits to it."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from batches import Fleet, Row

import clusterenv
from clusterenv.errors import StoreDamaged, StoreUnreadable
from clusterenv.store import Journal, Prioritized, ReplayStore, is_store, open_snapshot
from clusterenv.store.dataset import episodes
from pipelines.tools.inspection import describe


class Writer:
    """Commits batches of 12 rows; the store holds two, so each commit removes files."""

    def __init__(self, directory: Path) -> None:
        self.fleet, self.rows = Fleet(shards=1, episode=2), list[Row]()
        self.store = ReplayStore(24, sampler=Prioritized(), journal=directory, seed=0)
        for _ in range(3):
            self.commit()

    def commit(self) -> None:
        batch, rows = self.fleet.next()
        self.rows += rows
        self.store.add(batch)
        self.store.commit(rows=len(self.rows))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    writer = Writer(tmp_path)
    yield writer
    writer.store.close()


def rewards(rows: list[Row]) -> list[float]:
    return [row.reward for row in rows]


def by_open_dataset(directory: Path) -> list[float]:
    return clusterenv.open_dataset(directory).to_table()["reward"].to_pylist()  # type: ignore[no-any-return]


def by_load(directory: Path) -> list[float]:
    with ReplayStore.load(directory) as store:
        assert store.stats.added_rows == store.note["rows"]
        ring = store._buffer.ring
        assert ring is not None
        slots = ring.slots(np.arange(ring.first, ring.end))
        return ring.columns["reward"][slots].tolist()  # type: ignore[no-any-return]


def by_episodes(directory: Path) -> set[float]:
    return {
        float(reward)
        for episode in episodes(open_snapshot(directory))
        for reward in episode.rewards
    }


def by_inspect(directory: Path) -> list[tuple[str, str]]:
    return [line for line in describe(directory) if line[0] in ("health", "rows", "reward")]


READERS = [by_open_dataset, by_load, by_episodes, by_inspect]


@pytest.mark.parametrize("read", READERS)
def test_a_commit_between_manifest_and_files_is_no_damage(
    read: Callable[[Path], Any], writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, moments = json.loads, iter(range(2))

    def commit_meanwhile(text: Any) -> Any:
        found = loads(text)
        if "segments" in found and next(moments, None) is not None:
            for _ in range(3):
                writer.commit()
        return found

    monkeypatch.setattr(json, "loads", commit_meanwhile)
    found = read(tmp_path)
    assert next(moments, None) is None
    assert found == read(tmp_path)


def test_readers_see_one_commit_each_while_a_writer_commits(writer: Writer, tmp_path: Path) -> None:
    def write() -> None:
        while not done.is_set() and len(writer.rows) < 12 * 60:
            writer.commit()

    done = threading.Event()
    seen: dict[str, list[Any]] = {read.__name__: [] for read in READERS}
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            while not (writing.done() and seen["by_inspect"]):
                for read in READERS:
                    seen[read.__name__].append(read(tmp_path))
        finally:
            done.set()
        writing.result()
    written = rewards(writer.rows)
    for found in seen["by_open_dataset"] + seen["by_load"]:
        assert found in [written[start : start + 24] for start in range(0, len(written), 12)]
    for found in seen["by_inspect"]:
        assert found[0] == ("health", "every file is whole")
        assert found[1][1].startswith("24 of 3 environments")


def test_a_dataset_stays_what_it_was_when_opened(writer: Writer, tmp_path: Path) -> None:
    dataset = clusterenv.open_dataset(tmp_path)
    expected = rewards(writer.rows[-24:])
    for _ in range(3):
        writer.commit()
    assert rewards(writer.rows[-24:]) != expected
    for _ in range(2):
        assert dataset.to_table()["reward"].to_pylist() == expected
        assert dataset.count_rows() == 24
        low = dataset.to_table(columns=["reward"], filter=ds.field("reward") < 0)
        assert low["reward"].to_pylist() == [reward for reward in expected if reward < 0]
        assert duckdb.sql("select reward from dataset").fetchall() == [(r,) for r in expected]
        assert dataset.to_table().to_pandas()["reward"].tolist() == expected
    assert dataset.head(5).num_rows == 5
    sent = pickle.loads(pickle.dumps(dataset))  # with its rows: the files are gone
    assert sent.to_table() == dataset.to_table()


def test_a_dataset_is_mapped_and_holds_no_descriptors(tmp_path: Path) -> None:
    fleet, journal = Fleet(), Journal(tmp_path, segment_rows=1)
    for _ in range(150):
        journal.append(fleet.next()[0])
    journal.commit()
    journal.close()
    dataset = clusterenv.open_dataset(tmp_path)
    assert len(list(dataset.get_fragments())) == 150
    allocated = pa.total_allocated_bytes()
    table = dataset.to_table()
    assert table.num_rows == 150 * 12
    assert pa.total_allocated_bytes() - allocated < table.nbytes / 2
    held = [file.path for file in psutil.Process().open_files()]
    assert not [path for path in held if path.startswith(str(tmp_path))]


def test_what_is_missing_without_a_commit_is_damage(writer: Writer, tmp_path: Path) -> None:
    (state,) = tmp_path.glob("state-*")
    state.unlink()
    assert len(by_open_dataset(tmp_path)) == 24  # which needs no state
    with pytest.raises(StoreDamaged, match=rf"{state} is missing"):
        ReplayStore.load(tmp_path)
    file = next(tmp_path.glob("rows-*"))
    file.unlink()
    with pytest.raises(StoreDamaged, match=rf"{file} is missing"):
        clusterenv.open_dataset(tmp_path)
    assert ("health", f"damaged: {file.name}; the rest is readable") in describe(tmp_path)


def test_an_empty_store_is_an_empty_dataset(tmp_path: Path) -> None:
    ReplayStore(10).save(tmp_path)
    assert clusterenv.open_dataset(tmp_path).count_rows() == 0


# The public way to inspect a directory


def test_a_snapshot_tells_rows_note_and_damage(tmp_path: Path) -> None:
    assert not is_store(tmp_path)
    with pytest.raises(StoreUnreadable, match="holds no store"):
        open_snapshot(tmp_path)
    store, fleet = ReplayStore(24, journal=tmp_path), Fleet()
    for _ in range(5):  # 12 rows each
        store.add(fleet.next()[0])
    store.commit(checkpoint="learner-7.pt")
    store.close()
    assert is_store(str(tmp_path))
    snapshot = open_snapshot(str(tmp_path))
    assert snapshot.end == 60
    assert snapshot.rows == sum(batch.num_rows for batch in snapshot.batches())
    assert snapshot.note == {"checkpoint": "learner-7.pt"}
    assert not snapshot.damaged
    assert snapshot.read(["reward"]).num_rows == snapshot.rows
    (file,) = tmp_path.glob("rows-*.arrow")
    file.write_bytes(bytes(file.stat().st_size))
    snapshot = open_snapshot(tmp_path)
    assert snapshot.damaged == [file.name]
    with pytest.raises(StoreDamaged, match="was not written by a store"):
        snapshot.read(["reward"])
