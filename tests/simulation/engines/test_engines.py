"""Engines without any cluster: what the fast ones share with the loop, and what they change."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from compare import assert_same
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from worlds import World

from clusterenv.data.spaces import Layout
from clusterenv.errors import ConfigError
from clusterenv.simulation.engines import build
from clusterenv.simulation.engines.base import Engine, EnvRaised, Recipe, Slot
from clusterenv.simulation.engines.native import NativeEngine


def slot_of(engine: Engine) -> Slot:
    return Slot.empty(Layout(engine.description.observation_space), engine.num_envs)


def rollout(
    recipe: Recipe, first: int, count: int, seed: int, steps: int = 40
) -> np.ndarray[Any, Any]:
    """Return the observations of environments ``first`` to ``first + count`` of a whole."""
    engine = build(recipe, first, count)
    slot = slot_of(engine)
    engine.reset(slot, [seed + first + i for i in range(count)], None, None)
    rows = [slot.obs[0].copy()]
    for step in range(steps):
        actions = (np.arange(first, first + count) + step) % 2
        engine.step([actions], slot, None)
        rows.append(slot.obs[0].copy())
    engine.close()
    return np.stack(rows)


def test_the_loop_writes_into_the_given_columns_only() -> None:
    engine = build(Recipe(World), 0, 3)
    slot = slot_of(engine)
    before = [id(column) for column in slot.obs]
    engine.reset(slot, [1, 2, 3], None, None)
    engine.step([np.array([2, 3])], slot, [2, 0])
    assert [id(column) for column in slot.obs] == before
    reference = SyncVectorEnv([World] * 3)
    reference.reset(seed=1)
    obs, *_ = reference.step(np.array([3, 2, 2]))
    assert_same(slot.obs[0][[0, 2]], obs[[0, 2]])
    assert not np.array_equal(slot.obs[0][1], obs[1])  # was not stepped
    engine.close()


def test_the_loop_is_shard_invariant() -> None:
    recipe = Recipe(gym.spec("CartPole-v1"))
    whole = rollout(recipe, 0, 6, seed=9)
    parts = [rollout(recipe, first, 2, seed=9) for first in (0, 2, 4)]
    assert_same(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize("prechecked", [False, True])
def test_native_engine_equals_the_vector_entry_point(prechecked: bool) -> None:
    mode = _native_mode("CartPole-v1")
    engine = NativeEngine(Recipe(gym.spec("CartPole-v1"), autoreset_mode=mode), 0, 8)
    if prechecked:
        engine.skip_action_checks()
    slot = slot_of(engine)
    reference = gym.make_vec("CartPole-v1", 8, vectorization_mode="vector_entry_point")
    engine.reset(slot, [4 + i for i in range(8)], None, None)
    obs, _ = reference.reset(seed=4)
    assert_same(slot.obs[0], obs)
    for step in range(60):
        actions = (np.arange(8) + step) % 2
        engine.step([actions], slot, None)
        obs, reward, terminated, _truncated, _ = reference.step(actions)
        assert_same(slot.obs[0], obs.astype(np.float32))
        assert np.array_equal(slot.reward, reward)
        assert_same(slot.terminated, terminated)
    assert not engine.description.maskable
    engine.close()
    reference.close()


def test_native_environments_check_actions_unless_they_were_prechecked() -> None:
    engine = NativeEngine(Recipe(gym.spec("CartPole-v1"), engine="native"), 0, 2)
    slot = slot_of(engine)
    engine.reset(slot, [1, 2], None, None)
    with pytest.raises(EnvRaised):
        engine.step([np.array([0, 7])], slot, None)
    engine.skip_action_checks()
    engine.step([np.array([0, 7])], slot, None)
    other = NativeEngine(Recipe(gym.spec("CartPole-v1"), engine="native"), 0, 2)
    other.reset(slot, [1, 2], None, None)
    with pytest.raises(EnvRaised):  # prechecked for one engine alone
        other.step([np.array([0, 7])], slot, None)
    engine.close()
    other.close()


def _native_mode(env_id: str) -> AutoresetMode:
    with_mode = gym.make_vec(env_id, 1, vectorization_mode="vector_entry_point")
    mode = with_mode.metadata["autoreset_mode"]
    with_mode.close()
    assert isinstance(mode, AutoresetMode)
    return mode


def test_native_engine_refuses_what_it_would_ignore() -> None:
    spec = gym.spec("CartPole-v1")
    other = next(mode for mode in AutoresetMode if mode is not _native_mode("CartPole-v1"))
    with pytest.raises(ConfigError, match="pass autoreset_mode="):
        build(Recipe(spec, engine="native", autoreset_mode=other), 0, 2)
    with pytest.raises(ConfigError, match="has no vector entry point"):
        build(Recipe(gym.spec("LunarLander-v3"), engine="native"), 0, 2)


def test_envpool_engine_is_shard_invariant_and_repeats_for_a_seed() -> None:
    pytest.importorskip("envpool")
    recipe = Recipe("CartPole-v1", engine="envpool")
    whole = rollout(recipe, 0, 6, seed=5)
    assert_same(rollout(recipe, 0, 6, seed=5), whole)
    parts = [rollout(recipe, first, 3, seed=5) for first in (0, 3)]
    assert_same(np.concatenate(parts, axis=1), whole)
    assert not np.array_equal(rollout(recipe, 0, 6, seed=6), whole)


def test_envpool_engine_steps_as_envpool_does() -> None:
    envpool = pytest.importorskip("envpool")
    engine = build(Recipe("LunarLander-v3", engine="envpool"), 0, 4)
    slot = slot_of(engine)
    engine.reset(slot, [7, 8, 9, 10], None, None)
    reference = envpool.make("LunarLander-v3", env_type="gymnasium", num_envs=4, seed=7)
    obs, _ = reference.reset()
    assert_same(slot.obs[0], obs)
    for step in range(150):
        actions = (np.arange(4) + step) % 4
        engine.step([actions], slot, None)
        obs, reward, terminated, _, _ = reference.step(actions.astype(np.int32))
        assert_same(slot.obs[0], obs)
        assert np.array_equal(slot.reward.astype(np.float32), reward)
        assert_same(slot.terminated, terminated)
    engine.close()


def test_envpool_engine_refuses_what_it_would_ignore() -> None:
    pytest.importorskip("envpool")
    with pytest.raises(ConfigError, match="NEXT_STEP only"):
        build(Recipe("CartPole-v1", engine="envpool", autoreset_mode=AutoresetMode.SAME_STEP), 0, 2)
    engine = build(Recipe("CartPole-v1", engine="envpool"), 0, 2)
    slot = slot_of(engine)
    with pytest.raises(ConfigError, match="reset_mask"):
        engine.reset(slot, [1, 2], None, np.array([True, False]))
    with pytest.raises(ConfigError, match="cannot render"):
        engine.render()
    engine.close()
