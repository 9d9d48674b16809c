"""Rows as TensorDicts: TorchRL's own estimators, losses and buffers take them, and lose nothing."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from agents import cartpole_policy
from batches import Fleet, TwoLeaves, fill
from distributed import Client
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import clusterenv
from clusterenv import Batch, ReplayStore, RolloutStore, to_tensordict
from clusterenv.errors import ArgumentTypeError, ConfigError
from clusterenv.returns import gae, next_values


@pytest.fixture(scope="module")
def batches(client: Client) -> list[Batch]:
    """Two shards of CartPole, with ends of both kinds."""
    with clusterenv.Collector(
        "CartPole-v1",
        cartpole_policy(),
        num_envs=5,
        horizon=40,
        shards=2,
        seed=3,
        cluster=client,
        max_episode_steps=15,
    ) as collector:
        found = collector.rollout()
    ends = np.concatenate([batch[kind].sum(keepdims=True) for kind in ENDS for batch in found])
    assert ends.all()
    return found


ENDS = ("terminated", "truncated")


def test_a_batch_has_torchrls_keys_and_its_own_numbers(batches: list[Batch]) -> None:
    for batch in batches:
        rows = batch.tensordict()
        assert rows.batch_size == (batch.num_envs, batch.horizon)
        assert rows.names == [None, "time"]

        def own(*key: str, rows: TensorDict = rows) -> np.ndarray:
            return np.swapaxes(rows[key].numpy(), 0, 1)

        np.testing.assert_array_equal(own("observation"), batch["obs"])
        np.testing.assert_array_equal(own("next", "observation"), batch.next_obs()["obs"])
        np.testing.assert_array_equal(own("action"), batch["action"])
        np.testing.assert_array_equal(own("action_log_prob"), batch["log_prob"])
        for name in ("reward", *ENDS):
            np.testing.assert_array_equal(own("next", name)[..., 0], batch[name])
        over = batch["terminated"] | batch["truncated"]
        np.testing.assert_array_equal(own("next", "done")[..., 0], over)
        for name in ("env", "episode", "step", "version"):
            np.testing.assert_array_equal(own(name), batch[name])
        assert np.shares_memory(own("observation"), batch["obs"])


def test_torchrls_estimator_finds_our_advantages_and_its_loss_learns_from_them(
    batches: list[Batch],
) -> None:
    store = RolloutStore()
    for batch in batches:
        store.add(batch, newest_version=0)
    rollout = store.take()
    torch.manual_seed(0)
    critic, actor = nn.Linear(4, 1), nn.Linear(4, 2)
    value = TensorDictModule(critic, ["observation"], ["state_value"])
    rows = rollout.tensordict()
    GAE(gamma=0.9, lmbda=0.8, value_network=value)(rows)

    with torch.no_grad():
        values = critic(rollout["obs"]).squeeze(-1)
        tail = critic(rollout.tail["obs"]).squeeze(-1)
    following = next_values(values, rollout.tail_rows, tail)
    ends = rollout["terminated"], rollout["truncated"]
    ours = gae(rollout["reward"], values, following, *ends, gamma=0.9, lam=0.8)
    torch.testing.assert_close(rows["advantage"].squeeze(-1).t(), ours, rtol=1e-4, atol=1e-4)
    targets = rows["value_target"].squeeze(-1).t()
    torch.testing.assert_close(targets, ours + values, rtol=1e-4, atol=1e-4)

    policy = ProbabilisticActor(
        TensorDictModule(actor, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    losses = ClipPPOLoss(policy, value)(rows)
    (losses["loss_objective"] + losses["loss_critic"]).backward()
    assert actor.weight.grad is not None
    assert actor.weight.grad.abs().sum() > 0


def test_torchrls_buffer_keeps_and_gives_back_every_row(batches: list[Batch]) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=64)
    for batch in batches:
        buffer.extend(batch.tensordict().reshape(-1))
    assert len(buffer) == 5 * 40
    known = {
        (int(env), int(episode), int(step)): (obs, following)
        for batch in batches
        for env, episode, step, obs, following in zip(
            *(batch.flat(name) for name in ("env", "episode", "step", "obs")),
            batch.next_obs()["obs"].reshape(-1, 4),
            strict=True,
        )
    }
    for row in buffer.sample():
        obs, following = known[tuple(int(row[name]) for name in ("env", "episode", "step"))]
        assert np.array_equal(row["observation"], obs)
        assert np.array_equal(row["next", "observation"], following)


@pytest.mark.parametrize("tensors", [False, True])
def test_a_sample_of_a_replay_store_is_named_the_same_way(tensors: bool) -> None:
    store = ReplayStore(1_000, seed=1)
    fill(store, Fleet(TwoLeaves()), 5)
    sample: Any = store.sample(7, tensors=tensors)
    rows = to_tensordict(sample)
    assert rows.batch_size == (7,)
    keys = {"a": "obs.a", "b": "obs.b", "index": "indices", "priority_weight": "weights"}
    for key, name in keys.items():
        assert np.array_equal(rows[key], sample[name])
    assert np.array_equal(rows["next", "b"], sample["next_obs.b"])
    assert rows["next", "reward"].shape == (7, 1)


def test_without_torchrl_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ConfigError, match="pip install torchrl"):
        Fleet().next()[0].tensordict()


@pytest.mark.parametrize("columns", [None, {}, {"reward": torch.zeros(2)}, {"reward": "much"}])
def test_columns_that_are_no_rows_are_refused(columns: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"to_tensordict\(store\.sample\(64\)\)"):
        to_tensordict(columns)
