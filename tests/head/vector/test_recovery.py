"""``ClusterEnv`` goes on when a worker is lost: its environments come back truncated."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import footprint, left_behind, wait_until
from distributed import Client
from gymnasium.vector import AutoresetMode
from worlds import World

import clusterenv
from clusterenv import Restarts, errors

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


@pytest.fixture
def fragile() -> Iterator[Client]:
    with clusterenv.connect("local", n_workers=2) as client:
        yield client


class Steps(World):
    """Observations are a mark of the episode and the number of steps in it."""

    def __init__(self, act: str = "discrete") -> None:
        super().__init__("box64", act)

    def _observe(self, weight: float) -> Any:
        if self.steps == 0:
            self.mark = float(self.rng.random())
        return np.array([[self.mark, self.steps], [0, 0]])

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._observe(0), 1.0, False, self.steps == 20, {}


def kill(envs: clusterenv.ClusterEnv, env: int, how: int = signal.SIGKILL) -> None:
    pid = envs.call("pid")[env]
    if how == signal.SIGSTOP:
        stop(pid)
    else:
        os.kill(pid, how)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)  # a busy machine stops its threads one after the other
    stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
    assert wait_until(lambda: all(stat.read_text().split(") ")[-1][0] == "T" for stat in stats))


@pytest.mark.parametrize("mode", MODES)
def test_the_environments_of_a_lost_shard_come_back_truncated(
    fragile: Client, mode: AutoresetMode
) -> None:
    with clusterenv.make_vec(Steps, 4, shards=2, cluster=fragile, autoreset_mode=mode) as envs:
        before, _ = envs.reset(seed=1)
        for _ in range(3):
            last, *_ = envs.step([2] * 4)
        kill(envs, 3)
        obs, reward, terminated, truncated, info = envs.step([2] * 4)
        assert truncated.tolist() == [False, False, True, True]
        assert not terminated.any()
        assert reward.tolist() == [1, 1, 0, 0]
        assert obs[:, 0, 1].tolist() == [4, 4, 0, 0]  # the others went on; these were reset
        assert not np.isin(obs[2:, 0, 0], before[:, 0, 0]).any()  # with seeds of their own
        assert info["_lost"].tolist() == [False, False, True, True]
        assert "shard 1" in info["lost"][3]
        if mode is AutoresetMode.SAME_STEP:
            np.testing.assert_array_equal(info["final_obs"][3], last[3])
        if mode is AutoresetMode.DISABLED:
            with pytest.raises(errors.ResetNeeded):
                envs.step([2] * 4)
            envs.reset(options={"reset_mask": truncated})
        following, reward, _, truncated, info = envs.step([2] * 4)
        assert not truncated.any()
        assert "lost" not in info
        # Under NEXT_STEP the step after an end only resets.
        steps = 0 if mode is AutoresetMode.NEXT_STEP else 1
        assert following[:, 0, 1].tolist() == [5, 5, steps, steps]
        assert reward.tolist() == [1, 1, steps, steps]
        again, *_ = envs.step([2] * 4)
        assert again[:, 0, 1].tolist() == [6, 6, steps + 1, steps + 1]


def test_a_worker_killed_while_it_steps_and_while_it_rests(fragile: Client) -> None:
    with clusterenv.make_vec(Steps, 4, shards=2, cluster=fragile) as envs:
        envs.async_reset(seed=1)
        for _ in range(2):
            *_, info = envs.recv()
        envs.send([2], [0])
        *_, info = envs.recv()
        assert info["env_id"].tolist() == [0]
        kill(envs, 0)
        envs.send([2], [0])  # of the lost shard, one of two
        _, _, _, truncated, info = envs.recv()
        assert truncated.tolist() == [True]
        envs.send([2, 2], [0, 1])  # 0 is due a reset, 1 has not been told of the loss
        obs, _, _, truncated, info = envs.recv()
        assert info["env_id"].tolist() == [0, 1]
        assert truncated.tolist() == [False, True]
        assert obs[:, 0, 1].tolist() == [0, 0]
        envs.send([2, 2], [0, 1])  # 1 is due a reset, 0 steps: two answers
        seen = {}
        for _ in range(2):
            obs, _, _, truncated, info = envs.recv()
            assert not truncated.any()
            seen[info["env_id"].tolist()[0]] = obs[0, 0, 1]
        assert seen == {0: 1, 1: 0}
        obs, *_ = envs.step([2] * 4)  # all at once again
        assert obs[:2, 0, 1].tolist() == [2, 1]


def test_step_with_some_environments_due_a_reset(fragile: Client) -> None:
    with clusterenv.make_vec(Steps, 4, shards=2, cluster=fragile) as envs:
        envs.reset(seed=1)
        kill(envs, 0)
        envs.send([2], [0])
        envs.recv()
        envs.send([2], [0])  # its reset
        envs.recv()
        obs, reward, _, truncated, info = envs.step([2] * 4)
        assert truncated.tolist() == [False, True, False, False]
        assert obs[:, 0, 1].tolist() == [1, 0, 1, 1]
        assert reward.tolist() == [1, 0, 1, 1]
        assert info["_lost"].tolist() == [False, True, False, False]


def test_a_loss_during_reset_gives_the_reset_that_was_asked_for(fragile: Client) -> None:
    with clusterenv.make_vec(Steps, 4, shards=2, cluster=fragile) as envs:
        first, _ = envs.reset(seed=1)
        envs.step([2] * 4)
        kill(envs, 0)
        again, info = envs.reset(seed=1)
        np.testing.assert_array_equal(first, again)
        assert "lost" not in info
        _, _, _, truncated, _ = envs.step([2] * 4)
        assert not truncated.any()
        killed = envs.call("pid")[0]
        kill(envs, 0)
        again = envs.call("pid")  # a call is made again
        assert len(again) == 4
        assert killed not in again


class SlowToBegin(Steps):
    """Resets of seeds from 100 on take their time."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if (seed or 0) >= 100:
            time.sleep(2)
        return super().reset(seed=seed, options=options)


def test_a_shard_lost_after_its_reset_is_due_a_truncation_all_the_same(fragile: Client) -> None:
    with clusterenv.make_vec(SlowToBegin, 2, shards=2, cluster=fragile) as envs:
        envs.reset(seed=1)
        pids = envs.call("pid")

        def kill_both() -> None:
            left = envs._exchange._unanswered
            wait_until(lambda: bool(left[1]) and not left[0])  # the first has answered
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_both)
        killer.start()
        envs.reset(seed=[2, 100])
        killer.join()
        obs, _, _, truncated, info = envs.step([2] * 2)
        assert truncated.tolist() == [True, False]
        assert info["_lost"].tolist() == [True, False]
        assert obs[:, 0, 1].tolist() == [0, 1]


def test_the_policy_goes_to_the_shard_that_is_back(fragile: Client) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 5).double())
    policy = clusterenv.policies.Categorical(net)
    with clusterenv.make_vec(Steps, 2, shards=2, cluster=fragile, act="five") as envs:
        envs.sync = clusterenv.Never()
        envs.reset(seed=1)
        *_, info = envs.step(policy)
        assert info["policy_version"].tolist() == [0, 0]
        with torch.no_grad():
            net[1].weight.zero_()
            net[1].bias.copy_(torch.tensor([0, 0, 0, 0, 100]))
        kill(envs, 1)
        _, _, _, truncated, info = envs.step(policy)
        assert truncated.tolist() == [False, True]
        assert info["action"].shape == info["log_prob"].shape == (2,)
        for _ in range(2):
            *_, info = envs.step(policy)
        assert info["policy_version"].tolist() == [0, 1]  # it begins with the newest
        assert info["action"][1] == 4


def test_a_stopped_process_is_ended_after_a_deadline(fragile: Client) -> None:
    with (
        dask.config.set({"clusterenv.timeout.step": "2s"}),
        clusterenv.make_vec(Steps, 2, shards=2, cluster=fragile) as envs,
    ):
        envs.reset(seed=1)
        kill(envs, 1, signal.SIGSTOP)
        _, _, _, truncated, info = envs.step([2, 2])
        assert truncated.tolist() == [False, True]
        assert "has not answered for 2 s" in info["lost"][1]
        envs.step([2, 2])


def test_too_many_losses_end_it_with_all_that_was_seen(fragile: Client) -> None:
    rule = Restarts(1, backoff=0)
    envs = clusterenv.make_vec(Steps, 2, shards=2, cluster=fragile, restarts=rule)
    envs.reset(seed=1)
    kill(envs, 0)
    envs.step([2, 2])
    kill(envs, 0)
    with pytest.raises(errors.WorkerLost, match="shard 0 was lost 2 times"):
        envs.step([2, 2])
    assert envs.closed


def test_close_interrupts_the_wait_before_a_restart(fragile: Client) -> None:
    rule = Restarts(5, backoff=3600, backoff_max=3600)
    envs = clusterenv.make_vec(Steps, 2, shards=2, cluster=fragile, restarts=rule)
    envs.reset(seed=1)
    kill(envs, 0)
    envs.step([2, 2])
    kill(envs, 0)
    caught: list[BaseException] = []

    def step() -> None:
        try:
            envs.step([2, 2])
        except errors.ClosedError as error:
            caught.append(error)

    stepping = threading.Thread(target=step)
    stepping.start()
    assert wait_until(lambda: envs._fleet.roster[0].state == "lost", 30)
    envs.close()
    stepping.join(30)
    assert len(caught) == 1


LARGE = 12 << 20  # bytes, many times what a socket takes at once


class Wide(gym.Env[Any, Any]):
    """Large observations, and actions if told so."""

    observation_space = gym.spaces.Box(0, 255, (LARGE,), np.uint8)

    def __init__(self, action: int = 1) -> None:
        self.action_space = gym.spaces.Box(0, 255, (action,), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.now = np.zeros(LARGE, np.uint8)
        return self.now, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.now[:] += action[-1]
        return self.now, 0.0, False, False, {}

    def pid(self) -> int:
        return os.getpid()


@contextlib.contextmanager
def wide(client: Client, local: bool, **options: Any) -> Iterator[clusterenv.ClusterEnv]:
    settings = {"clusterenv.timeout.step": "2s", "clusterenv.channel.local": local}
    with (
        dask.config.set(settings),
        clusterenv.make_vec(Wide, 2, shards=2, cluster=client, **options) as envs,
    ):
        envs.reset(seed=1)
        yield envs


@pytest.mark.parametrize("local", [True, False], ids=["local", "tls"])
def test_a_process_that_stops_within_an_answer_is_ended_after_the_deadline(
    fragile: Client, local: bool
) -> None:
    with wide(fragile, local) as envs:
        pid = envs.call("pid")[1]
        envs.send(np.ones((2, 1), np.uint8))
        arrived, _, _ = select.select([envs._fleet.handles[1].connection], [], [], 30)
        assert arrived  # the answer has begun, and no socket takes all of it
        stop(pid)
        answers = {}
        for _ in range(2):
            obs, _, _, truncated, info = envs.recv()
            answers[int(info["env_id"][0])] = bool(truncated[0]), int(obs[0, 0])
        assert answers == {0: (False, 1), 1: (True, 0)}
        obs, *_ = envs.step(np.ones((2, 1), np.uint8))
        assert obs[0, -1] == 2


@pytest.mark.parametrize("local", [True, False], ids=["local", "tls"])
def test_sending_to_a_stopped_process_does_not_wait(fragile: Client, local: bool) -> None:
    with wide(fragile, local, action=LARGE) as envs:
        kill(envs, 1, signal.SIGSTOP)
        envs.send(np.ones((2, LARGE), np.uint8))
        answers = {}
        for _ in range(2):
            obs, _, _, truncated, info = envs.recv()
            answers[int(info["env_id"][0])] = bool(truncated[0]), int(obs[0, 0])
        assert answers == {0: (False, 1), 1: (True, 0)}


@pytest.mark.parametrize("seconds", ["soon", None, "10 min"])
def test_a_setting_that_is_no_time_is_refused_before_anything_starts(
    fragile: Client, seconds: Any
) -> None:
    before = footprint()
    with (
        dask.config.set({"clusterenv.timeout.call": seconds}),
        pytest.raises(errors.ConfigError, match=r"clusterenv\.timeout\.call=.* is no time"),
    ):
        clusterenv.make_vec(Steps, 2, shards=2, cluster=fragile)
    assert wait_until(lambda: not left_behind(before))
