"""Several collectors, one store: each row has one name, and only its own rows follow it."""

from __future__ import annotations

import random
from pathlib import Path

import gymnasium as gym
import minari
import numpy as np
import pandas as pd
import pytest
import torch
from batches import Fleet, Row, Vector, all_of, observations, same, transitions
from distributed import Client
from stores import n_step
from worlds import Labelled

import clusterenv
from clusterenv import Batch
from clusterenv.data.seeds import new_run_id
from clusterenv.store import Journal, NStep, ReplayStore, Uniform, open_snapshot
from clusterenv.store.dataset import episodes

NAME = ["run", "shard", "incarnation", "env", "episode", "step"]


def store_of(capacity: int, **options: object) -> ReplayStore:
    return ReplayStore(capacity, sampler=Uniform(replace=False), **options)  # type: ignore[arg-type]


def table_of(directory: Path) -> pd.DataFrame:
    """Return all rows on disk with their next observations, as the page on replay says."""
    track = NAME[:-1]
    frame = clusterenv.open_dataset(directory).to_table().to_pandas().sort_values([*track, "step"])
    following = frame.groupby(track)["obs"].shift(-1)
    frame["next_obs"] = frame["next_obs"].fillna(following)
    return frame


def test_a_run_has_a_number_that_grows_and_that_no_seed_repeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_2100, found = 4_102_444_800_000, list[int]()
    for milliseconds in range(in_2100, in_2100 + 20):
        monkeypatch.setattr("time.time_ns", lambda now=milliseconds: now * 1_000_000)
        random.seed(1)
        torch.manual_seed(1)
        found.append(new_run_id())
    assert found == sorted(set(found))
    assert [number >> 21 for number in found] == list(range(in_2100, in_2100 + 20))
    assert len({number % 2**21 for number in found}) > 1
    assert 0 < found[-1] < 2**63


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_several_collectors_are_never_joined(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = {"shards": 2, "envs": 3, "horizon": 4, "episode": float(rng.choice([4, 1e9]))}
    tracks = bool(seed % 2)
    fleets = [Fleet(seed=seed, run=run, tracks=tracks, **shape) for run in range(3)]  # type: ignore[arg-type]
    store, added = store_of(150, side=1.0), list[Row]()
    for _ in range(40):
        batch, rows = fleets[int(rng.integers(3))].next()
        if rng.random() < 0.2:
            continue  # a fragment that never arrived
        store.add(batch)
        added += rows
        same(all_of(store), transitions(added[-len(store) :], Vector()))


@pytest.mark.parametrize("n", [2, 5])
def test_returns_of_n_steps_go_on_across_fragments_while_collectors_take_turns(n: int) -> None:
    fleets = [Fleet(seed=3, run=run, shards=1, horizon=2, episode=20) for run in (1, 2)]
    store = ReplayStore(96, sampler=NStep(n, 0.9, Uniform(replace=False)))
    added: list[Row] = []
    for turn in range(30):
        batch, rows = fleets[turn % 2].next()
        store.add(batch)
        added += rows
    there = added[-len(store) :]
    found, expected = all_of(store), [n_step(there, at, n, 0.9) for at in range(len(there))]
    np.testing.assert_allclose(found["reward"], [total for total, _, _ in expected], 1e-5, 1e-6)
    np.testing.assert_allclose(found["discount"], [0.9**steps for _, _, steps in expected], 1e-6)
    same({"obs": found["next_obs"]}, observations([row for _, row, _ in expected], Vector(), 1))
    assert sum(steps == n for _, _, steps in expected) > len(there) / 2


def test_fragments_of_one_collector_share_observations_while_another_feeds_the_store() -> None:
    fleets = [Fleet(run=run, shards=1, envs=2, horizon=3, episode=1e9) for run in (1, 2)]
    store = store_of(100)
    for turn in range(6):
        store.add(fleets[turn % 2].next()[0])
    assert store._buffer.ring is not None
    ends = np.arange(36).reshape(6, 6)[:-2, -2:].ravel()  # of all fragments that have another
    assert store._buffer.ring.next[ends].tolist() == (ends + 8).tolist()


def test_a_resumed_run_whose_first_batch_was_dropped_is_not_joined(tmp_path: Path) -> None:
    first, second = (Fleet(run=run, shards=1, envs=2, horizon=3, episode=1e9) for run in (1, 2))
    with store_of(100, journal=tmp_path) as store:
        batch, rows = first.next()
        store.add(batch)
        store.commit()
    with store_of(100, journal=tmp_path) as store:
        second.next()  # lost on its way, and so the next goes on with the first run's steps
        batch, more = second.next()
        store.add(batch)
        same(all_of(store), transitions(rows + more, Vector()))


@pytest.mark.parametrize("way", ["journal", "save"])
def test_rows_keep_their_run_through_files(tmp_path: Path, way: str) -> None:
    fleets = [Fleet(seed=run, run=new_run_id() + run, episode=5) for run in range(2)]
    store, added = store_of(60, journal=tmp_path / "a" if way == "journal" else None), list[Row]()
    for turn in range(12):
        batch, rows = fleets[turn % 2].next()
        store.add(batch)
        added += rows
    if way == "journal":
        store.commit()
    else:
        store.save(tmp_path / "a")
    with store, ReplayStore.load(tmp_path / "a") as loaded:
        loaded.save(tmp_path / "b")
    frame = table_of(tmp_path / "b")
    there = sorted(added[-len(frame) :], key=lambda row: row.key)
    assert list(frame[NAME].itertuples(index=False, name=None)) == [row.key for row in there]
    assert frame["run"].dtype == np.int64


def test_a_journal_of_two_runs_has_one_name_for_each_row_and_whole_episodes(tmp_path: Path) -> None:
    added: list[Row] = []
    for run in (1, 2):  # with the same seed: episodes end alike, and names differ by the run alone
        fleet, journal = Fleet(run=run), Journal(tmp_path)
        for _ in range(20):
            batch, rows = fleet.next()
            journal.append(batch)
            added += rows
        journal.commit()
        journal.close()
    frame = table_of(tmp_path)
    rows = sorted(added, key=lambda row: row.key)
    assert list(frame[NAME].itertuples(index=False, name=None)) == [row.key for row in rows]
    following = np.array([row.after for row in rows], np.float32)
    np.testing.assert_array_equal(np.stack(frame["next_obs"].to_list()), following)
    ends = [row for row in rows if row.terminated or row.truncated]
    found = list(episodes(open_snapshot(tmp_path)))
    assert [tuple(episode.observations["obs"][-1]) for episode in found] == [r.after for r in ends]
    assert all((np.diff(episode.observations["obs"][:, -1]) == 1).all() for episode in found)


# Of a cluster


def collecting(client: Client, seed: int) -> clusterenv.Collector:
    policy = clusterenv.policies.Random(gym.spaces.Discrete(2))
    options = {"num_envs": 2, "horizon": 8, "shards": 1, "cluster": client}
    return clusterenv.Collector(Labelled, policy, seed=seed, **options)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*is set to None:UserWarning")
@pytest.mark.filterwarnings("ignore:env_spec is None:UserWarning")
def test_collectors_feed_one_journal_at_once_and_after_it_was_closed(
    client: Client, leaves_nothing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row says which seed, episode and step it is: so must what follows it."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    rows, batches, runs = tmp_path / "rows", list[Batch](), list[int]()
    with (
        store_of(1_000, journal=rows) as store,
        collecting(client, 100) as first,
        collecting(client, 200) as second,
    ):
        runs += first.run, second.run
        for _, pair in zip(range(10), zip(first, second, strict=True), strict=False):
            for batch in pair:
                store.add(batch)
                batches.append(batch)
        store.commit()
    with store_of(1_000, journal=rows) as store, collecting(client, 300) as third:
        runs.append(third.run)
        stream = iter(third)
        next(stream)  # dropped
        for _ in range(10):
            batches.append(next(stream))
            store.add(batches[-1])
        store.commit()
        sample = all_of(store)
    assert runs == sorted(set(runs))
    assert {batch.run for batch in batches} == set(runs)

    after = np.array([0, 0, 1], np.float32)
    np.testing.assert_array_equal(sample["next_obs"], sample["obs"] + after)
    frame = table_of(rows)
    assert len(frame) == sum(batch.num_rows for batch in batches)
    assert not frame.duplicated(NAME).any()
    assert frame["run"].unique().tolist() == runs
    obs = np.stack(frame["obs"].to_list())
    np.testing.assert_array_equal(np.stack(frame["next_obs"].to_list()), obs + after)
    tracks = frame.groupby(NAME[:-1])
    whole = int((tracks["terminated"].any() & (tracks["step"].min() == 0)).sum())
    assert whole > 60
    space = {"observation_space": Labelled.observation_space, "action_space": Labelled.action_space}
    clusterenv.to_minari(rows, "test/runs-v0", **space)  # type: ignore[arg-type]
    loaded = minari.load_dataset("test/runs-v0")
    assert loaded.total_episodes == whole
    for episode in loaded.iterate_episodes():
        seed, number, _ = episode.observations[0]
        assert episode.observations.tolist() == [[seed, number, step] for step in range(6)]
