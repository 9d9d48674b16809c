"""``ClusterEnv`` equals ``SyncVectorEnv`` to the last bit, whatever the sharding."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from compare import assert_same
from distributed import Client, get_client
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeAwareObservation
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics
from worlds import SPACES, World

import clusterenv

pytestmark = pytest.mark.usefixtures("leaves_nothing")

MODES = list(AutoresetMode)
NUM_ENVS = 7  # splits unevenly over 2 and 3 shards


def pair(
    client: Client, shards: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any
) -> tuple[clusterenv.ClusterEnv, SyncVectorEnv[Any, Any]]:
    ours = clusterenv.make_vec(
        World, NUM_ENVS, shards=shards, cluster=client, autoreset_mode=mode, **kwargs
    )
    theirs = SyncVectorEnv([functools.partial(World, **kwargs)] * NUM_ENVS, autoreset_mode=mode)
    return ours, theirs


def roll(ours: Any, theirs: Any, steps: int, mode: AutoresetMode) -> int:
    """Step both with the same actions; return the number of episodes that ended."""
    theirs.action_space.seed(5)
    over = 0
    for _ in range(steps):
        actions = theirs.action_space.sample()
        result = theirs.step(actions)
        assert_same(ours.step(actions), result)
        ended = result[2] | result[3]
        over += int(ended.sum())
        if mode is AutoresetMode.DISABLED and ended.any():
            mine, expected = (
                envs.reset(options={"reset_mask": ended.copy(), "level": 3})
                for envs in (ours, theirs)
            )
            assert_same(mine, expected)
    return over


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_equals_sync_vector_env_in_every_autoreset_mode(
    client: Client, shards: int, mode: AutoresetMode
) -> None:
    ours, theirs = pair(client, shards, mode)
    with ours:
        assert_same(ours.reset(seed=11), theirs.reset(seed=11))
        assert roll(ours, theirs, 40, mode) > 5
        assert_same(ours.reset(seed=12), theirs.reset(seed=12))
        roll(ours, theirs, 5, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("space", SPACES)
def test_equals_sync_vector_env_for_every_observation_space(
    client: Client, space: str, mode: AutoresetMode
) -> None:
    ours, theirs = pair(client, 2, mode, obs=space)
    with ours:
        assert ours.observation_space == theirs.observation_space
        assert_same(ours.reset(seed=3), theirs.reset(seed=3))
        assert roll(ours, theirs, 15, mode) > 1


@pytest.mark.parametrize("space", SPACES)
def test_equals_sync_vector_env_for_every_action_space(client: Client, space: str) -> None:
    ours, theirs = pair(client, 2, act=space)
    with ours:
        assert ours.action_space == theirs.action_space
        assert_same(ours.reset(seed=3), theirs.reset(seed=3))
        roll(ours, theirs, 5, AutoresetMode.NEXT_STEP)


def test_the_dtype_of_actions_reaches_the_environment(client: Client) -> None:
    """Pendulum computes with what it is given: float64 actions give other last bits."""
    ours = clusterenv.make_vec("Pendulum-v1", 4, shards=2, cluster=client)
    theirs = gym.make_vec("Pendulum-v1", 4, vectorization_mode="sync")
    with ours:
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        for dtype in (np.float32, np.float64):
            actions = np.array([[0.1], [-0.2], [0.3], [1.7]], dtype)
            assert_same(ours.step(actions), theirs.step(actions))


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "LunarLander-v3", "FrozenLake-v1", "Blackjack-v1"]
)
def test_equals_sync_vector_env_on_real_environments(client: Client, env_id: str) -> None:
    ours = clusterenv.make_vec(env_id, 5, shards=3, cluster=client)
    theirs = gym.make_vec(env_id, 5, vectorization_mode="sync")
    with ours:
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        roll(ours, theirs, 100, AutoresetMode.NEXT_STEP)


def test_seeds_go_by_env_index(client: Client) -> None:
    seeds = [5, None, 7, 8, None, 10, 11]
    ours, theirs = pair(client, 3)
    with ours:
        obs, _ = ours.reset(seed=seeds)
        expected, _ = theirs.reset(seed=seeds)
        seeded = [i for i, seed in enumerate(seeds) if seed is not None]
        assert_same(obs[seeded], expected[seeded])
        assert ours.np_random_seed[3] == 8


def test_reset_without_seed_goes_on_with_the_streams(client: Client) -> None:
    ours, theirs = pair(client, 2)
    with ours:
        for seed in (4, None, None):
            assert_same(ours.reset(seed=seed), theirs.reset(seed=seed))
            roll(ours, theirs, 4, AutoresetMode.NEXT_STEP)


def test_options_reach_the_environments_and_stay_as_they_were(client: Client) -> None:
    ours, theirs = pair(client, 2, AutoresetMode.DISABLED)
    with ours:
        ours.reset(seed=1)
        theirs.reset(seed=1)
        mask = np.arange(NUM_ENVS) % 3 == 0
        options = {"level": 2, "reset_mask": mask}
        assert_same(ours.reset(options=options), theirs.reset(options=dict(options)))
        assert set(options) == {"level", "reset_mask"}


def test_send_and_recv_give_the_same_streams_as_step(client: Client) -> None:
    ours, theirs = pair(client, 3)
    rows: dict[int, list[tuple[Any, ...]]] = {i: [] for i in range(NUM_ENVS)}
    with ours:
        ours.async_reset(seed=21)
        while min(map(len, rows.values())) < 12:
            obs, reward, terminated, truncated, info = ours.recv()
            ids = info["env_id"]
            for row, env in enumerate(ids):
                rows[env].append((obs[row], reward[row], terminated[row], truncated[row]))
            ours.send(2 + (ids + len(rows[ids[0]])) % 5, ids)
        first, _ = theirs.reset(seed=21)
        for env in range(NUM_ENVS):
            assert_same(rows[env][0][0], first[env])
        for step in range(1, 12):
            obs, *rest, _ = theirs.step(2 + (np.arange(NUM_ENVS) + step) % 5)
            for env in range(NUM_ENVS):
                assert_same(rows[env][step], (obs[env], *(part[env] for part in rest)))


def test_any_subset_can_be_sent_in_any_order(client: Client) -> None:
    ours, theirs = pair(client, 3)
    order = np.array([6, 0, 3, 2])
    with ours:
        ours.reset(seed=2)
        theirs.reset(seed=2)
        actions = np.array([2, 3, 4, 5, 6, 2, 3])
        expected = theirs.step(actions)
        ours.send(actions[order], order)
        seen: list[int] = []
        while len(seen) < len(order):
            obs, reward, _terminated, _truncated, info = ours.recv()
            ids = info.pop("env_id")
            seen += ids.tolist()
            assert_same(obs, expected[0][ids])
            assert_same(reward, expected[1][ids])
            assert_same(info["weight"], expected[4]["weight"][ids])
        assert sorted(seen) == sorted(order.tolist())
        others = np.array([1, 4, 5])
        ours.send(actions[others], others)
        while ours._calls.receiving:
            obs, *_, info = ours.recv()
            assert_same(obs, expected[0][info["env_id"]])


def test_env_ids_may_be_reused_by_the_caller(client: Client) -> None:
    ours, _ = pair(client, 2)
    with ours:
        ours.reset(seed=1)
        ids = np.array([0])
        ours.send([2], ids)
        ids[0] = 1
        assert ours.recv()[4]["env_id"].tolist() == [0]


def test_the_first_ready_shard_is_returned_first(client: Client) -> None:
    """A shard that was not sent anything keeps nobody waiting."""
    ours, _ = pair(client, 3)
    with ours:
        ours.reset(seed=1)
        ours.send([2, 2], [5, 6])
        assert ours.recv()[4]["env_id"].tolist() == [5, 6]


def test_a_reset_forgets_what_was_sent_before(client: Client) -> None:
    ours, theirs = pair(client, 2)
    with ours:
        # One answer is taken, the other may have arrived and wait.
        ours.async_reset(seed=3)
        ours.recv()
        assert_same(ours.reset(seed=5), theirs.reset(seed=5))
        roll(ours, theirs, 3, AutoresetMode.NEXT_STEP)
        ours.async_reset(seed=3)
        ours.recv()
        ours.async_reset(seed=4)
        ours.recv()
        ours.recv()
        assert ours.get_attr("colour") == (0,) * NUM_ENVS
        ours.reset(seed=1)
        ours.send(np.full(NUM_ENVS, 2))
        assert_same(ours.reset(seed=6), theirs.reset(seed=6))
        roll(ours, theirs, 3, AutoresetMode.NEXT_STEP)


def test_call_get_attr_set_attr_and_render(client: Client) -> None:
    ours, theirs = pair(client, 3, render_mode="rgb_array")
    with ours:
        ours.reset(seed=1)
        theirs.reset(seed=1)
        for envs in (ours, theirs):
            envs.set_attr("colour", list(range(NUM_ENVS)))
        assert ours.call("double", 4, plus=1) == theirs.call("double", 4, plus=1) == (9,) * 7
        assert ours.get_attr("colour") == tuple(range(NUM_ENVS))
        assert_same(ours.render(), theirs.render())
        ours.set_attr("colour", 3)
        assert ours.get_attr("colour") == (3,) * NUM_ENVS
        assert ours.metadata == theirs.metadata
        assert ours.render_mode == "rgb_array"


def test_every_shard_has_a_process_of_its_own(client: Client) -> None:
    ours, _ = pair(client, 3)
    with ours:
        pids = ours.call("pid")
    assert len(set(pids)) == 3
    assert pids == (pids[0],) * 3 + (pids[3],) * 2 + (pids[5],) * 2


def test_wrappers_run_on_the_worker_and_vector_wrappers_at_the_head(client: Client) -> None:
    ours = clusterenv.make_vec(
        "CartPole-v1", 4, shards=2, cluster=client, wrappers=(TimeAwareObservation,)
    )
    theirs = gym.make_vec(
        "CartPole-v1", 4, vectorization_mode="sync", wrappers=(TimeAwareObservation,)
    )
    wrapped = [NormalizeObservation(RecordEpisodeStatistics(envs)) for envs in (ours, theirs)]
    assert_same(wrapped[0].reset(seed=1), wrapped[1].reset(seed=1))
    finished = 0
    for _ in range(60):
        actions = wrapped[1].action_space.sample()
        mine, expected = (envs.step(actions) for envs in wrapped)
        for result in (mine, expected):
            if "episode" in result[4]:
                finished += int(result[4]["_episode"].sum())
                del result[4]["episode"]["t"]  # wall-clock time
        assert_same(mine, expected)
    assert finished > 4
    wrapped[0].close()
    assert ours.closed


def test_env_may_be_an_id_a_spec_a_callable_or_one_callable_per_environment(client: Client) -> None:
    def make(length: float) -> gym.Env[Any, Any]:
        env = gym.make("CartPole-v1")
        env.unwrapped.length = length  # type: ignore[attr-defined]
        return env

    sources = (
        "CartPole-v1",
        gym.spec("CartPole-v1"),
        functools.partial(make, 0.5),
        [functools.partial(make, 0.5 + i) for i in range(3)],
    )
    for source in sources:
        with clusterenv.make_vec(source, 3, shards=2, cluster=client) as envs:
            assert envs.reset(seed=1)[0].shape == (3, 4)
            assert envs.spec is not None
            assert envs.spec.id == "CartPole-v1"
            lengths = envs.get_attr("length")
    assert lengths == (0.5, 1.5, 2.5)


def test_env_kwargs_reach_the_environment(client: Client) -> None:
    with clusterenv.make_vec(
        "LunarLander-v3", 2, shards=2, cluster=client, continuous=True
    ) as envs:
        assert envs.single_action_space.shape == (2,)


def test_two_environments_share_a_cluster_undisturbed(client: Client) -> None:
    first, theirs = pair(client, 3)
    second, others = pair(client, 2, AutoresetMode.SAME_STEP, obs="dict")
    with first:
        with second:
            assert_same(first.reset(seed=1), theirs.reset(seed=1))
            assert_same(second.reset(seed=2), others.reset(seed=2))
            for _ in range(5):
                roll(first, theirs, 2, AutoresetMode.NEXT_STEP)
                roll(second, others, 2, AutoresetMode.SAME_STEP)
        roll(first, theirs, 5, AutoresetMode.NEXT_STEP)


def test_results_are_not_overwritten_by_later_steps(client: Client) -> None:
    ours, _ = pair(client, 2)
    with ours:
        obs, _ = ours.reset(seed=1)
        kept = obs.copy()
        for _ in range(3):
            ours.step(np.full(NUM_ENVS, 2))
        assert_same(obs, kept)


def test_large_observations_arrive_whole(client: Client) -> None:
    """More bytes than a socket's buffer holds, in both directions."""

    class Big(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(0, 255, (4, 256, 256), np.uint8)
        action_space = gym.spaces.Box(-1, 1, (200_000,), np.float32)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.value = seed or 0
            return np.full((4, 256, 256), self.value % 256, np.uint8), {}

        def step(self, action: Any) -> Any:
            self.value += 1
            obs = np.full((4, 256, 256), self.value % 256, np.uint8)
            return obs, float(action[-1]), False, False, {}

    with clusterenv.make_vec(Big, 6, shards=2, cluster=client) as envs:
        envs.reset(seed=1)
        actions = np.arange(6, dtype=np.float32)[:, None].repeat(200_000, 1)
        obs, reward, *_ = envs.step(actions)
        assert obs[:, -1, -1, -1].tolist() == [2, 3, 4, 5, 6, 7]
        assert reward.tolist() == [0, 1, 2, 3, 4, 5]
        # Half a shard at a time: requests and answers cross on the way, both too large
        # for the sockets. Neither side may wait for the other to read.
        for first in range(6):
            envs.send(actions[first : first + 1], [first])
        for _ in range(6):
            obs, reward, *_, info = envs.recv()
            assert reward[0] == info["env_id"][0]
            assert obs[0, 0, 0, 0] == info["env_id"][0] + 3


class Reuser(gym.Env[Any, Any]):
    """Reuses its arrays and its info, as simulators in native code do."""

    observation_space = gym.spaces.Box(-9, 99, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.info = getattr(self, "info", {"t": 0, "v": np.zeros(2)})
        self.info["t"] = -1
        self.info["v"][:] = -1
        return np.full(1, -1, np.float32), self.info

    def step(self, action: Any) -> Any:
        self.info["t"] += 1
        self.info["v"] += 1
        over = self.info["t"] == 3
        return np.full(1, self.info["t"], np.float32), 1.0, over, False, self.info


def test_the_final_info_is_that_of_the_final_step(client: Client) -> None:
    mode = AutoresetMode.SAME_STEP
    ours = clusterenv.make_vec(Reuser, 3, shards=2, cluster=client, autoreset_mode=mode)
    theirs = SyncVectorEnv([Reuser] * 3, autoreset_mode=mode)
    with ours:
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        for _ in range(9):
            assert_same(ours.step([0] * 3), theirs.step(np.zeros(3, np.int64)))


def test_many_leaves_travel(client: Client) -> None:
    """More columns than one system call takes."""
    space = gym.spaces.Dict({f"k{i:04}": gym.spaces.Discrete(9) for i in range(1300)})

    class Wide(gym.Env[Any, Any]):
        observation_space = space
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return {f"k{i:04}": i % 9 for i in range(1300)}, {}

    with clusterenv.make_vec(Wide, 2, shards=2, cluster=client) as envs:
        obs, _ = envs.reset(seed=1)
        assert [obs[f"k{i:04}"].tolist() for i in range(1300)] == [[i % 9] * 2 for i in range(1300)]


def test_dasks_default_client_stays_the_users(client: Client) -> None:
    with clusterenv.make_vec("CartPole-v1", 2, shards=2, cluster=client.scheduler.address):
        assert get_client() is client
