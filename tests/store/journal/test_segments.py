"""Segments are Arrow streams: of received messages, of encoded rows, and of a killed process."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from batches import Fleet, Frames, Row, Vector, all_of, fill, same, transitions
from compare import assert_same
from sealed import ORIGIN, expected, fragment, sealed

import clusterenv
from clusterenv import Batch
from clusterenv.data.fragment_decoder import FragmentDecoder
from clusterenv.data.fragment_encoder import FragmentEncoder
from clusterenv.data.ipc import END_OF_STREAM
from clusterenv.store import Journal, Prioritized, ReplayStore, Uniform, open_snapshot
from pipelines.tools.inspection import describe


def received(count: int) -> list[Batch]:
    """Return batches as the head has them, of two shards in turn."""
    origins = ORIGIN, ORIGIN._replace(shard=4, incarnation=0, first_env=8)
    encoders = [FragmentEncoder(origin) for origin in origins]
    decoders: dict[int, FragmentDecoder] = {}
    batches = []
    for number in range(count):
        at = number % 2
        schema, body = sealed(encoders[at], fragment(number, origin=origins[at], version=number))
        if schema is not None:
            decoders[at] = FragmentDecoder(schema, expected(origin=origins[at]))
        batches.append(decoders[at].decode(body, policy_version=number))
    return batches


def assert_equal(found: Batch, wanted: Batch) -> None:
    for batch in (found, wanted):
        assert batch.names == wanted.names
    assert_same({n: found.flat(n) for n in found.names}, {n: wanted.flat(n) for n in wanted.names})
    for part in ("tail_rows", "tail", "state", "origin", "num_envs", "policy_version"):
        assert_same(getattr(found, part), getattr(wanted, part))


def test_received_messages_are_appended_as_they_are(tmp_path: Path) -> None:
    batches = received(5)
    with closing(Journal(tmp_path)) as journal:
        for batch in batches:
            journal.append(batch)
        journal.commit()
    (file,) = tmp_path.glob("rows-*.arrow")
    parts = [batch.sealed for batch in batches]
    messages = [part.message.tobytes() for part in parts if part is not None]
    schema = batches[0].record_batch.schema.remove_metadata().serialize().to_pybytes()
    assert file.read_bytes() == schema + b"".join(messages) + END_OF_STREAM
    for found, wanted in zip(open_snapshot(tmp_path).batches(), batches, strict=True):
        assert_equal(found, wanted)


def test_received_and_encoded_batches_share_a_segment(tmp_path: Path) -> None:
    first, second, third = received(3)
    parts = {
        name: getattr(second, name) for name in ("tail_rows", "tail", "state", "policy_version")
    }
    columns = {name: second.flat(name) for name in second.names}
    by_hand = Batch(columns, second.num_envs, **parts, **second.origin)
    with closing(Journal(tmp_path)) as journal:
        for batch in (first, by_hand, third):
            journal.append(batch)
        journal.commit()
    assert len(list(tmp_path.glob("rows-*.arrow"))) == 1
    for found, wanted in zip(
        open_snapshot(tmp_path).batches(), (first, second, third), strict=True
    ):
        assert_equal(found, wanted)


def test_other_columns_begin_another_segment(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.append(received(1)[0])
        journal.append(Fleet().next()[0])
        journal.commit()
    assert len(list(tmp_path.glob("rows-*.arrow"))) == 2
    dataset = clusterenv.open_dataset(tmp_path)  # with the columns of the first
    table = dataset.to_table()
    assert (table.num_rows, table["log_prob"].null_count) == (18, 12)


def test_arrow_and_duckdb_open_a_segment(tmp_path: Path) -> None:
    batches = received(4)
    with closing(Journal(tmp_path)) as journal:
        for batch in batches:
            journal.append(batch)
        journal.commit()
    (file,) = tmp_path.glob("rows-*.arrow")
    with pa.memory_map(str(file)) as source:
        table = pa.ipc.open_stream(source).read_all()
    assert table["shard"].to_pylist() == [3] * 6 + [4] * 6 + [3] * 6 + [4] * 6
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as rows:
        query = (
            'select shard, count(*), count("next_obs.speed") from rows group by shard order by 1'
        )
        assert duckdb.sql(query).fetchall() == [(3, 12, 6), (4, 12, 6)]
        assert rows.schema.names == table.schema.names


# Journals written before


def test_a_journal_of_files_loads_and_goes_on_as_streams(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "format3" / "rows", tmp_path, dirs_exist_ok=True)
    fleet, rows = Fleet(state=True, seed=3), list[Row]()
    for _ in range(6):
        rows += fleet.next()[1]

    def check(directory: Path) -> None:
        store = ReplayStore.load(directory, sampler=Uniform(replace=False))
        same(all_of(store), transitions(rows[len(rows) - len(store) :], Vector()))

    check(tmp_path)
    (old,) = tmp_path.glob("rows-*.arrow")
    assert old.read_bytes().startswith(b"ARROW1")
    with ReplayStore(60, sampler=Prioritized(), journal=tmp_path, seed=3) as store:
        assert store.note == {"format": 3}
        rows += fill(store, fleet, 2)
        store.commit()
    check(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text())["format"] == 4
    old_file, new_file = sorted(tmp_path.glob("rows-*.arrow"))
    assert old_file == old
    assert pa.ipc.open_stream(new_file.read_bytes()).read_all().num_rows == 24
    table = clusterenv.open_dataset(tmp_path).to_table()
    assert table["step"].to_pylist() == [row.step for row in rows[-table.num_rows :]]
    assert ("health", "every file is whole") in describe(tmp_path)


def test_frames_of_a_journal_of_files_load(tmp_path: Path) -> None:
    fleet, rows = Fleet(Frames(), seed=3), list[Row]()
    for _ in range(3):
        rows += fleet.next()[1]
    directory = Path(__file__).parent / "format3" / "frames"
    store = ReplayStore.load(directory, sampler=Uniform(replace=False))
    same(all_of(store), transitions(rows, Frames()))
    assert not (directory / "lock").exists()


# A process that is killed

COLLECTS = """
import sys

import clusterenv
import gymnasium
from clusterenv.store import Journal

if __name__ == "__main__":
    policy = clusterenv.policies.Random(gymnasium.spaces.Discrete(2))
    with clusterenv.Collector(
        "CartPole-v1", policy, num_envs=4, horizon=32, shards=1, seed=1
    ) as collector:
        journal = Journal(sys.argv[1])
        for number, batch in enumerate(collector):
            journal.append(batch)
            if number == 4:
                journal.commit()
            print(number, flush=True)
"""
READS = """
import itertools
import json
import sys

import pyarrow as pa

found = {}
for path in sys.argv[1:]:
    with pa.memory_map(path) as source:
        batches = []
        try:
            for batch in pa.ipc.open_stream(source):
                batch.validate(full=True)
                batches.append(batch.to_pydict())
        except pa.ArrowInvalid as error:  # the process was killed in the middle of a message
            print(error, file=sys.stderr)
        found[path] = batches
assert "clusterenv" not in sys.modules
print(json.dumps(found))
"""


def rows_by_plain_arrow(paths: list[Path]) -> list[list[dict[str, Any]]]:
    """Return the batches of files, read by a process that knows pyarrow alone."""
    command = [sys.executable, "-I", "-c", READS, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return list(json.loads(done.stdout).values())


@pytest.mark.timeout(120)
def test_plain_arrow_opens_the_segments_of_a_killed_collection(tmp_path: Path) -> None:
    script, journal = tmp_path / "collects.py", tmp_path / "journal"
    script.write_text(COLLECTS)
    process = subprocess.Popen(
        [sys.executable, str(script), str(journal)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    appended = 0
    for line in process.stdout:
        appended = 1 + int(line)
        if appended == 9:
            os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    process.stdout.close()
    (whole,) = journal.glob("rows-*.arrow")
    (part,) = journal.glob("rows-*.arrow.part")
    committed, unfinished = rows_by_plain_arrow([whole, part])
    assert len(committed) == 5
    assert len(unfinished) >= appended - 5 >= 4
    assert unfinished[0]["obs"][0] is not None
    tracks: dict[int, list[tuple[int, int, list[float], list[float] | None, bool]]] = {}
    for batch in (*committed, *unfinished):
        assert {len(column) for column in batch.values()} == {4 * 32}
        names = ("env", "episode", "step", "obs", "next_obs", "terminated")
        for env, *row in zip(*(batch[name] for name in names), strict=True):
            tracks.setdefault(env, []).append(tuple(row))
    assert sorted(tracks) == [0, 1, 2, 3]
    for track in tracks.values():
        for row, after in itertools.pairwise(track):
            (episode, step, _, following, ended), (next_episode, next_step, obs, _, _) = row, after
            if ended:
                assert (next_episode, next_step) == (episode + 1, 0)
            else:
                assert (next_episode, next_step) == (episode, step + 1)
                assert following is None or following == obs
    assert np.isfinite([row[2] for track in tracks.values() for row in track]).all()
    with closing(Journal(journal)) as reopened:  # as before: what was not committed is removed
        assert reopened.manifest.rows == 5 * 4 * 32
    assert not part.exists()


class Interrupted:
    """A file in which one write is interrupted after half of its bytes, as by Ctrl-C."""

    def __init__(self, file: Any) -> None:
        self._file, self._due = file, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        if self._due:
            self._due = False
            self._file.write(memoryview(data).cast("B")[:100])
            raise KeyboardInterrupt
        return int(self._file.write(data))


def test_an_interrupted_write_leaves_nothing_of_its_message(tmp_path: Path) -> None:
    first, lost, last = received(3)
    with closing(Journal(tmp_path)) as journal:
        journal.append(first)
        writer: Any = journal._open
        writer._file = Interrupted(writer._file)
        with pytest.raises(KeyboardInterrupt):
            journal.append(lost)
        journal.append(last)
        journal.commit()
    found = list(open_snapshot(tmp_path).batches())
    assert len(found) == 2
    assert_equal(found[0], first)
    assert_equal(found[1], last)


def test_a_store_commits_all_its_rows_after_an_interrupted_write(tmp_path: Path) -> None:
    with ReplayStore(100, journal=tmp_path) as store:
        fleet = Fleet(seed=1)
        first, second, last = (fleet.next()[0] for _ in range(3))
        store.add(first)
        writer: Any = store._journal.journal._open  # type: ignore[union-attr]
        writer._file = Interrupted(writer._file)
        with pytest.raises(KeyboardInterrupt):
            store.add(second)
        store.add(last)
        store.commit()
        rows = len(store)
    assert open_snapshot(tmp_path).rows == rows == 36
