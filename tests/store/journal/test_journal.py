"""Rows on disk: complete at every moment, and every fault has a name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import Fleet, Frames, Row, Vector, all_of, changed, fill, same, transitions
from other_process import errors, new_fleet, new_store, one_round
from stores import EVERY_KIND, Kind, files, go_on_alike, no_file_larger_than

from clusterenv import Batch
from clusterenv.errors import (
    ClosedError,
    ConfigError,
    SchemaMismatch,
    StoreDamaged,
    StoreInUse,
    StoreNotWritten,
    StoreUnreadable,
)
from clusterenv.store import (
    Journal,
    NStep,
    Prioritized,
    ReplayStore,
    Stack,
    Uniform,
    open_snapshot,
)
from clusterenv.store.journal.manifest import read_manifest

Do = Callable[..., Any]


@pytest.fixture(scope="module")
def other() -> Iterator[Do]:
    """Another process that runs the given commands."""
    script = Path(__file__).parents[2] / "other_process.py"
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def do(what: str, **task: Any) -> Any:
        print(json.dumps({"do": what, **task}), file=process.stdin, flush=True)
        line = process.stdout.readline() if process.stdout else ""
        assert line, f"the other process ended with {process.wait()}"
        return json.loads(line)

    yield do
    process.stdin.close()
    process.stdout.close()
    assert process.wait(20) == 0


def rows_of(directory: Path) -> list[int]:
    """Return the steps of all rows that count, as they were written."""
    return [
        int(step) for batch in open_snapshot(directory).batches() for step in batch.flat("step")
    ]


def check(store: ReplayStore, rows: list[Row]) -> None:
    same(all_of(store), transitions(rows[len(rows) - len(store) :], Vector()))


def load(directory: Path, **options: Any) -> ReplayStore:
    return ReplayStore.load(directory, sampler=Uniform(replace=False), **options)


# Going on


@EVERY_KIND
def test_a_store_that_is_opened_again_goes_on_as_if_it_had_never_been_closed(
    kind: Kind, tmp_path: Path
) -> None:
    twin, twin_fleet = kind.new(), kind.batches()
    fleet = kind.batches()
    store = kind.new(journal=tmp_path)
    for turn in range(26):
        same(kind.use(store, fleet), kind.use(twin, twin_fleet))
        if turn % 3 == 1:
            store.commit()
        if turn in (4, 13, 25):
            store.commit(turn=turn)
            store.close()
            store = kind.new(journal=tmp_path, seed=99)
            assert store.note == {"turn": turn}
            assert store.stats == twin.stats
    go_on_alike(kind, store, twin, fleet)
    store.commit()
    loaded = ReplayStore.load(tmp_path)
    assert loaded.stats == store.stats
    same(loaded.sample(kind.n), store.sample(kind.n))
    store.close()


def test_what_was_not_committed_is_not_there_again(tmp_path: Path) -> None:
    fleet = Fleet()
    with ReplayStore(500, journal=tmp_path) as store:
        rows = fill(store, fleet, 3)
        store.commit()
        fill(store, fleet, 2)
    check(load(tmp_path), rows)
    assert not list(tmp_path.glob("*.part"))


def test_only_files_with_rows_of_the_store_are_kept(tmp_path: Path) -> None:
    fleet, rows = Fleet(), []
    with ReplayStore(50, journal=tmp_path) as store:
        for _ in range(30):
            rows += fill(store, fleet, 1)
            store.commit()
            assert len(list(tmp_path.glob("rows-*"))) <= 50 // 12 + 2
    check(load(tmp_path), rows)


def test_a_journal_without_a_store_keeps_everything(tmp_path: Path) -> None:
    fleet, rows = Fleet(), []
    for session in range(3):
        journal = Journal(tmp_path, segment_rows=30)
        assert journal.manifest.end == 72 * session
        for _ in range(6):
            batch, more = fleet.next()
            journal.append(batch)
            rows += more
        assert journal.pending == 72
        journal.commit(note={"session": session})
        assert journal.pending == 0
        journal.close()
    assert rows_of(tmp_path) == [row.step for row in rows]
    assert len(list(tmp_path.glob("rows-*"))) == 6
    assert read_manifest(tmp_path).note == {"session": 2}
    check(load(tmp_path), rows)


def test_a_commit_may_keep_the_newest_rows_alone(tmp_path: Path) -> None:
    fleet, journal = Fleet(), Journal(tmp_path)
    for _ in range(5):
        journal.append(fleet.next()[0])
        journal.commit()
    journal.commit(keep=25)
    assert [segment.rows for segment in journal.manifest.segments] == [12, 12, 12]
    assert journal.manifest.end == 60
    journal.close()
    assert len(list(tmp_path.glob("rows-*"))) == 3


def test_loading_into_a_new_journal_copies_the_rows_and_goes_on_there(tmp_path: Path) -> None:
    store, fleet = ReplayStore(101, sampler=Prioritized(), seed=0), Fleet()
    fill(store, fleet, 15)
    store.save(tmp_path / "saved")
    moved = ReplayStore.load(tmp_path / "saved", journal=tmp_path / "journal")
    moved.commit()
    moved.close()
    again = ReplayStore(101, sampler=Prioritized(), journal=tmp_path / "journal")
    assert again.stats == store.stats
    same(again.sample(20), store.sample(20))
    again.close()
    with pytest.raises(ConfigError, match=r"holds rows already.*journal='a new directory'"):
        ReplayStore.load(tmp_path / "saved", journal=tmp_path / "journal")


def test_notes_are_kept_with_the_rows(tmp_path: Path) -> None:
    with ReplayStore(500, journal=tmp_path) as store:
        fill(store, Fleet(), 1)
        store.commit(checkpoint="learner.pt", step=np.int64(7), loss=np.float32(0.5))
        store.commit()
        bad = object()
        with pytest.raises(ConfigError, match=r"kept as JSON, but .*store\.commit\(checkpoint="):
            store.commit(model=bad)
        fill(store, Fleet(seed=1), 1)
        store.commit()
    loaded = load(tmp_path)
    assert loaded.note == {"checkpoint": "learner.pt", "step": 7, "loss": 0.5}
    assert len(loaded) == 24


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda journal: Journal(5), r"directory=5 is no path .*: Journal\('replay'\)"),
        (lambda journal: Journal("x", stack=4), r"stack must be a Stack, got 4: .*Stack\(4\)"),
        (lambda journal: Journal("x", segment_rows=0), "segment_rows must be .*at least 1, got 0"),
        (lambda journal: journal.append(None), "batch must be a Batch, got None"),
        (lambda journal: journal.commit(keep="all"), "keep must be an integer, .*got 'all'"),
        (lambda journal: journal.commit(note=5), r"note must be a Mapping, got 5: .*\{'step': 7\}"),
        (
            lambda journal: journal.commit(state={1: None}),
            "state must be arrays of numbers by name",
        ),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_and_the_journal_goes_on(
    tmp_path: Path, call: Callable[[Journal], Any], message: str
) -> None:
    with closing(Journal(tmp_path)) as journal:
        with pytest.raises(ConfigError, match=message):
            call(journal)
        journal.append(Fleet().next()[0])
        journal.commit()
        assert journal.manifest.rows == 12


def test_settings_from_numpy_are_kept_too(tmp_path: Path) -> None:
    store = ReplayStore(np.int64(50), sampler=Prioritized(np.float32(0.5), np.float32(0.25)))  # type: ignore[arg-type]
    fill(store, Fleet(), 1)
    store.save(tmp_path)
    sampler = ReplayStore.load(tmp_path).sampler
    assert sampler.settings() == {"alpha": 0.5, "beta": 0.25, "epsilon": 1e-6}


def test_frames_are_written_once(tmp_path: Path) -> None:
    fleet = Fleet(Frames(), shards=1, envs=4, horizon=128, episode=1e9)
    sizes = []
    for name, stack in (("stacked", 4), ("plain", None)):
        with ReplayStore(5000, stack=stack, journal=tmp_path / name) as store:
            store.add(fleet.batch(fleet.rows(0)))
            store.commit()
            sizes.append(sum(path.stat().st_size for path in (tmp_path / name).glob("rows-*")))
    frames = 512 * 36
    assert sizes[1] - sizes[0] > 2.7 * frames  # of four, three are not written again


def test_observations_that_are_no_stacks_are_not_written_as_such(tmp_path: Path) -> None:
    fleet = Fleet(Frames(), shards=1, envs=4, horizon=8, episode=1e9)
    batch = fleet.batch(fleet.rows(0))
    noise = np.random.default_rng(0).integers(0, 255, batch.flat("obs").shape, np.uint8)
    with closing(Journal(tmp_path / "a", stack=Stack(4))) as journal:
        with pytest.raises(ConfigError, match="does not go on from the stack before it"):
            journal.append(changed(batch, obs=noise))
        journal.append(batch)
    with (
        closing(Journal(tmp_path / "b", stack=Stack(3))) as journal,
        pytest.raises(ConfigError, match="stack=3 frames along axis 0"),
    ):
        journal.append(batch)


# Another store's directory


def test_a_journal_of_another_store_is_refused(tmp_path: Path) -> None:
    with ReplayStore(500, journal=tmp_path) as store:
        fill(store, Fleet(), 3)
        store.commit()
        rows = files(tmp_path)
    with pytest.raises(ConfigError, match=r"capacity=500 .*, not capacity=400 .*ReplayStore\.load"):
        ReplayStore(400, journal=tmp_path)
    with pytest.raises(ConfigError, match=r"sampler=Uniform\(\.\.\.\), not .*sampler=Prioritized"):
        ReplayStore(500, sampler=Prioritized(), journal=tmp_path)
    with pytest.raises(SchemaMismatch, match=r"begun with stack=None, not Stack\(size=4"):
        ReplayStore(500, stack=4, journal=tmp_path)
    assert files(tmp_path) == rows
    ReplayStore(500, journal=tmp_path).close()


def test_a_journal_of_another_base_is_refused(tmp_path: Path) -> None:
    with ReplayStore(500, sampler=NStep(3, 0.9), journal=tmp_path) as store:
        fill(store, Fleet(), 3)
        store.commit()
    with pytest.raises(ConfigError, match=r"NStep\(\.\.\., base=Uniform\(\.\.\.\)\), not .*Priori"):
        ReplayStore(500, sampler=NStep(3, 0.9, Prioritized()), journal=tmp_path)
    loaded = ReplayStore.load(tmp_path, sampler=NStep(3, 0.9, Prioritized()))
    assert len(loaded.sample(9)["reward"]) == 9


def test_saving_into_the_own_journal_is_refused(tmp_path: Path) -> None:
    with ReplayStore(500, journal=tmp_path) as store:
        fill(store, Fleet(), 1)
        with pytest.raises(ConfigError, match=r"this store's journal: store\.commit\(\)"):
            store.save(str(tmp_path) + "/.")


def test_committing_without_a_journal_shows_how_to_have_one() -> None:
    with pytest.raises(ConfigError, match=r"keeps no journal: ReplayStore\(\.\.\., journal="):
        ReplayStore(10).commit()


def test_a_directory_of_another_process_is_refused_until_it_is_done(
    other: Do, tmp_path: Path
) -> None:
    pid = other("open", directory=str(tmp_path))
    store = ReplayStore(50)
    fill(store, Fleet(), 1)
    for attempt in (
        lambda: new_store(tmp_path),
        lambda: store.save(tmp_path),
        lambda: Journal(tmp_path),
        lambda: ReplayStore(50, directory=tmp_path),
    ):
        with pytest.raises(StoreInUse, match=rf"{tmp_path} is open in process {pid}; wait for it"):
            attempt()
    other("close", directory=str(tmp_path))
    store.save(tmp_path)


def test_a_closed_journal_touches_nothing_any_more(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.close()
    with ReplayStore(500, journal=tmp_path) as store:
        fill(store, Fleet(), 2)
        journal.close()  # what is being written is of another
        with pytest.raises(ClosedError):
            journal.commit()
        with pytest.raises(ClosedError):
            journal.append(Fleet().next()[0])
        store.commit()
    assert len(load(tmp_path)) == 24


# Damage


@pytest.fixture
def journaled(tmp_path: Path) -> tuple[Path, list[Row]]:
    """Four files of rows, and priorities."""
    fleet, rows = Fleet(shards=1), []
    with ReplayStore(500, sampler=Prioritized(), journal=tmp_path) as store:
        for _ in range(4):
            rows += fill(store, fleet, 2)
            store.commit()
        store.update_priorities(np.arange(96), np.arange(96))
        store.commit()
    return tmp_path, rows


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "cut": lambda content: content[:-7],
    "emptied": lambda content: b"",
    "altered": lambda content: content[:300] + bytes([content[300] ^ 1]) + content[301:],
    "extended": lambda content: content + b"\0",
    "missing": lambda content: None,
}


def harm(path: Path, damage: str) -> None:
    content = DAMAGE[damage](path.read_bytes())
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_rows_is_named_with_what_is_readable(
    damage: str, journaled: tuple[Path, list[Row]]
) -> None:
    directory, rows = journaled
    path = sorted(directory.glob("rows-*"))[1]
    harm(path, damage)
    before = files(directory)
    message = rf"{path} .*72 of 96 rows, in 3 of 4 files, are readable: .*skip_damaged=True\)"
    for attempt in (
        lambda: ReplayStore.load(directory),
        lambda: ReplayStore(500, sampler=Prioritized(), journal=directory),
    ):
        for _ in range(2):  # the lock is free again after an error
            with pytest.raises(StoreDamaged, match=message):
                attempt()
    assert files(directory) == before
    left = load(directory, skip_damaged=True)
    assert (len(left), left.stats.added_rows) == (72, 96)
    same(all_of(left), transitions(rows[:24] + rows[48:], Vector()))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_priorities_is_named_and_the_rows_are_readable(
    damage: str, journaled: tuple[Path, list[Row]]
) -> None:
    directory, rows = journaled
    (path,) = directory.glob("state-*")
    harm(path, damage)
    with pytest.raises(StoreDamaged, match=rf"{path} .*all 96 rows are readable, without their"):
        ReplayStore.load(directory)
    left = ReplayStore.load(directory, skip_damaged=True)
    assert set(left.sampler.state()["powers"].tolist()) == {1.0}
    check(load(directory, skip_damaged=True), rows)


def test_skipping_damage_where_there_is_none_loses_nothing(
    journaled: tuple[Path, list[Row]],
) -> None:
    directory, _ = journaled
    one, other = (ReplayStore.load(directory, skip_damaged=skip) for skip in (True, False))
    same(one.sampler.state(), other.sampler.state())
    same(one.sample(30), other.sample(30))


def test_what_is_left_of_a_damaged_journal_goes_on_in_a_new_one(
    journaled: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    directory, rows = journaled
    harm(sorted(directory.glob("rows-*"))[0], "cut")
    with ReplayStore.load(directory, skip_damaged=True, journal=tmp_path / "new") as store:
        store.commit()
    check(load(tmp_path / "new"), rows[24:])


def test_a_manifest_cut_off_leaves_the_journal_alone(journaled: tuple[Path, list[Row]]) -> None:
    directory, _ = journaled
    path = directory / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])
    before = files(directory)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=rf"{path} was altered or cut.*rows-00000000\.arrow"):
            new_store(directory)
    assert files(directory) == before


def test_a_disk_that_fills_up_keeps_the_last_commit_and_the_store_its_rows(tmp_path: Path) -> None:
    fleet = Fleet()
    store = ReplayStore(500, sampler=Prioritized(), journal=tmp_path, seed=0)
    rows = fill(store, fleet, 4)
    store.commit()
    before = files(tmp_path)
    with no_file_larger_than(800):
        for _ in range(3):  # with the first, the rest of the file; then the whole store again
            batch, more = fleet.next()
            rows += more
            with pytest.raises(StoreNotWritten, match=r"could not be written.*48 rows, is as it w"):
                _add_and_commit(store, batch)
    assert files(tmp_path) == before
    assert len(store) == len(rows)
    same(ReplayStore.load(tmp_path).sample(5), ReplayStore.load(tmp_path).sample(5))
    rows += fill(store, fleet, 2)
    store.commit()  # now there is room again: all rows count
    loaded = ReplayStore.load(tmp_path)
    assert loaded.stats == store.stats
    same(loaded.sample(30), store.sample(30))
    check(load(tmp_path), rows)
    rows += fill(store, fleet, 2)
    store.commit()
    check(load(tmp_path), rows)
    store.close()


def _add_and_commit(store: ReplayStore, batch: Batch) -> None:
    store.add(batch)
    store.commit()


@pytest.mark.parametrize("limit", [0, 100, 500, 1500, 3000, 5000])
def test_no_part_of_a_file_is_left_wherever_the_disk_ends(limit: int, tmp_path: Path) -> None:
    store = ReplayStore(500, sampler=Prioritized(), journal=tmp_path, seed=0)
    rows = fill(store, Fleet(), 1)
    store.commit()
    more = fill(store, Fleet(seed=1), 6)
    before = {name for name in files(tmp_path) if not name.endswith(".part")}
    with no_file_larger_than(limit), pytest.raises(StoreNotWritten):
        store.commit()
    assert files(tmp_path).keys() == before
    check(load(tmp_path), rows)
    store.commit()
    store.close()
    check(load(tmp_path), rows + more)


def test_a_manifest_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    with ReplayStore(500, journal=tmp_path) as store:
        rows = fill(store, Fleet(), 1)
        store.commit(text="short")
        before = files(tmp_path)
        rows += fill(store, Fleet(seed=1), 1)
        with no_file_larger_than(20_000), pytest.raises(StoreNotWritten, match="12 rows, is as"):
            store.commit(text="x" * 50_000)
        assert files(tmp_path) == before
        store.commit()
    loaded = load(tmp_path)
    assert loaded.note == {"text": "short"}
    check(loaded, rows)


def test_what_a_killed_writer_left_is_removed_and_rows_of_others_are_not(
    journaled: tuple[Path, list[Row]],
) -> None:
    directory, rows = journaled
    for name in ("rows-00000077.arrow", "state-00000078.arrow", "rows-00000079.arrow.part"):
        (directory / name).write_bytes(b"half")
    ReplayStore(500, sampler=Prioritized(), journal=directory).close()
    assert not [name for name in files(directory) if "7" in name]
    check(load(directory), rows)


def test_a_journal_without_a_commit_is_no_store(tmp_path: Path) -> None:
    Journal(tmp_path, stack=Stack(4)).close()
    with pytest.raises(StoreUnreadable, match=r"nothing was committed"):
        ReplayStore.load(tmp_path)
    ReplayStore(10, journal=tmp_path).close()


# Killed at any moment


def test_a_kill_at_any_moment_leaves_the_last_complete_state(other: Do, tmp_path: Path) -> None:
    reported = other("kill", directory=str(tmp_path), count=100, seed=0)
    assert len(reported) == 100
    assert max(reported) > 3  # they came far enough for something to be at stake
    for number, rounds in enumerate(reported):
        check_after_kill(tmp_path / str(number), number, rounds)


def test_a_kill_before_or_after_any_change_on_disk_leaves_a_complete_state(
    other: Do, tmp_path: Path
) -> None:
    reported = other("kill_at_steps", directory=str(tmp_path), rounds=2)
    assert len(reported) > 40
    for number, rounds in enumerate(reported):
        check_after_kill(tmp_path / str(number), number, rounds)


def check_after_kill(directory: Path, number: int, rounds: int) -> None:
    """Check that all that was reported is there, no more than what was in flight, and go on."""
    fleet = new_fleet(number)
    rows = [row for _ in range(rounds + 2) for row in fleet.next()[1]]
    found = rounds_in(directory)
    assert found in (rounds, rounds + 1)
    if found:
        check(load(directory), rows[: 12 * found])
    fleet = new_fleet(number)
    for _ in range(found):
        fleet.next()
    with new_store(directory) as store:
        assert store.stats.added_rows == 12 * found
        if found:
            indices = np.arange(store.stats.evicted_rows, 12 * found)
            powers = store.sampler.state()["powers"]
            np.testing.assert_allclose(powers, (errors(indices) + 1e-6) ** 0.6)
        one_round(store, fleet)
    check(load(directory), rows[: 12 * (found + 1)])
    shutil.rmtree(directory)


def rounds_in(directory: Path) -> int:
    if not (directory / "manifest.json").exists() or not read_manifest(directory).store:
        with pytest.raises(StoreUnreadable, match="holds no store"):
            ReplayStore.load(directory)
        return 0
    return int(read_manifest(directory).note["rounds"])
