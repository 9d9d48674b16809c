"""The engines that step whole groups, on a real cluster."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from compare import assert_same
from distributed import Client

import clusterenv
from clusterenv import errors

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_native_engine_on_one_shard_equals_the_vector_entry_point(client: Client) -> None:
    reference = gym.make_vec("CartPole-v1", 8, vectorization_mode="vector_entry_point")
    mode = reference.metadata["autoreset_mode"]
    with clusterenv.make_vec(
        "CartPole-v1", 8, shards=1, cluster=client, engine="native", autoreset_mode=mode
    ) as envs:
        assert_same(envs.reset(seed=3)[0], reference.reset(seed=3)[0])
        for step in range(30):
            actions = (np.arange(8) + step) % 2
            assert_same(envs.step(actions)[0], reference.step(actions)[0].astype(np.float32))
    reference.close()


def test_envpool_engine_gives_the_same_streams_on_one_and_two_shards(client: Client) -> None:
    pytest.importorskip("envpool")
    runs = []
    for shards in (1, 2):
        with clusterenv.make_vec(
            "CartPole-v1", 5, shards=shards, cluster=client, engine="envpool"
        ) as envs:
            rows = [envs.reset(seed=3)[0]]
            for step in range(30):
                obs, _, _, _, info = envs.step((np.arange(5) + step) % 2)
                rows.append(obs)
                assert len(info["elapsed_step"]) == 5
            runs.append(np.stack(rows))
    assert_same(runs[0], runs[1])


def test_whole_shards_are_sent_and_received(client: Client) -> None:
    pytest.importorskip("envpool")
    with clusterenv.make_vec("CartPole-v1", 6, shards=2, cluster=client, engine="envpool") as envs:
        envs.async_reset(seed=1)
        for _ in range(20):
            obs, *_, info = envs.recv()
            envs.send(np.zeros(len(obs), np.int64), info["env_id"])
        envs.recv()
        _, *_, info = envs.recv()
        with pytest.raises(errors.ConfigError, match="steps whole shards"):
            envs.send([0, 1], info["env_id"][:2])
        envs.send([0] * 6, np.arange(6))


def test_an_unknown_envpool_task_is_an_error_from_the_worker(client: Client) -> None:
    pytest.importorskip("envpool")
    with pytest.raises(errors.EnvError, match="Nonsense-v9"):
        clusterenv.make_vec("Nonsense-v9", 2, shards=1, cluster=client, engine="envpool")


def test_ale_native_vector_environment(client: Client) -> None:
    ale_py = pytest.importorskip("ale_py")
    gym.register_envs(ale_py)
    with clusterenv.make_vec("ALE/Pong-v5", 4, shards=2, cluster=client, engine="native") as envs:
        obs, _ = envs.reset(seed=1)
        assert obs.dtype == np.uint8
        assert obs.shape == (4, *envs.single_observation_space.shape)
        obs, reward, *_ = envs.step(np.zeros(4, np.int64))
        assert reward.dtype == np.float64
