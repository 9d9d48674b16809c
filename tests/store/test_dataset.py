"""Rows on disk as others read them: pyarrow, DuckDB, pandas, Minari."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import duckdb
import minari
import numpy as np
import pyarrow as pa
import pytest
from batches import Fleet, Frames, Row, TwoLeaves
from gymnasium import spaces

import clusterenv
from clusterenv import errors
from clusterenv.data.arrow import spec_of
from clusterenv.store import Journal, NStep, Stack, Uniform, open_snapshot
from clusterenv.store.dataset import episodes

KEY = ("run", "shard", "incarnation", "env", "episode", "step")
FORMAT3 = Path(__file__).parent / "journal" / "format3"
BOX = spaces.Box(-np.inf, np.inf, (6,), np.float32)


def written(fleet: Fleet, directory: Path, batches: int = 30, **options: object) -> list[Row]:
    journal = Journal(directory, **options)  # type: ignore[arg-type]
    rows: list[Row] = []
    for _ in range(batches):
        batch, new = fleet.next()
        journal.append(batch)
        rows += new
    journal.commit()
    journal.close()
    return rows


def whole(rows: list[Row]) -> list[list[Row]]:
    """Return the episodes that are there from their beginning to their end."""
    found: dict[tuple[int, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.key):
        found.setdefault(row.key[:-1], []).append(row)
    return [track for track in found.values() if track[-1].terminated or track[-1].truncated]


def test_every_row_is_there_once_with_its_provenance(tmp_path: Path) -> None:
    fleet = Fleet()
    rows = written(fleet, tmp_path)
    table = clusterenv.open_dataset(tmp_path).to_table()
    found = list(zip(*(table[name].to_pylist() for name in KEY), strict=True))
    assert sorted(found) == sorted(row.key for row in rows)
    by_key = {row.key: row for row in rows}
    assert table["reward"].to_pylist() == [by_key[key].reward for key in found]
    assert table["terminated"].to_pylist() == [by_key[key].terminated for key in found]


def test_next_obs_is_where_no_row_holds_it(tmp_path: Path) -> None:
    rows = written(Fleet(), tmp_path)
    found = clusterenv.open_dataset(tmp_path).to_table().to_pylist()
    keys = {row.key for row in rows}
    for row in found:
        key = tuple(row[name] for name in KEY)
        after = (*key[:-1], key[-1] + 1)
        if row["next_obs"] is not None:
            assert row["next_obs"] == [float(part) for part in after]
        else:
            assert after in keys


@pytest.mark.parametrize(
    ("content", "stack"), [(None, None), (TwoLeaves(), None), (Frames(), Stack(4))]
)
def test_obs_and_next_obs_are_of_one_type_and_nulls_take_no_space(
    tmp_path: Path, content: Any, stack: Stack | None
) -> None:
    fleet = Fleet() if content is None else Fleet(content)
    written(fleet, tmp_path, stack=stack)
    dataset = clusterenv.open_dataset(tmp_path)
    names = [name for name in dataset.schema.names if name.startswith("obs")]
    assert names
    for name in names:
        obs, after = dataset.schema.field(name), dataset.schema.field(f"next_{name}")
        assert obs.type == after.type
        assert obs.metadata == after.metadata
    table = dataset.to_table()
    for name in names:
        spec = spec_of(table.schema.field(name))
        after = table[f"next_{name}"]
        assert 0 < after.null_count < len(after)
        held = sum(len(chunk.values) for chunk in after.chunks)
        assert held == (len(after) - after.null_count) * spec.items
    (filled,) = duckdb.sql(
        f'select count(coalesce("next_{names[0]}", "{names[0]}")) from dataset'
    ).fetchall()
    assert filled == (dataset.count_rows(),)


def test_rows_of_a_format_before_have_the_same_types() -> None:
    for part in ("rows", "frames"):
        schema = clusterenv.open_dataset(FORMAT3 / part).schema
        assert schema.field("obs").type == schema.field("next_obs").type


def test_the_values_of_a_dataset_are_those_of_its_files(tmp_path: Path) -> None:
    written(Fleet(), tmp_path)
    (file,) = tmp_path.glob("rows-*.arrow")
    with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
        plain = stream.read_all()
    table = clusterenv.open_dataset(tmp_path).to_table()
    assert pa.types.is_fixed_size_list(plain.schema.field("obs").type)  # no offsets in messages
    assert table.to_pylist() == plain.to_pylist()


def test_columns_that_are_too_long_for_a_list_are_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = written(Fleet(), tmp_path)
    whole = clusterenv.open_dataset(tmp_path).to_table()
    monkeypatch.setattr("clusterenv.store.journal.snapshot.MOST_ITEMS", 6 * 5 + 1)
    parts = clusterenv.open_dataset(tmp_path)
    assert max(batch.num_rows for batch in parts.to_batches()) == 5
    assert parts.to_table().to_pylist() == whole.to_pylist()
    assert len(rows) == whole.num_rows


def test_duckdb_and_pandas_query_it(tmp_path: Path) -> None:
    rows = written(Fleet(TwoLeaves()), tmp_path)
    dataset = clusterenv.open_dataset(tmp_path)
    sql = 'select count(*), sum("obs.a"[2]) from dataset where env = 1'
    count, steps = duckdb.sql(sql).fetchall()[0]
    mine = [row for row in rows if row.env == 1]
    assert (count, steps) == (len(mine), sum(row.step for row in mine))
    frame = dataset.to_table(columns=["env", "reward"]).to_pandas()
    assert len(frame) == len(rows)


def test_files_that_are_missing_or_cut_are_named(tmp_path: Path) -> None:
    written(Fleet(), tmp_path)
    file = next(tmp_path.glob("rows-*.arrow"))
    whole_file = file.read_bytes()
    file.write_bytes(whole_file[:-10])
    with pytest.raises(errors.StoreDamaged, match=rf"{file.name} was cut.* bytes instead of"):
        clusterenv.open_dataset(tmp_path)
    with pytest.raises(errors.StoreDamaged, match=rf"{file.name} was cut"):
        clusterenv.open_dataset(tmp_path, checksums=False)
    file.unlink()
    with pytest.raises(errors.StoreDamaged, match=f"{file.name} is missing"):
        clusterenv.open_dataset(tmp_path)
    with pytest.raises(errors.StoreUnreadable, match="holds no store"):
        clusterenv.open_dataset(tmp_path / "nothing")


def test_a_run_names_the_store_that_lies_in_it(tmp_path: Path) -> None:
    written(Fleet(), tmp_path / "replay", batches=1)
    with pytest.raises(errors.StoreUnreadable, match=rf"there is one in {tmp_path}/replay"):
        clusterenv.open_dataset(tmp_path)


def test_an_altered_file_is_named_with_what_is_readable_unless_sizes_are_enough(
    tmp_path: Path,
) -> None:
    fleet = Fleet()
    for _ in range(3):
        written(fleet, tmp_path, 2)
    file = sorted(tmp_path.glob("rows-*.arrow"))[1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        errors.StoreDamaged,
        match=rf"{file} was altered.*48 of 72 rows, in 2 of 3 files, are readable: .*skip_damaged",
    ):
        clusterenv.open_dataset(tmp_path)
    assert clusterenv.open_dataset(tmp_path, checksums=False).count_rows() == 72
    assert len(clusterenv.ReplayStore.load(tmp_path, skip_damaged=True)) == 48


@pytest.mark.parametrize("tracks", [False, True])
def test_whole_episodes_come_back_with_their_final_observation(
    tmp_path: Path, tracks: bool
) -> None:
    fleet = Fleet(tracks=tracks)
    rows = written(fleet, tmp_path, 10)
    fleet.restart(0)
    rows += written(fleet, tmp_path, 20)
    wanted = whole(rows)
    found = list(episodes(open_snapshot(tmp_path)))
    assert len(found) == len(wanted) > 20
    for episode, track in zip(found, wanted, strict=True):
        last = track[-1]
        steps = np.array([row.key for row in track] + [list(last.after)], np.float32)
        assert np.array_equal(episode.observations["obs"], steps)
        assert episode.rewards.tolist() == [row.reward for row in track]
        assert (episode.terminated, episode.truncated) == (last.terminated, last.truncated)


@pytest.mark.filterwarnings("ignore:.*is set to None:UserWarning")
@pytest.mark.filterwarnings("ignore:env_spec is None:UserWarning")
def test_minari_loads_what_was_written_images_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    fleet = Fleet(Frames())
    rows = written(fleet, tmp_path / "rows", stack=Stack(4))
    clusterenv.to_minari(
        tmp_path / "rows",
        "test/frames-v0",
        observation_space=spaces.Box(0, 255, (4, 6, 6), np.uint8),
        action_space=spaces.Discrete(5),
    )
    wanted = whole(rows)
    loaded = minari.load_dataset("test/frames-v0")
    assert loaded.total_episodes == len(wanted)
    for episode, track in zip(loaded.iterate_episodes(), wanted, strict=True):
        stacks = [fleet.content.at(row, row.step)["obs"] for row in track]
        stacks.append(fleet.content.at(track[-1], track[-1].step + 1)["obs"])
        assert np.array_equal(episode.observations, np.stack(stacks))
        assert episode.actions.tolist() == [row.action for row in track]
        assert episode.terminations.tolist()[-1] == track[-1].terminated


def test_to_minari_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(Fleet(episode=1e9), tmp_path, 3)
    with pytest.raises(errors.ConfigError, match="env='CartPole-v1'"):
        clusterenv.to_minari(tmp_path, "test/x-v0")
    with pytest.raises(errors.EmptyStore, match="no whole episode"):
        clusterenv.to_minari(
            tmp_path, "test/x-v0", observation_space=BOX, action_space=spaces.Discrete(5)
        )
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(errors.ConfigError, match=r"pip install 'clusterenv\[minari\]'"):
        clusterenv.to_minari(tmp_path, "test/x-v0", env="CartPole-v1")


@pytest.mark.parametrize(
    ("observations", "actions", "message"),
    [
        (
            spaces.Dict(a=BOX),
            spaces.Discrete(5),
            r"observation_space=Dict.* has obs\.a of shape \(6,",
        ),
        (
            spaces.Box(0, 1, (4,)),
            spaces.Discrete(5),
            r"obs of shape \(4,\) .* obs of shape \(6,\);",
        ),
        (BOX, spaces.Box(0, 1, (2,)), r"action_space=Box.* action of shape \(2,\) .* shape \(\);"),
        (BOX, spaces.Dict(a=spaces.Discrete(5)), r"has action\.a of shape .* have action of shape"),
    ],
)
def test_to_minari_says_which_space_the_rows_are_not_of(
    tmp_path: Path, observations: spaces.Space, actions: spaces.Space, message: str
) -> None:
    written(Fleet(), tmp_path)
    with pytest.raises(errors.ConfigError, match=rf"{message}.*env='CartPole-v1'"):
        clusterenv.to_minari(
            tmp_path, "test/x-v0", observation_space=observations, action_space=actions
        )


@pytest.mark.filterwarnings("ignore:.*is set to None:UserWarning")
@pytest.mark.filterwarnings("ignore:env_spec is None:UserWarning")
@pytest.mark.parametrize("by_id", [True, False])
def test_episodes_come_back_from_minari_and_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_id: bool
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    rows = written(Fleet(TwoLeaves()), tmp_path / "rows")
    before = list(episodes(open_snapshot(tmp_path / "rows")))
    observed = {name: column.shape[1:] for name, column in before[0].observations.items()}
    made = clusterenv.to_minari(
        tmp_path / "rows",
        "test/back-v0",
        observation_space=spaces.Dict(
            {
                name.removeprefix("obs."): spaces.Box(
                    -np.inf, np.inf, shape, before[0].observations[name].dtype.type
                )
                for name, shape in observed.items()
            }
        ),
        action_space=spaces.Discrete(5),
    )
    dataset = "test/back-v0" if by_id else made
    count = clusterenv.from_minari(dataset, tmp_path / "back")
    assert count == sum(len(track) for track in whole(rows))
    after = list(episodes(open_snapshot(tmp_path / "back")))
    assert len(after) == len(before) > 20
    for one, other in zip(before, after, strict=True):
        for name in one.observations:
            assert np.array_equal(one.observations[name], other.observations[name])
        assert np.array_equal(one.actions, other.actions)
        assert np.array_equal(one.rewards, other.rewards)
        assert (one.terminated, one.truncated) == (other.terminated, other.truncated)

    sampler = NStep(3, 0.9, Uniform(replace=False))
    with clusterenv.ReplayStore.load(tmp_path / "back", sampler=sampler) as store:
        assert len(store) == count
        sample = store.sample(count)
        ends = sample["terminated"] | sample["truncated"]
        # A return is shorter than three steps only where an episode ends.
        assert ends[sample["discount"] > 0.9**3 + 1e-6].all()
    assert clusterenv.from_minari(dataset, tmp_path / "back") == count  # more rows
    assert clusterenv.open_dataset(tmp_path / "back").count_rows() == 2 * count


def test_from_minari_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    with pytest.raises(errors.ConfigError, match=r"cannot load 'test/none-v0'.*download_dataset"):
        clusterenv.from_minari("test/none-v0", tmp_path / "rows")
    with pytest.raises(errors.ConfigError, match=r"dataset must be a MinariDataset, got 3"):
        clusterenv.from_minari(3, tmp_path / "rows")  # type: ignore[arg-type]
    assert not (tmp_path / "rows").exists()
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(errors.ConfigError, match=r"pip install 'clusterenv\[minari\]'"):
        clusterenv.from_minari("test/none-v0", tmp_path / "rows")
