"""Calls of a ``ClusterEnv`` that overlap: from two threads, and with answers that come late."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import assert_same
from conftest import shard_footprint, wait_until
from distributed import Client
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from worlds import Gated, Raises, World

import clusterenv
from clusterenv import errors
from clusterenv.policies import Categorical

pytestmark = pytest.mark.usefixtures("leaves_nothing")

ACTIONS = [2, 3, 4, 5]


class Background(threading.Thread):
    """Makes a call, and keeps what it returned or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.result = error

    def finish(self) -> Any:
        self.join(30)
        assert not self.is_alive()
        return self.result


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file; environments go on when it is gone."""
    gate = tmp_path / "gate"
    yield gate
    gate.unlink(missing_ok=True)


@pytest.fixture
def envs(client: Client, gate: Path, leaves_nothing: None) -> Iterator[clusterenv.ClusterEnv]:
    factories = [partial(Gated, str(gate), index) for index in range(4)]
    with clusterenv.make_vec(factories, 4, shards=2, cluster=client) as envs:
        yield envs
        gate.unlink(missing_ok=True)  # or close() would wait


def waiting(gate: Path) -> bool:
    """Whether the first environment of each shard waits."""
    return all(gate.with_name(f"waits-{index}").exists() for index in (0, 2))


def theirs() -> SyncVectorEnv[Any, Any]:
    """Return what the environments are when their gate is open."""
    return SyncVectorEnv([World] * 4)


# Two threads


def other_calls(envs: clusterenv.ClusterEnv) -> dict[str, Callable[[], Any]]:
    return {
        "reset": envs.reset,
        "step": partial(envs.step, ACTIONS),
        "reset_async": envs.reset_async,
        "reset_wait": envs.reset_wait,
        "step_async": partial(envs.step_async, ACTIONS),
        "step_wait": envs.step_wait,
        "call_async": partial(envs.call_async, "colour"),
        "call_wait": envs.call_wait,
        "async_reset": envs.async_reset,
        "send": partial(envs.send, ACTIONS),
        "recv": envs.recv,
        "call": partial(envs.call, "colour"),
        "get_attr": partial(envs.get_attr, "colour"),
        "set_attr": partial(envs.set_attr, "colour", 5),
        "render": envs.render,
    }


@pytest.mark.parametrize("first", ["step", "recv", "reset", "call"])
def test_a_second_thread_is_refused_at_once_and_the_first_unharmed(
    envs: clusterenv.ClusterEnv, gate: Path, first: str
) -> None:
    expected = theirs()
    envs.reset(seed=1)
    expected.reset(seed=1)
    gate.touch()
    if first == "recv":
        envs.send(ACTIONS)
    calls = {
        "step": partial(envs.step, ACTIONS),
        "recv": envs.recv,
        "reset": partial(envs.reset, seed=2),
        "call": partial(envs.call, "wait"),
    }
    thread = Background(calls[first])
    assert wait_until(lambda: waiting(gate))
    assert wait_until(envs._calling.locked)  # recv() may have begun after the environments
    for name, call in other_calls(envs).items():
        with pytest.raises(errors.ResultsPending, match=rf"{name}\(\).*thread is in {first}\(\)"):
            call()
    assert issubclass(errors.ResultsPending, AlreadyPendingCallError)
    gate.unlink()
    result = thread.finish()
    if first == "step":
        assert_same(result, expected.step(ACTIONS))
    elif first == "recv":
        rows = expected.step(ACTIONS)[0]
        assert_same(result[0], rows[result[4]["env_id"]])
        envs.recv()
    elif first == "reset":
        assert_same(result, expected.reset(seed=2))
    else:
        assert result == (0, 0, 0, 0)
    assert envs.get_attr("colour") == (0, 0, 0, 0)
    assert_same(envs.step(ACTIONS), expected.step(ACTIONS))


def test_close_from_another_thread_ends_a_call_that_waits(
    envs: clusterenv.ClusterEnv, gate: Path
) -> None:
    envs.reset(seed=1)
    gate.touch()
    thread = Background(partial(envs.step, ACTIONS))
    assert wait_until(lambda: waiting(gate))
    closing = Background(envs.close)
    error = thread.finish()  # while the environments still wait
    assert isinstance(error, errors.ClosedError)
    assert r"closed while step() waited" in str(error)
    with pytest.raises(errors.ClosedError):
        envs.step(ACTIONS)
    gate.unlink()
    assert closing.finish() is None


def test_close_from_another_thread_ends_a_call_that_has_a_lost_shard_placed_again(
    gate: Path,
) -> None:
    with clusterenv.connect("local", n_workers=2) as client:
        factories = [partial(Gated, str(gate), index) for index in range(4)]
        envs = clusterenv.make_vec(factories, 4, shards=2, cluster=client)
        envs.reset(seed=1)
        pid = envs.call("pid")[0]
        gate.touch()
        os.kill(pid, signal.SIGKILL)
        thread = Background(partial(envs.step, ACTIONS))
        assert wait_until(lambda: gate.with_name("waits-0").exists(), 30)  # as it is made again
        closing = Background(envs.close)
        assert wait_until(lambda: envs.closed)
        gate.unlink()
        assert isinstance(thread.finish(), errors.ClosedError)
        assert closing.finish() is None
        assert wait_until(lambda: not any(shard_footprint(client).values()))


# Answers that come late


@pytest.mark.parametrize("mode", AutoresetMode)
def test_the_late_results_of_a_step_are_dropped_and_a_reset_must_follow(
    client: Client, gate: Path, mode: AutoresetMode
) -> None:
    factories = [partial(Gated, str(gate), index) for index in range(4)]
    with clusterenv.make_vec(factories, 4, shards=2, cluster=client, autoreset_mode=mode) as envs:
        expected = SyncVectorEnv([World] * 4, autoreset_mode=mode)
        assert_same(envs.reset(seed=1), expected.reset(seed=1))
        gate.touch()
        envs.step_async(ACTIONS)
        with pytest.raises(errors.WaitTimeout, match=r"step_wait\(\) has timed out after 0.05 s"):
            envs.step_wait(timeout=0.05)
        for call in (partial(envs.step, ACTIONS), partial(envs.send, [2], [1])):
            with pytest.raises(errors.ResetNeeded, match=r"step_wait\(\) has timed out"):
                call()
        with pytest.raises(errors.ResetNeeded, match="all environments"):
            envs.reset(options={"reset_mask": np.array([True, False, False, False])})
        gate.unlink()
        expected.step(ACTIONS)  # they did take the step
        assert_same(envs.reset(), expected.reset())
        assert_same(envs.step(ACTIONS), expected.step(ACTIONS))


@pytest.mark.parametrize("way", ["reset", "reset_async", "async_reset"])
def test_the_late_results_of_a_reset_are_not_those_of_the_next(
    envs: clusterenv.ClusterEnv, gate: Path, way: str
) -> None:
    expected, _ = theirs().reset(seed=2)
    gate.touch()
    envs.reset_async(seed=1)
    with pytest.raises(errors.WaitTimeout):
        envs.reset_wait(timeout=0)
    if way == "reset":
        thread = Background(partial(envs.reset, seed=2))
        assert wait_until(envs._calling.locked)
        gate.unlink()
        assert_same(thread.finish()[0], expected)
    elif way == "reset_async":
        envs.reset_async(seed=2)  # which does not wait for the first
        with pytest.raises(errors.WaitTimeout):
            envs.reset_wait(timeout=0)
        envs.reset_async(seed=2)
        gate.unlink()
        assert_same(envs.reset_wait(timeout=60)[0], expected)
    else:
        gate.unlink()
        envs.async_reset(seed=2)
        for _ in range(2):
            obs, *_, info = envs.recv()
            assert_same(obs, expected[info["env_id"]])


@pytest.mark.parametrize("then", ["call", "step", "send", "act"])
def test_the_late_results_of_a_call_are_dropped(client: Client, gate: Path, then: str) -> None:
    factories = [partial(Gated, str(gate), index, act="five") for index in range(4)]
    with clusterenv.make_vec(factories, 4, shards=2, cluster=client) as envs:
        expected = SyncVectorEnv([partial(World, act="five")] * 4)
        assert_same(envs.reset(seed=1), expected.reset(seed=1))
        gate.touch()
        envs.call_async("wait")
        with pytest.raises(errors.WaitTimeout):
            envs.call_wait(timeout=0.02)
        envs.call_async("nonsense")
        with pytest.raises(errors.WaitTimeout):
            envs.call_wait(timeout=0.02)
        gate.unlink()
        if then == "call":
            assert envs.call("double", 2) == (4, 4, 4, 4)
        elif then == "act":
            obs, *_, info = envs.step(Categorical(nn.Linear(3, 5)))
            assert_same(obs, expected.step(info["action"])[0])
        elif then == "send":
            rows, *_ = expected.step([1, 2, 3, 4])
            envs.send([1, 2, 3, 4])
            for _ in range(2):
                obs, *_, info = envs.recv()
                assert_same(obs, rows[info["env_id"]])
        assert_same(envs.step([1, 2, 3, 4]), expected.step([1, 2, 3, 4]))


def test_what_an_environment_raised_late_is_raised_by_the_next_call(client: Client) -> None:
    envs = clusterenv.make_vec(
        [partial(Raises, "never"), partial(Raises, "step", ValueError, "no such level")],
        2,
        shards=2,
        cluster=client,
    )
    envs.reset(seed=1)
    envs.step_async([2, 2])
    with pytest.raises((errors.WaitTimeout, ValueError)) as caught:  # it may be quick
        envs.step_wait(timeout=0)
    if isinstance(caught.value, errors.WaitTimeout):
        with pytest.raises(ValueError, match="no such level") as caught:
            envs.reset(seed=1)
    assert isinstance(caught.value, errors.EnvError)
    assert envs.closed


@pytest.mark.parametrize("timeout", [-1, "soon", float("nan"), True])
def test_a_timeout_that_is_no_number_of_seconds(envs: clusterenv.ClusterEnv, timeout: Any) -> None:
    envs.reset(seed=1)
    envs.step_async(ACTIONS)
    with pytest.raises(errors.ConfigError, match=r"timeout=5\.0"):
        envs.step_wait(timeout=timeout)
    envs.step_wait(timeout=60)


def test_send_and_recv_do_not_mix_with_asynchronous_calls(envs: clusterenv.ClusterEnv) -> None:
    envs.reset(seed=1)
    envs.step_async(ACTIONS)
    for call in (partial(envs.send, ACTIONS), envs.recv, envs.async_reset):
        with pytest.raises(errors.ResultsPending, match="pending call to `step`"):
            call()
    envs.step_wait()
    envs.send([2], [1])
    for call in (partial(envs.step_async, ACTIONS), partial(envs.call_async, "colour")):
        with pytest.raises(errors.ResultsPending, match=r"environments \[1\]"):
            call()
    expected = theirs()
    envs.reset_async(seed=4)  # a reset begins anew
    assert_same(envs.reset_wait(), expected.reset(seed=4))
    with pytest.raises(errors.NothingSent):
        envs.recv()
