"""Evaluator: exactly the published version, exactly so many episodes, and nothing left behind."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
from agents import Cycle, cartpole_policy
from conftest import footprint, left_behind, shard_footprint, wait_until
from distributed import Client
from torch import nn
from worlds import CountsSteps, Faulty, Gated, Slow

import clusterenv
from clusterenv import Evaluator
from clusterenv.errors import ClosedError, ConfigError, Diverged, EnvError, WaitTimeout, WorkerLost
from clusterenv.head.evaluate import remote
from clusterenv.policies import Categorical, Context, Decision, Policy

pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Says(Policy):
    """Always chooses the action that its weight says."""

    def __init__(self, value: int = 0) -> None:
        super().__init__()
        self.says = nn.Parameter(torch.full((512,), float(value)))

    def set(self, value: int) -> Says:
        with torch.no_grad():
            self.says.fill_(value)
        return self

    def act(self, obs: Any, context: Context) -> Decision:
        assert self.says.min() == self.says.max()  # all of one version
        return Decision(self.says[0].long().expand(len(context.envs)))


def evaluate(evaluator: Evaluator, policy: Policy, version: int) -> clusterenv.Evaluation:
    evaluator.publish(policy, version)
    evaluator.wait(60)
    (evaluation,) = evaluator
    return evaluation


def worker_of(client: Client) -> str:
    """Return the worker that evaluates."""
    held = client.has_what()
    (worker,) = [
        worker for worker, keys in held.items() if any("evaluator" in str(key) for key in keys)
    ]
    return str(worker)


def test_every_evaluation_plays_the_same_episodes(client: Client) -> None:
    policy = cartpole_policy()
    options: dict[str, Any] = {"episodes": 5, "num_envs": 2, "cluster": client}
    with Evaluator("CartPole-v1", policy, seed=3, **options) as evaluator:
        first, again = (evaluate(evaluator, policy, version) for version in (1, 2))
        other = evaluate(evaluator, cartpole_policy(7), 3)
    assert (first.version, again.version, len(first.returns)) == (1, 2, 5)
    np.testing.assert_array_equal(first.returns, again.returns)
    np.testing.assert_array_equal(first.lengths, again.lengths)
    assert not np.array_equal(first.returns, other.returns)
    low, high = first.interval
    assert low < first.mean < high
    with Evaluator("CartPole-v1", policy, seed=3, deterministic=False, **options) as sampling:
        drawn, again = (evaluate(sampling, policy, version) for version in (1, 2))
    np.testing.assert_array_equal(drawn.returns, again.returns)  # the same random numbers too
    assert not np.array_equal(drawn.returns, first.returns)


def test_the_newest_version_replaces_one_that_has_not_begun(client: Client, tmp_path: Path) -> None:
    gate, policy = tmp_path / "gate", Says(2)
    with Evaluator(lambda: Gated(str(gate)), policy, episodes=1, cluster=client) as evaluator:
        gate.touch()
        evaluator.publish(policy.set(3), 1)
        assert wait_until((tmp_path / "waits-0").exists)
        replaced = [evaluator.publish(policy.set(version), version) for version in (2, 3, 4)]
        assert replaced == [None, 2, 3]
        policy.set(99)  # what was published is a copy
        assert list(evaluator.results()) == []
        with pytest.raises(WaitTimeout, match=r"did not end within 0\.05 s"):
            evaluator.wait(0.05)
        gate.unlink()
        evaluator.wait(60)
        assert [evaluation.version for evaluation in evaluator] == [1, 4]


def test_the_published_weights_act(client: Client) -> None:
    policy = Says()
    with Evaluator(lambda: CountsSteps(3), policy, episodes=2, cluster=client) as evaluator:
        for action in (1, 4, 2):
            assert (
                evaluate(evaluator, policy.set(action), action).returns.tolist()
                == [3.0 * action] * 2
            )


def test_it_takes_a_worker_without_shards(client: Client) -> None:
    policy = cartpole_policy()
    options: dict[str, Any] = {"num_envs": 2, "horizon": 8, "shards": 2, "cluster": client}
    with (
        clusterenv.Collector("CartPole-v1", policy, **options) as collector,
        Evaluator("CartPole-v1", policy, episodes=2, cluster=collector.client) as evaluator,
    ):
        assert worker_of(client) not in {shard.worker for shard in collector.shards}
        assert evaluator.client is client
        assert evaluate(evaluator, policy, 1).version == 1
        assert len(collector.rollout()) == 2


def test_it_moves_to_a_worker_that_joins(client: Client) -> None:
    policy = cartpole_policy()
    with clusterenv.connect("local", n_workers=1) as own:
        options: dict[str, Any] = {"num_envs": 1, "horizon": 8, "shards": 1, "cluster": own}
        with (
            clusterenv.Collector("CartPole-v1", policy, **options) as collector,
            Evaluator("CartPole-v1", policy, episodes=2, cluster=own) as evaluator,
        ):
            assert worker_of(own) == collector.shards[0].worker
            own.cluster.scale(2)
            own.wait_for_workers(2, timeout=60)
            assert evaluate(evaluator, policy, 1).version == 1
            assert worker_of(own) != collector.shards[0].worker


def test_a_lost_worker_is_replaced_and_the_evaluation_repeated(tmp_path: Path) -> None:
    policy = Says()
    with clusterenv.connect("local", n_workers=2) as own:
        env = lambda: Slow(0.02, length=100)  # noqa: E731
        with Evaluator(env, policy, episodes=1, cluster=own) as evaluator:
            worker = worker_of(own)
            (process,) = own.run(os.getpid, workers=[worker]).values()
            evaluator.publish(policy, 1)
            key = evaluator._remote._actor.key
            assert wait_until(lambda: _steps(own, worker, key) > 3, 30)
            os.kill(process, signal.SIGKILL)
            evaluator.wait(60)
            (evaluation,) = evaluator.results()
            assert (evaluation.version, evaluation.lengths.tolist()) == (1, [100])
            assert worker_of(own) != worker


def test_a_worker_that_leaves_while_the_evaluation_is_placed_is_not_waited_for(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen, choose = iter(["tls://127.0.0.1:1"]), remote.choose_worker  # it has left by now
    policy = Says(2)
    with Evaluator(lambda: CountsSteps(3), policy, episodes=1, cluster=client) as evaluator:
        evaluator._remote._release()  # as if its worker was lost
        monkeypatch.setattr(remote, "choose_worker", lambda *args: next(chosen, choose(*args)))
        assert evaluate(evaluator, policy, 1).returns.tolist() == [6.0]
        assert worker_of(client) in client.nthreads()
    assert "tls://127.0.0.1:1 left before it took clusterenv-evaluator" in caplog.text


def _steps(client: Client, worker: str, key: str) -> int:
    def steps(dask_worker: Any) -> int:
        return int(dask_worker.state.actors[key]._player.steps)

    (found,) = client.run(steps, workers=[worker]).values()
    return int(found)


def test_workers_that_are_lost_again_and_again_end_it(caplog: pytest.LogCaptureFixture) -> None:
    policy = Says(2)
    with clusterenv.connect("local", n_workers=1) as own:
        restarts = clusterenv.Restarts(1, backoff=0.1)
        env = lambda: Faulty("die", at=2)  # noqa: E731
        with Evaluator(env, policy, episodes=9, num_envs=1, restarts=restarts, cluster=own) as dies:
            dies.publish(policy, 5)
            with pytest.raises(
                WorkerLost, match=r"version 5 was lost 2 times, and Restarts\(count=1"
            ):
                dies.wait(100)
            with pytest.raises(WorkerLost):
                list(dies.results())
            with pytest.raises(WorkerLost):
                dies.publish(policy, 6)


def test_an_environment_that_hangs_counts_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    policy = Says(2)
    with (
        dask.config.set({"clusterenv.timeout.step": "0.5s", "clusterenv.timeout.close": "0.5s"}),
        clusterenv.connect("local", n_workers=1) as own,
    ):
        env = lambda: Faulty("hang", at=3)  # noqa: E731
        restarts = clusterenv.Restarts(0)
        with Evaluator(
            env, policy, episodes=9, num_envs=1, restarts=restarts, cluster=own
        ) as hangs:
            hangs.publish(policy, 1)
            with pytest.raises(WorkerLost, match=r"(?s)version 1 was lost 1 times.*made no step"):
                hangs.wait(60)


def test_a_killed_head_frees_the_worker(client: Client) -> None:
    source = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import clusterenv
from agents import Cycle
from worlds import Slow
policy = Cycle()
evaluator = clusterenv.Evaluator(
    lambda: Slow(0.01), policy, episodes=1, cluster={client.scheduler.address!r}
)
evaluator.publish(policy, 1)
print("up", flush=True)
evaluator.wait()
"""
    head = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None
    assert head.stdout.readline() == "up\n"
    worker = worker_of(client)
    (key,) = [key for key in client.has_what()[worker] if "evaluator" in str(key)]
    assert wait_until(lambda: _steps(client, worker, key) > 1)  # it never ends by itself
    head.kill()
    head.communicate(timeout=30)
    assert wait_until(lambda: not any(shard_footprint(client).values()), 30)


@pytest.mark.parametrize(("fault", "at"), [("raise", 2), ("make", 0), ("shape", 1)])
def test_an_environment_that_raises_gives_its_error(client: Client, fault: str, at: int) -> None:
    policy = Says(2)
    with (
        pytest.raises(EnvError, match="of the evaluator on"),
        Evaluator(lambda: Faulty(fault, at=at), policy, episodes=9, cluster=client) as evaluator,
    ):
        evaluate(evaluator, policy, 1)


def test_what_cannot_be_evaluated_is_refused(client: Client) -> None:
    policy = cartpole_policy()
    with Evaluator("CartPole-v1", policy, episodes=1, cluster=client) as evaluator:
        nan = cartpole_policy()
        with torch.no_grad():
            next(nan.parameters()).fill_(math.nan)
        with pytest.raises(Diverged):
            evaluator.publish(nan, 1)
        with pytest.raises(ConfigError, match="publish the policy"):
            evaluator.publish(Says(), 1)
        with pytest.raises(ConfigError, match=r"epsilon=nan.*publish\(policy, version, epsilon="):
            evaluator.publish(policy, 1, epsilon=math.nan)
        assert evaluate(evaluator, policy, 2).version == 2


@pytest.mark.parametrize(
    ("env", "policy", "message"),
    [
        ("MountainCar-v0", cartpole_policy(), r"Box.*\(2,\).*1x2 and 4x16"),
        ("CartPole-v1", Categorical(nn.Linear(4, 3)), r"Discrete\(2\)"),
        ("Acrobot-v1", Categorical(nn.Linear(6, 2)), r"among 2 actions, and there are 3"),
    ],
)
def test_a_policy_of_other_spaces_is_refused_at_once(
    client: Client, env: str, policy: Policy, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)a Categorical .*does not fit the env.*{message}"):
        Evaluator(env, policy, episodes=1, cluster=client)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episodes": 0}, "episodes must be an integer, at least 1.*got 0"),
        ({"num_envs": 0}, "num_envs must be .*got 0"),
        ({"deterministic": "yes"}, "deterministic must be True or False"),
        ({"restarts": 3}, "restarts=3 is no rule"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Evaluator("CartPole-v1", cartpole_policy(), **options)
    with pytest.raises(ConfigError, match="policy is a Linear; wrap it"):
        Evaluator("CartPole-v1", nn.Linear(4, 2))  # type: ignore[arg-type]


def test_closing_in_the_middle_leaves_nothing(client: Client) -> None:
    before = footprint()
    policy = Cycle()
    evaluator = Evaluator(lambda: Slow(0.01), policy, episodes=1, cluster=client)  # never ends
    evaluator.publish(policy, 1)
    key = evaluator._remote._actor.key
    assert wait_until(lambda: _steps(client, worker_of(client), key) > 1)
    began = time.monotonic()
    evaluator.close()
    assert time.monotonic() - began < 5
    assert wait_until(lambda: not any(shard_footprint(client).values()))
    assert not left_behind(before).get("threads")
    with pytest.raises(ClosedError):
        evaluator.publish(policy, 2)


def test_one_that_is_forgotten_closes_itself(client: Client) -> None:
    evaluator = Evaluator("CartPole-v1", cartpole_policy(), episodes=1, cluster=client)
    del evaluator
    assert wait_until(lambda: not any(shard_footprint(client).values()))
