"""Football: the checkpoint reward and the stacks, on episodes that EnvPool itself has recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import matplotlib.image
import numpy as np
import pytest
import torch
from compare import assert_same
from distributed import Client
from gymnasium.utils.env_checker import check_env

import clusterenv
from benchmarks.football import FRAME
from clusterenv.errors import ClusterEnvError, ConfigError
from clusterenv.policies import Categorical
from clusterenv.store import ReplayStore, Uniform
from pipelines.envs.football import (
    TASKS,
    Checkpoints,
    Football,
    FootballVector,
    ball_distance,
    env_id,
)
from pipelines.experiment import run
from pipelines.impala import IMPALA
from pipelines.networks.actor_critic import ActorCritic
from pipelines.networks.images import stack_of
from pipelines.networks.q_network import QNetwork
from pipelines.tools import evaluate
from pipelines.tools.saved_policies import load_run

envpool = pytest.importorskip("envpool")

CLOSE = "clusterenv/FootballEmptyGoalClose-v0"
RIGHT, SHOT = 5, 12
ENVS, STEPS, SEED = 4, 130, 7


def original_reward(scored: float, distance: float, owned: bool, passed: int) -> tuple[float, int]:
    """Return the reward of one environment, and the checkpoints passed, one after the other."""
    if scored == 1:
        return scored + 0.1 * (10 - passed), 10
    reward = scored
    while owned and passed < 10 and distance <= 0.99 - 0.8 / 9 * passed:
        reward, passed = reward + 0.1, passed + 1
    return reward, passed


class Recorded(NamedTuple):
    """What EnvPool returned, and what the environment did, by step and environment."""

    frames: Any
    scored: Any
    over: Any
    ball_owned_team: Any
    obs: Any
    reward: Any
    ended: Any
    checkpoints: Any


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """Two environments shoot at once, two act at random."""
    rng = np.random.default_rng(2)
    actions = rng.integers(0, 19, (STEPS, ENVS))
    actions[:, :2] = RIGHT
    actions[8::12, :2] = SHOT
    pool = envpool.make(
        "gfootball/academy_empty_goal_close-v1",
        env_type="gymnasium",
        num_envs=ENVS,
        seed=[SEED + i for i in range(ENVS)],
        num_threads=1,
    )
    with contextlib.closing(FootballVector(ENVS)) as envs:
        first, info = pool.reset()
        obs, about = envs.reset(seed=SEED)
        rows = [(first, np.zeros(ENVS), np.zeros(ENVS, bool), info["ball_owned_team"])]
        ours = [(obs, np.zeros(ENVS), np.zeros(ENVS, bool), about["checkpoints"])]
        for action in actions:
            frames, scored, terminated, truncated, info = pool.step(action.astype(np.int32))
            rows.append((frames, scored, terminated | truncated, info["ball_owned_team"]))
            obs, reward, terminated, truncated, about = envs.step(action)
            ours.append((obs, reward, terminated | truncated, about["checkpoints"]))
    pool.close()
    columns = [*zip(*rows, strict=True), *zip(*ours, strict=True)]
    return Recorded(*map(np.stack, columns))


def episodes(recorded: Recorded) -> Iterator[tuple[int, range]]:
    """Yield the environment and the steps of every episode; the step after its end resets."""
    for env in range(ENVS):
        begin = 0
        for end in [*np.flatnonzero(recorded.over[:, env]).tolist(), STEPS]:
            yield env, range(begin, end + 1)
            begin = end + 1


def test_the_reward_of_recorded_episodes_is_the_original_one(recorded: Recorded) -> None:
    assert np.array_equal(recorded.ended, recorded.over)
    returns = []
    for env, steps in episodes(recorded):
        passed, total = 0, 0.0
        assert recorded.reward[steps[:1], env].tolist() in ([0.0], [])
        for step in steps[1:]:
            row, column = np.argwhere(recorded.frames[step, env, :, :, 2])[0]
            x, y = (column + 0.5) / 48 - 1, ((row + 0.5) / 36 - 1) / 2.25
            expected, passed = original_reward(
                float(recorded.scored[step, env]),
                ((x - 1) ** 2 + y**2) ** 0.5,
                recorded.ball_owned_team[step, env] == 0,
                passed,
            )
            assert recorded.reward[step, env] == pytest.approx(expected)
            assert recorded.checkpoints[step, env] == passed
            total += expected
        if steps and steps[-1] < STEPS:
            returns.append((total, recorded.scored[steps[-1], env]))
    goals = [total for total, scored in returns if scored == 1]
    others = [total for total, scored in returns if scored < 1]
    assert len(goals) >= 4
    assert goals == pytest.approx([2.0] * len(goals))
    assert others
    assert max(others) < 1.01


def test_only_the_score_is_paid_if_asked(recorded: Recorded) -> None:
    with contextlib.closing(FootballVector(1, reward="score", stack=1)) as envs:
        obs, _ = envs.reset(seed=SEED)
        assert obs.shape == (1, 1, 4, 72, 96)
        for step in range(1, 20):
            action = SHOT if step % 12 == 9 else RIGHT
            obs, reward, *_ = envs.step(np.array([action]))
            assert reward.tolist() == recorded.scored[step, :1].tolist()
            assert_same(obs[0, 0], np.moveaxis(recorded.frames[step, 0], -1, 0).copy())


def test_stacks_hold_the_last_frames_of_their_episode(recorded: Recorded) -> None:
    assert recorded.obs.shape == (STEPS + 1, ENVS, 4, 4, 72, 96)
    assert recorded.obs.dtype == np.uint8
    assert set(np.unique(recorded.obs)) == {0, 255}
    for env, steps in episodes(recorded):
        for step in steps:
            for back in range(4):
                at = max(step - back, steps[0])  # the first frame fills the stack
                expected = np.moveaxis(recorded.frames[at, env], -1, 0)
                assert np.array_equal(recorded.obs[step, env, 3 - back], expected)


def test_the_goal_a_step_after_the_last_checkpoint_is_not_paid_twice() -> None:
    checkpoints = Checkpoints(1)
    ours, nothing = np.array([True]), np.zeros(1)
    assert checkpoints(nothing, np.array([0.1]), ours) == pytest.approx(1.0)
    assert checkpoints(nothing, np.array([0.1]), ours) == pytest.approx(0.0)
    assert checkpoints(np.ones(1), np.array([1.0]), ~ours) == pytest.approx(1.0)
    assert checkpoints(np.ones(1), np.array([1.0]), ~ours) == pytest.approx(1.0)  # another goal
    checkpoints.begin(ours)
    assert checkpoints(nothing, np.array([1.5]), ours) == pytest.approx(0.0)
    assert checkpoints(-np.ones(1), np.array([0.95]), ours) == pytest.approx(-0.9)


def test_checkpoints_of_a_batch_equal_the_original_loop() -> None:
    rng = np.random.default_rng(3)
    checkpoints, passed = Checkpoints(50), [0] * 50
    paid = 0.0
    for _ in range(40):
        begun = rng.random(50) < 0.1
        checkpoints.begin(begun)
        scored = rng.choice([0.0, 0.0, 0.0, 0.0, 1.0, -1.0], 50)
        distance, owned = rng.uniform(0, 2, 50), rng.random(50) < 0.3
        reward = checkpoints(scored, distance, owned)
        for env in range(50):
            before = 0 if begun[env] else passed[env]
            expected, passed[env] = original_reward(
                float(scored[env]), float(distance[env]), bool(owned[env]), before
            )
            assert reward[env] == pytest.approx(expected)
            paid += expected - scored[env]
    assert paid > 50


def test_the_distance_is_right_to_half_a_pixel() -> None:
    rng = np.random.default_rng(4)
    x, y = rng.uniform(-1, 1, 500), rng.uniform(-0.42, 0.42, 500)
    planes = np.zeros((500, 72, 96), np.uint8)
    planes[np.arange(500), ((y * 2.25 + 1) * 36).astype(int), ((x + 1) * 48).astype(int)] = 255
    error = np.abs(ball_distance(planes) - np.hypot(x - 1, y))
    assert error.max() <= np.hypot(1 / 96, 1 / 72 / 2.25) + 1e-9
    assert error.max() > 0.008


@pytest.mark.parametrize("engine", ["native", "gymnasium"])
def test_the_streams_do_not_depend_on_the_number_of_shards(client: Client, engine: str) -> None:
    rng = np.random.default_rng(5)
    actions = rng.integers(0, 19, (40, 2))
    actions[:, 1] = RIGHT  # scores and begins anew
    results = []
    for shards in (1, 2):
        with clusterenv.make_vec(
            "pipelines.envs:" + CLOSE, 2, shards=shards, cluster=client, engine=engine
        ) as envs:
            results.append([envs.reset(seed=SEED), *(envs.step(action) for action in actions)])
    for number, (one, two) in enumerate(zip(*results, strict=True)):
        assert_same(two, one, f"step {number}")
    assert any(step[2][1] for step in results[0][1:])


def test_a_replay_store_keeps_each_frame_once(client: Client) -> None:
    spaces = clusterenv.env_spaces(CLOSE, engine="native")
    assert stack_of(spaces[0]) == 4
    policy = Categorical(torch.nn.Sequential(Centre(), torch.nn.Linear(4, 19)))
    with clusterenv.Collector(
        "pipelines.envs:" + CLOSE,
        policy,
        num_envs=2,
        shards=1,
        horizon=24,
        cluster=client,
        engine="native",
        seed=SEED,
    ) as collector:
        batches = collector.collect(2 * 24 * 4)
    stacked = ReplayStore(400, sampler=Uniform(replace=False), stack=4)
    plain = ReplayStore(400, sampler=Uniform(replace=False))
    samples = []
    for store in (stacked, plain):
        for rows in batches:
            store.add(rows)
        sample = store.sample(len(store), columns=("env", "episode", "step"))
        order = np.lexsort((sample["step"], sample["episode"], sample["env"]))
        samples.append({name: sample[name][order] for name in ("obs", "next_obs", "step", "env")})
    assert stacked.nbytes < 0.45 * plain.nbytes
    # A small store has as many slots for the frames of ends as rows.
    assert stacked.nbytes == pytest.approx(2 * 400 * FRAME, rel=0.02)
    assert samples[0]["obs"].shape == (len(plain), 4, 4, 72, 96)
    assert_same(samples[0], samples[1])


class Centre(torch.nn.Module):
    """Four numbers of each observation."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.float().flatten(1)[:, :4]


def test_the_learners_networks_take_stacks_with_channels_and_colours_at_the_end() -> None:
    space = gym.make(CLOSE).observation_space
    actions = gym.spaces.Discrete(19)
    obs = torch.from_numpy(np.stack([space.sample(), space.sample()]))
    assert QNetwork(space, actions, (32,))(obs).shape == (2, 19)
    agent = ActorCritic(space, actions)
    assert agent.value(obs).shape == (2,)
    assert agent.eyes is not None
    colours = gym.spaces.Box(0, 255, (63, 63, 3), np.uint8)
    agent = ActorCritic(colours, actions)
    image = torch.from_numpy(colours.sample())[None]
    assert agent.eyes is not None
    assert stack_of(colours) is None
    first = ActorCritic(gym.spaces.Box(0, 255, (3, 63, 63), np.uint8), actions)
    first.load_state_dict(agent.state_dict())
    torch.testing.assert_close(agent.value(image), first.value(image.movedim(-1, 1)))


def test_the_limit_is_a_truncation() -> None:
    with contextlib.closing(FootballVector(1, max_episode_steps=5)) as envs:
        envs.reset(seed=1)
        ends = [envs.step(np.array([0]))[2:4] for _ in range(6)]
    assert [bool(truncated[0]) for _, truncated in ends] == [False] * 5 + [True]
    assert not any(terminated[0] for terminated, _ in ends)


def test_gymnasium_accepts_the_environment_and_it_draws_the_pitch() -> None:
    env = gym.make(CLOSE, render_mode="rgb_array")
    check_env(env.unwrapped)
    obs, _ = env.reset(seed=1)
    picture: Any = env.render()
    assert picture.shape == (72 * 6, 96 * 10, 3)
    small = picture[::6, ::10]
    assert (small[obs[-1, 2] > 0] == (255, 255, 255)).all()  # the ball
    assert (small[(obs[-1] == 0).all(0)] == (38, 105, 46)).all()  # grass
    env.close()
    with contextlib.closing(Football()) as silent:
        silent.reset(seed=1)
        assert silent.render() is None


def test_every_academy_task_of_envpool_is_registered() -> None:
    theirs = {name for name in envpool.list_all_envs() if name.startswith("gfootball/academy")}
    assert {f"gfootball/{task}-v1" for task in TASKS} == theirs
    for task in TASKS:
        spec = gym.spec(env_id(task))
        assert spec.kwargs == {"task": task}
        assert spec.vector_entry_point is not None
    assert env_id("academy_3_vs_1_with_keeper") == "clusterenv/Football3Vs1WithKeeper-v0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": "goals"}, r"reward='goals' is neither 'checkpoint' nor 'score': .*'score'"),
        ({"stack": 0}, r"stack=0 is not a whole number from 1 to 16: .*stack=4"),
        ({"stack": True}, r"stack=True is not"),
        ({"num_threads": 0}, r"num_threads=0 is not .*num_threads=1"),
        ({"max_episode_steps": -1}, r"max_episode_steps=-1 is not .*max_episode_steps=400"),
        ({"task": "academy_goal"}, r"task='academy_goal' is none of academy_3_vs_1_with_keeper, "),
        ({"render_mode": "human"}, r"render_mode='human' is unknown: .*'rgb_array'"),
    ],
)
def test_wrong_arguments_fail_at_once_and_show_the_right_call(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        FootballVector(2, **arguments)
    with pytest.raises(ClusterEnvError, match=message):
        clusterenv.env_spaces(CLOSE, engine="native", **arguments)


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_envs=0 is not a whole number"):
        FootballVector(0)
    envs = FootballVector(2)
    with pytest.raises(ConfigError, match=r"step\(\) comes after reset\(\)"):
        envs.step(np.array([0, 1]))
    with pytest.raises(ConfigError, match="are not 2 whole numbers from 0 to 18"):
        envs.step(np.array([0, 19]))
    with pytest.raises(ConfigError, match="1 seeds for 2 environments"):
        envs.reset(seed=[1])
    envs.close()


@pytest.mark.timeout(240)  # it starts clusters
def test_a_run_is_evaluated_by_its_score_and_its_video_shows_the_episode(
    tmp_path: Path, client: Client
) -> None:
    cluster, out = str(client.scheduler.address), tmp_path / "run"
    smaller = {"num_envs": 2, "horizon": 8, "minibatches": 1, "total_steps": 64}
    args = IMPALA.preset(
        CLOSE, **smaller, shards=1, evaluate_every=32, evaluate_episodes=2, cluster=cluster, out=out
    )
    result = run(IMPALA, dataclasses.replace(args, quiet=True))
    assert result.eval_return in (-1.0, -0.5, 0.0, 0.5, 1.0)
    play = evaluate.Args(out, episodes=3, stochastic=True, cluster=cluster)
    scores = evaluate.evaluate(play).returns
    assert set(scores) <= {-1.0, 0.0, 1.0}
    rewards = dataclasses.replace(play, env_args=("reward=checkpoint",))
    paid = evaluate.evaluate(rewards).returns  # of the same episodes
    assert (paid >= scores).all()
    assert paid.sum() > scores.sum()
    if importlib.util.find_spec("moviepy") is not None:
        video = tmp_path / "episode.gif"
        evaluate.record(play, load_run(out), video)
        assert matplotlib.image.imread(video).shape[:2] == (72 * 6, 96 * 10)
