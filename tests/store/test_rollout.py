"""The on-policy store: every accepted row once, in its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from clusterenv import Batch
from clusterenv.errors import ConfigError, EmptyStore, StaleBatch
from clusterenv.store import RolloutStore


def fragment(
    horizon: int = 3,
    num_envs: int = 2,
    first_env: int = 0,
    ended: list[int] | None = None,
    columns: dict[str, np.ndarray] | None = None,
    **more: Any,
) -> Batch:
    """Rows that contain their origin: ``obs`` is (time, global env)."""
    time, env = np.mgrid[:horizon, first_env : first_env + num_envs].astype(np.float32)
    shaped = {
        "obs": np.stack([time, env], -1),
        "reward": 100 * time + env,
        "action": np.ones((horizon, num_envs), np.int64),
        "terminated": np.zeros((horizon, num_envs), np.bool_),
        **(columns or {}),
    }
    rows = horizon * num_envs
    flat = {name: array.reshape(rows, *array.shape[2:]) for name, array in shaped.items()}
    tail_rows = np.array(sorted({*(ended or []), *range(rows - num_envs, rows)}), np.int64)
    return Batch(
        flat,
        num_envs,
        tail_rows=tail_rows,
        tail={"obs": flat["obs"][tail_rows] + np.float32(0.5)},
        **{"state": {}, "run": 0, "shard": 0, "incarnation": 0, "policy_version": 0, **more},
    )


def test_fragments_lie_side_by_side_in_the_order_of_the_shards() -> None:
    store = RolloutStore()
    store.add(fragment(first_env=2, num_envs=3, shard=1), newest_version=0)
    store.add(fragment(first_env=0, num_envs=2, shard=0), newest_version=0)
    assert store.rows == 15
    rollout = store.take()
    assert rollout["obs"].shape == (3, 5, 2)
    assert rollout["reward"].tolist() == [[100 * t + e for e in range(5)] for t in range(3)]
    assert rollout["action"].dtype == torch.int64


def test_two_fragments_of_one_shard_stay_in_the_order_of_arrival() -> None:
    store = RolloutStore()
    for first_env, incarnation in [(6, 1), (0, 0), (3, 0)]:
        store.add(fragment(first_env=first_env, num_envs=1, incarnation=incarnation), 0)
    assert store.take()["reward"][0].tolist() == [0, 3, 6]


def test_tail_rows_point_at_the_same_rows_after_joining() -> None:
    store = RolloutStore()
    # Row 3 of 2 environments is (time 1, env 1); row 1 of 3 is (time 0, env 1 there, 3 in all).
    store.add(fragment(first_env=2, num_envs=3, shard=1, ended=[1]), 0)
    store.add(fragment(first_env=0, num_envs=2, shard=0, ended=[3]), 0)
    rollout = store.take()
    assert sorted(rollout.tail_rows.tolist()) == [3, 6, 10, 11, 12, 13, 14]
    assert rollout.tail_rows.dtype == torch.int64
    # Each true next observation still belongs to its row.
    obs = rollout["obs"].flatten(0, 1)
    assert torch.equal(obs[rollout.tail_rows] + 0.5, rollout.tail["obs"])


def test_next_observations_of_a_rollout_are_those_of_its_batches() -> None:
    store = RolloutStore()
    batches = [fragment(num_envs=2, ended=[3]), fragment(first_env=2, num_envs=3, shard=1)]
    for batch in batches:
        store.add(batch, 0)
    expected = np.concatenate([batch.next_obs()["obs"] for batch in batches], 1)
    assert np.array_equal(store.take().next_obs()["obs"].numpy(), expected)


def test_state_is_joined_along_the_environments() -> None:
    store = RolloutStore()
    for shard, value in [(1, 5.0), (0, 4.0)]:
        store.add(fragment(shard=shard, state={"h": np.full((2, 8), value, np.float32)}), 0)
    state = store.take().state["h"]
    assert state.shape == (4, 8)
    assert state[:, 0].tolist() == [4, 4, 5, 5]


def test_every_row_is_handed_out_once() -> None:
    store = RolloutStore()
    for first_env in (0, 2):
        store.add(fragment(first_env=first_env), 0)
    first = store.take()
    assert store.rows == 0
    store.add(fragment(first_env=4), 0)
    second = store.take()
    seen = torch.cat([first["reward"].flatten(), second["reward"].flatten()])
    assert len(seen) == len(seen.unique()) == 18
    assert (store.stats.accepted_rows, store.stats.taken_rows) == (18, 18)


def test_a_rollout_owns_its_memory() -> None:
    store = RolloutStore()
    batch = fragment()
    store.add(batch, 0)
    rollout = store.take()
    rollout["reward"].zero_()
    rollout.tail["obs"].zero_()
    assert batch["reward"].any()
    assert batch.tail["obs"].any()


def test_taking_from_an_empty_store_shows_the_call_that_fills_it() -> None:
    store = RolloutStore()
    with pytest.raises(EmptyStore, match=r"store\.add\(batch, newest_version=version\)"):
        store.take()


def test_a_batch_within_max_lag_is_accepted() -> None:
    store = RolloutStore(max_lag=2)
    assert store.add(fragment(policy_version=3), newest_version=5)
    assert store.rows == 6


def test_a_stale_batch_is_refused_and_nothing_of_it_is_kept() -> None:
    store = RolloutStore(max_lag=2)
    with pytest.raises(StaleBatch, match=r"version 2, 3 behind version 5, and max_lag=2"):
        store.add(fragment(policy_version=2), newest_version=5)
    assert store.rows == 0


def test_a_stale_batch_is_dropped_and_counted_if_so_configured() -> None:
    store = RolloutStore(max_lag=0, stale="count")
    assert not store.add(fragment(policy_version=4), newest_version=5)
    assert store.add(fragment(policy_version=5), newest_version=5)
    assert (store.stats.dropped_rows, store.stats.dropped_batches) == (6, 1)
    assert store.rows == 6


def test_a_batch_from_the_future_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"version 7, but newest_version=5"):
        RolloutStore().add(fragment(policy_version=7), newest_version=5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (fragment(horizon=4), r"horizon expected 3, got 4"),
        (
            fragment(columns={"action": np.ones((3, 2), np.int32)}),
            r"column 'action' expected int64 \(\), got int32 \(\)",
        ),
        (
            fragment(columns={"obs": np.ones((3, 2, 5), np.float32)}),
            r"column 'obs' expected float32 \(2,\), got float32 \(5,\)",
        ),
        (
            fragment(columns={"value": np.ones((3, 2), np.float32)}),
            r"column 'value' expected none, got float32 \(\)",
        ),
        (
            fragment(state={"h": np.ones((2, 8), np.float32)}),
            r"state 'h' expected none, got float32 \(8,\)",
        ),
    ],
)
def test_a_batch_that_does_not_fit_names_the_difference(other: Batch, message: str) -> None:
    store = RolloutStore()
    store.add(fragment(), 0)
    with pytest.raises(ConfigError, match=message):
        store.add(other, 0)
    assert store.rows == 6


def test_an_unknown_column_names_those_there_are() -> None:
    store = RolloutStore()
    store.add(fragment(), 0)
    with pytest.raises(KeyError, match=r"no column 'rewards'; there are .*'reward'"):
        store.take()["rewards"]


@pytest.mark.parametrize(
    "bad", [{"stale": "drop"}, *({"max_lag": lag} for lag in (-1, 1.5, float("nan"), True, "3"))]
)
def test_settings_that_cannot_work_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"RolloutStore\("):
        RolloutStore(**bad)


def test_fragments_of_two_collectors_lie_side_by_side_each_with_its_own_tail() -> None:
    store = RolloutStore()
    for run, shard in [(9, 0), (4, 1), (9, 1), (4, 0)]:  # the same environments in both
        label = np.full((3, 2), 10 * run + shard, np.float32)
        batch = fragment(first_env=2 * shard, run=run, shard=shard, columns={"label": label})
        store.add(batch, newest_version=0)
    rollout = store.take()
    assert rollout["label"][0].tolist() == [40, 40, 41, 41, 90, 90, 91, 91]
    assert sorted(rollout.tail_rows.tolist()) == list(range(16, 24))  # the last row of each
    obs = rollout["obs"].flatten(0, 1)
    assert torch.equal(obs[rollout.tail_rows] + 0.5, rollout.tail["obs"])


def test_only_a_batch_and_a_version_can_be_added() -> None:
    store = RolloutStore()
    with pytest.raises(ConfigError, match=r"batch must be a Batch, got 5: store\.add\(batch, "):
        store.add(5, 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"newest_version must be an integer, .*got None"):
        store.add(fragment(), None)  # type: ignore[arg-type]
    assert store.rows == 0
