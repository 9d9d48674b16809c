"""``SB3VecEnv``: Stable-Baselines3 learns on a cluster as on environments of its own."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from distributed import Client
from stable_baselines3 import A2C, DQN
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

import clusterenv
from clusterenv import SB3VecEnv
from clusterenv.errors import ConfigError
from clusterenv.head.vector import sb3


def test_sb3_gets_what_its_own_dummy_vec_env_gives(client: Client) -> None:
    """To the last bit, ends of episodes of both kinds among it."""
    options = {"max_episode_steps": 20}
    theirs = DummyVecEnv([lambda: Monitor(gym.make("CartPole-v1", **options))] * 5)
    ours = SB3VecEnv(
        clusterenv.make_vec(
            "CartPole-v1",
            5,
            shards=2,
            cluster=client,
            autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
            wrappers=[Monitor],
            **options,
        )
    )
    rng = np.random.default_rng(1)
    ends = {False: 0, True: 0}
    for seed in (3, None):  # the second reset goes on with the streams of the first
        if seed is not None:
            assert ours.seed(seed) == theirs.seed(seed)
        assert np.array_equal(ours.reset(), theirs.reset())
        for _ in range(100):
            actions = rng.integers(2, size=5)
            mine, other = ours.step(actions), theirs.step(actions)
            for one, two in zip(mine[:3], other[:3], strict=True):
                assert one.dtype == two.dtype
                assert np.array_equal(one, two)
            assert ours.reset_infos == theirs.reset_infos
            for one, two in zip(mine[3], other[3], strict=True):
                assert one.keys() == two.keys()
                assert one["TimeLimit.truncated"] is bool(two["TimeLimit.truncated"])
                if "terminal_observation" in two:
                    ends[one["TimeLimit.truncated"]] += 1
                    final = one["terminal_observation"]
                    assert final.dtype == two["terminal_observation"].dtype
                    assert np.array_equal(final, two["terminal_observation"])
                    assert [one["episode"][k] for k in "rl"] == [two["episode"][k] for k in "rl"]
    assert min(ends.values()) > 5

    for envs in (ours, theirs):
        assert envs.env_is_wrapped(Monitor) == [True] * 5
        assert envs.env_is_wrapped(gym.wrappers.ClipAction, [0, 1]) == [False] * 2
        assert envs.has_attr("gravity")
        assert not envs.has_attr("levity")
        envs.set_attr("colour", 1)
        envs.set_attr("colour", 2, indices=[3])
        assert envs.get_attr("colour") == [1, 1, 1, 2, 1]
        assert len(envs.env_method("get_episode_rewards")) == 5
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [(A2C, {"n_steps": 8}), (DQN, {"learning_starts": 40, "train_freq": 2, "batch_size": 8})],
)
def test_an_algorithm_learns_the_same_on_a_cluster_as_on_its_own_environments(
    client: Client, algorithm: Any, options: dict[str, Any]
) -> None:
    def weights(envs: Any) -> list[torch.Tensor]:
        model = algorithm("MlpPolicy", envs, seed=3, device="cpu", **options)
        model.learn(200)
        envs.close()
        assert model.num_timesteps >= 200
        return [parameter.detach().clone() for parameter in model.policy.parameters()]

    theirs = weights(DummyVecEnv([lambda: Monitor(gym.make("CartPole-v1"))] * 4))
    ours = weights(
        SB3VecEnv(
            clusterenv.make_vec(
                "CartPole-v1",
                4,
                shards=2,
                cluster=client,
                autoreset_mode="SameStep",
                wrappers=[Monitor],
            )
        )
    )
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one, two)


def test_environments_that_reset_in_the_next_step_are_refused(client: Client) -> None:
    envs = clusterenv.make_vec("CartPole-v1", 2, shards=1, cluster=client)
    with pytest.raises(ConfigError, match="autoreset_mode='SameStep'"):
        SB3VecEnv(envs)
    envs.close()


def test_without_sb3_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.vec_env.base_vec_env", None)
    monkeypatch.delitem(sys.modules, sb3.__name__)
    with pytest.raises(ImportError, match="pip install stable-baselines3"):
        importlib.import_module(sb3.__name__)
