"""Links, FIFOs and directories that others put where a store has its files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import Fleet, fill

import clusterenv
from clusterenv.errors import ClusterEnvError, StoreDamaged, StoreNotWritten, StoreUnreadable
from clusterenv.store import Journal, Prioritized, ReplayStore
from pipelines.experiment.run_directory import RunDirectory
from pipelines.ppo import PPO
from pipelines.tools.inspection import describe


def saved(directory: Path) -> ReplayStore:
    """Save a store with rows and priorities."""
    store = ReplayStore(101, sampler=Prioritized())
    fill(store, Fleet(), 3)
    store.save(directory)
    return store


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that must stay as it is."""
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


WRITERS: dict[str, Callable[[Path], Any]] = {
    "journal": lambda directory: Journal(directory),
    "store": lambda directory: ReplayStore(101, journal=directory),
    "columns": lambda directory: ReplayStore(101, directory=directory),
    "save": lambda directory: ReplayStore(101).save(directory),
}
READERS: dict[str, Callable[[Path], Any]] = {
    "load": ReplayStore.load,
    "open_dataset": clusterenv.open_dataset,
    "journal": lambda directory: ReplayStore(101, sampler=Prioritized(), journal=directory),
    "inspect": describe,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_link_instead_of_the_lock_is_not_followed(
    write: Callable[[Path], Any], tmp_path: Path, victim: Path
) -> None:
    directory = tmp_path / "store"
    directory.mkdir()
    for target in (victim, tmp_path / "nothing"):
        (directory / "lock").symlink_to(target)
        with pytest.raises(StoreUnreadable, match=rf"symbolic link.*{directory / 'lock'}"):
            write(directory)
        (directory / "lock").unlink()
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()
    os.mkfifo(directory / "lock")
    with pytest.raises(StoreUnreadable, match=rf"not a regular file.*{directory / 'lock'}"):
        write(directory)


def test_a_lock_with_another_name_is_not_written(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "lock").hardlink_to(victim)
    Journal(tmp_path / "store").close()
    assert victim.read_text() == "precious"


def test_links_where_files_are_written_are_replaced(tmp_path: Path, victim: Path) -> None:
    fleet, directory = Fleet(), tmp_path / "store"
    with ReplayStore(101, sampler=Prioritized(), journal=directory) as store:
        names = [f"{kind}-{n:08d}.arrow" for kind in ("rows", "state") for n in range(3)]
        for name in [*names, "manifest.json"]:
            (directory / f"{name}.part").symlink_to(victim)
        for _ in range(2):
            fill(store, fleet, 1)
            store.commit()
    assert victim.read_text() == "precious"
    assert len(ReplayStore.load(directory)) == 24
    assert not [path for path in directory.iterdir() if path.is_symlink()]


def test_a_directory_where_a_file_is_to_be_is_an_error_and_what_was_there_stays(
    tmp_path: Path,
) -> None:
    store = saved(tmp_path)
    for name in ("rows-00000007.arrow.part", "manifest.json.part"):
        (tmp_path / name).mkdir()
    with pytest.raises(StoreNotWritten, match=r"manifest\.json\.part"):
        store.save(tmp_path)
    assert len(ReplayStore.load(tmp_path)) == len(store)


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_link(path: Path) -> None:
    """Move a file elsewhere, and leave a link."""
    elsewhere = path.parent.with_name("elsewhere")
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.timeout(20)  # a FIFO must not be waited for
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("name", ["manifest.json", "rows-*", "state-*"])
@pytest.mark.parametrize("replace", [make_fifo, make_link, make_directory])
def test_only_regular_files_are_read(
    replace: Callable[[Path], None], name: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    directory = tmp_path / "store"
    saved(directory)
    (path,) = directory.glob(name)
    replace(path)
    said = "symbolic link" if path.is_symlink() else "not a regular file"
    if name == "state-*" and read in (clusterenv.open_dataset, describe):  # they need none
        read(directory)
    elif read is describe and name == "rows-*":
        assert f"damaged: {path.name}" in dict(read(directory))["health"]
    elif read is describe and not path.is_symlink():
        with pytest.raises(ClusterEnvError, match="holds no run and no store"):
            read(directory)
    else:
        kind = StoreUnreadable if name == "manifest.json" else StoreDamaged
        with pytest.raises(kind, match=rf"{path} cannot be read: .*{said}"):
            read(directory)


def test_a_directory_of_a_store_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to("there")
    saved(tmp_path / "here")
    assert len(ReplayStore.load(tmp_path / "here")) == 36
    with ReplayStore(101, directory=tmp_path / "here") as store:
        fill(store, Fleet(), 1)


# Columns in files


def test_a_link_instead_of_the_columns_is_not_followed(tmp_path: Path, victim: Path) -> None:
    directory = tmp_path / "store"
    ReplayStore(101, directory=directory).close()
    for target in (tmp_path, tmp_path / "nothing"):
        (directory / "columns").symlink_to(target)
        for _ in range(2):  # the lock is free again
            with pytest.raises(StoreUnreadable, match=rf"{directory}/columns cannot be made"):
                ReplayStore(101, directory=directory)
        (directory / "columns").unlink()
    assert sorted(tmp_path.iterdir()) == [directory, victim]


def test_columns_stay_in_the_directory_that_the_store_made(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "obs").write_text("precious")
    with ReplayStore(101, directory=tmp_path / "store") as store:
        columns = tmp_path / "store" / "columns"
        columns.rename(tmp_path / "moved")
        columns.symlink_to(other)
        fill(store, Fleet(), 2)
        assert len(store.sample(8)["obs"]) == 8
    assert [path.name for path in other.iterdir()] == ["obs"]
    assert (other / "obs").read_text() == "precious"


# Runs


def test_links_where_a_run_writes_are_replaced(tmp_path: Path, victim: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    for name in ("learner-1", "run", "config", "policy"):
        (out / f"{name}.tmp").symlink_to(victim)
    run = RunDirectory(PPO.preset("CartPole-v1", out=out), "ppo", ())
    run.begin({"learner": "ppo", "options": {}})
    run.commit({"weight": torch.ones(2)}, None)
    run.close()
    assert victim.read_text() == "precious"
    assert run.load()["weight"].tolist() == [1, 1]
