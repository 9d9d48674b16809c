"""``Batch``: views of Arrow memory, and files that others open."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pytest
import torch
from agents import Counter, Cycle
from batches import Content, Fleet, Frames, TwoLeaves, as_batch, changed, observations
from compare import assert_same
from sealed import ORIGIN, expected, fragment, sealed
from worlds import SPACES, World

from clusterenv import Batch, Rollout
from clusterenv.data.arrow import from_arrow
from clusterenv.data.fragment_decoder import FragmentDecoder
from clusterenv.data.fragment_encoder import FragmentEncoder
from clusterenv.data.spaces import Layout
from clusterenv.errors import ConfigError
from clusterenv.simulation.engines import build
from clusterenv.simulation.engines.base import Recipe
from clusterenv.simulation.loop import EnvLoop
from clusterenv.simulation.policy_runner import Acting


def batch_of(**columns: Any) -> Batch:
    rows = 6
    base = {
        "obs": np.arange(rows * 8, dtype=np.float32).reshape(rows, 2, 4),
        "action": np.arange(rows),
        "reward": np.linspace(0, 1, rows, dtype=np.float32),
        "terminated": np.array([True, False, False, True, True, False]),
        "env": np.tile(np.arange(2, dtype=np.int32), 3),
    }
    return Batch(
        {**base, **columns},
        2,
        tail_rows=np.array([0, 3, 4, 5]),
        tail={"obs": np.zeros((4, 2, 4), np.float32)},
        state={},
        run=5,
        shard=1,
        incarnation=0,
        policy_version=7,
    )


def test_columns_are_views_shaped_by_time_and_env() -> None:
    source = np.arange(48, dtype=np.float32).reshape(6, 2, 4)
    batch = batch_of(obs=source)
    assert batch["obs"].shape == (3, 2, 2, 4)
    assert np.shares_memory(batch["obs"], source)
    values = batch.record_batch.column(0).flatten()
    assert values.buffers()[1].address == source.ctypes.data
    assert np.shares_memory(batch.torch()["obs"].numpy(), source)
    assert np.shares_memory(batch.torch().tail["obs"].numpy(), batch.tail["obs"])
    assert batch["reward"].shape == (3, 2)
    assert batch["terminated"].tolist() == [[True, False], [False, True], [True, False]]
    assert batch["terminated"].dtype == np.bool_
    assert (batch.horizon, batch.num_envs, batch.num_rows) == (3, 2, 6)


@pytest.mark.parametrize("content", [None, TwoLeaves(), Frames()])
@pytest.mark.parametrize("tracks", [False, True])
def test_the_next_observation_of_every_row_is_the_true_one(
    content: Content | None, tracks: bool
) -> None:
    fleet = Fleet(content, episode=3, tracks=tracks, shards=1, horizon=7)
    for _ in range(10):
        batch, rows = fleet.next()
        expected = observations(rows, fleet.content, ahead=1)
        found = batch.next_obs()
        tensors = batch.torch().next_obs()
        assert found.keys() == tensors.keys() == expected.keys()
        for name, column in expected.items():
            shaped = column.reshape(7, 3, *column.shape[1:])
            assert_same(found[name], shaped)
            assert_same(tensors[name].numpy(), shaped)


def test_a_batch_is_numpy_in_all_its_parts_and_torch_turns_all_of_it() -> None:
    batch, _ = Fleet(state=True).next()
    words = np.array(["go"] * batch.num_rows, object)
    batch = changed(batch, **{"obs.mission": words})
    assert batch["obs.mission"].tolist() == [["go"] * 3] * 4
    rollout = batch.torch()
    assert isinstance(rollout, Rollout)
    assert rollout.columns.keys() == {*batch.names} - {"obs.mission"}  # text has no tensor form
    for name, tensor in rollout.columns.items():
        assert_same(tensor.numpy(), batch[name])
    assert_same(rollout.tail_rows.numpy(), batch.tail_rows)
    for ours, theirs in ((rollout.tail, batch.tail), (rollout.state, batch.state)):
        assert ours.keys() == theirs.keys()
        for name, column in theirs.items():
            assert_same(ours[name].numpy(), column)


@pytest.mark.parametrize("dtype", ["u1", "i1", "i4", "i8", "f4", "f8", "?"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_every_dtype_and_shape_survives(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 2, (6, *shape)).astype(dtype)
    batch = batch_of(extra=values)
    assert_same(batch["extra"].reshape(6, *shape), values)
    written = written_and_read(batch.record_batch)
    assert_same(from_arrow(written.schema.field("extra"), written.column("extra")), values)


@pytest.mark.parametrize("space", ["box", "box64", "image", "discrete", "nested", "multibinary"])
def test_the_schema_is_the_documented_one(space: str) -> None:
    """The table of docs/collecting.md: it follows from the spaces alone."""
    loop = EnvLoop(build(Recipe(World, {"obs": space}), 0, 2), Cycle(5, start=2), 0, 4, [1, 2])
    batch = as_batch(loop.fragment(Acting(0, {})))
    fields = {field.name: field for field in batch.record_batch.schema}
    for leaf in Layout(SPACES[space]).leaves:
        field, kind = fields.pop(leaf.name("obs")), pa.from_numpy_dtype(leaf.dtype)
        if leaf.shape:
            assert field.type == pa.list_(kind, int(np.prod(leaf.shape)))
            assert json.loads(field.metadata[b"shape"]) == list(leaf.shape)
        else:
            assert field.type == kind
        assert fields.pop(leaf.name("next_obs")).type == pa.list_(kind)
    assert {name: str(field.type) for name, field in fields.items()} == {
        "action": "int64",
        "reward": "float",
        "terminated": "bool",
        "truncated": "bool",
        "env": "int32",
        "episode": "int32",
        "step": "int32",
        "version": "int32",
        "twice": "float",
        "run": "int64",
        "shard": "int32",
        "incarnation": "int32",
    }


def written_and_read(batch: pa.RecordBatch) -> pa.RecordBatch:
    out = pa.BufferOutputStream()
    with pa.ipc.new_file(out, batch.schema) as writer:
        writer.write(batch)
    return pa.ipc.open_file(out.getvalue()).get_batch(0)


def test_an_unknown_column_is_named_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="no column 'rewards'; there are obs, action, reward"):
        batch_of()["rewards"]


def test_a_written_batch_opens_with_arrow_pandas_and_duckdb(tmp_path: Path) -> None:
    batch = batch_of()
    path = tmp_path / "rows.arrow"
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, batch.record_batch.schema) as out,
    ):
        out.write(batch.record_batch)
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    metadata = table.schema.metadata
    assert [metadata[name] for name in (b"run", b"shard", b"incarnation")] == [b"5", b"1", b"0"]
    assert table["reward"].to_pylist() == pytest.approx(np.linspace(0, 1, 6).tolist())
    assert len(table["obs"][0].as_py()) == 8
    pandas = pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["terminated"].tolist() == [True, False, False, True, True, False]
    duckdb = pytest.importorskip("duckdb")
    query = (
        "select env, sum(reward), count(*) filter (terminated) from table group by env order by env"
    )
    assert [row[2] for row in duckdb.sql(query.replace(" table ", " frame ")).fetchall()] == [2, 1]
    arrow = duckdb.sql(query.replace(" table ", " rows "), connection=_register(duckdb, table))
    assert [row[2] for row in arrow.fetchall()] == [2, 1]


def _register(duckdb: Any, table: pa.Table) -> Any:
    connection = duckdb.connect()
    connection.register("rows", table)
    return connection


def test_a_pickled_batch_holds_its_columns_once() -> None:
    schema, body = sealed(FragmentEncoder(ORIGIN), fragment())
    assert schema is not None
    batch = FragmentDecoder(schema, expected()).decode(body, policy_version=7)
    found = pickle.loads(pickle.dumps(batch))
    assert found.sealed is None
    assert found.record_batch.equals(batch.record_batch)
    assert found.names == batch.names
    assert_same({n: found.flat(n) for n in found.names}, {n: batch.flat(n) for n in batch.names})


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_a_rollout_splits_by_environment_with_its_tails_and_state(parts: int) -> None:
    recipe = Recipe(gym.spec("CartPole-v1"), {})
    loop = EnvLoop(build(recipe, 0, 5), Counter(), 0, 16, [3 + i for i in range(5)])
    loop.fragment(Acting(0, {}))
    fragment = loop.fragment(Acting(0, {}))
    whole = as_batch(fragment).torch()
    split = whole.split(parts)
    assert len(split) == parts
    envs = [part["reward"].shape[1] for part in split]
    assert sum(envs) == 5
    assert max(envs) - min(envs) <= 1
    for name in whole.columns:
        assert torch.equal(torch.cat([part[name] for part in split], 1), whole[name])
    following = [part.next_obs()["obs"] for part in split]
    assert torch.equal(torch.cat(following, 1), whole.next_obs()["obs"])
    counts = torch.cat([part.state["count"] for part in split])
    assert torch.equal(counts, whole.state["count"])
    assert sum(len(part.tail_rows) for part in split) == len(whole.tail_rows) > 5


def test_a_rollout_does_not_split_the_time_of_an_environment() -> None:
    with pytest.raises(ConfigError, match=r"2 environments cannot be split into 3 .*: split\(2\)"):
        batch_of().torch().split(3)
