"""Bad input and bad luck: an error at once, that helps, and nothing left running."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import gymnasium as gym
import numpy as np
import psutil
import pytest
from conftest import footprint, left_behind, wait_until
from distributed import Client, LocalCluster
from gymnasium.vector import AutoresetMode
from worlds import Faulty, World

import clusterenv
from clusterenv import errors

TESTS = str(Path(__file__).parents[2])

shared = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def fragile() -> Iterator[Client]:
    """A cluster of two workers that a test may harm."""
    client = clusterenv.connect("local", n_workers=2)
    yield client
    client.close()


@pytest.fixture
def envs(client: Client, leaves_nothing: None) -> Iterator[clusterenv.ClusterEnv]:
    with clusterenv.make_vec(World, 4, shards=2, cluster=client) as envs:
        yield envs


# Before anything starts


def test_an_unknown_id_starts_no_cluster_and_suggests_a_name() -> None:
    before = footprint()
    with pytest.raises(errors.UnknownEnv, match="CartPole") as caught:
        clusterenv.make_vec("CartPol-v1", 4)
    assert isinstance(caught.value, gym.error.UnregisteredEnv)
    with pytest.raises(errors.UnknownEnv, match="nomodule"):
        clusterenv.make_vec("nomodule:Thing-v0", 4)
    assert wait_until(lambda: not left_behind(before)), left_behind(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 2, "shards": 3}, r"num_envs=2 is less than shards=3.*shards=2"),
        ({"num_envs": 0}, "num_envs must be an integer, at least 1.*got 0: make_vec"),
        ({"num_envs": None}, "num_envs must be an integer, at least 1.*got None"),
        ({"num_envs": 10**30}, "num_envs must be an integer.*at most 1,048,576, got 1000"),
        ({"num_envs": 4, "shards": 1.5}, "shards must be an integer, at least 1.*got 1.5"),
        ({"num_envs": 4, "engine": []}, r"engine=\[\] is unknown; one of 'auto'"),
        ({"num_envs": 4, "engine": "turbo"}, "engine='turbo' is unknown; one of 'auto'"),
        ({"num_envs": 4, "autoreset_mode": "later"}, "AutoresetMode.NEXT_STEP"),
        ({"num_envs": 4, "cluster": "slrum"}, "did you mean 'slurm'"),
        ({"num_envs": 4, "cluster": 8786}, "cluster=8786 is a int; pass 'local'"),
        ({"num_envs": 4, "env": 5}, "env=5 is a int; pass an id"),
        ({"num_envs": 4, "env": [World, World]}, "2 factories were passed for num_envs=4"),
        (
            {"num_envs": 4, "engine": "native", "wrappers": (gym.Wrapper,)},
            "takes no wrappers",
        ),
        ({"num_envs": 4, "engine": "native", "env": World}, "needs an id or a spec"),
        ({"num_envs": 4, "wrappers": gym.Wrapper}, "must be a sequence of callables"),
        ({"num_envs": 4, "cluster": "slurm"}, "cluster='slurm', shards=4"),
    ],
)
@pytest.mark.usefixtures("client")  # its fork server stays, and is not of this call
def test_bad_arguments_are_named_with_the_right_call(
    arguments: dict[str, Any], message: str
) -> None:
    before = footprint()
    with pytest.raises(errors.ConfigError, match=message):
        clusterenv.make_vec(arguments.pop("env", "CartPole-v1"), **arguments)
    assert footprint()["processes"] == before["processes"]


def test_a_factory_that_cannot_be_pickled_is_refused_at_the_head() -> None:
    lock = threading.Lock()
    before = footprint()
    with pytest.raises(errors.ConfigError, match="cannot be sent to a worker"):
        clusterenv.make_vec(lambda: World() if lock else None, 4)  # type: ignore[arg-type,return-value]
    assert wait_until(lambda: not left_behind(before)), left_behind(before)


def test_no_workers_within_the_timeout_says_what_was_waited_for() -> None:
    with (
        LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as cluster,
        dask.config.set({"clusterenv.timeout.workers": "0.5s"}),
    ):
        with pytest.raises(errors.NoWorkers, match=r"waited 0.5 s for 2 workers at tcp.*0 came"):
            clusterenv.make_vec("CartPole-v1", 4, shards=2, cluster=cluster)
        assert cluster.status.name == "running"


# On the workers


@shared
def test_a_factory_that_raises_shows_the_traceback_of_the_worker(client: Client) -> None:
    with pytest.raises(errors.EnvError, match="no such level: 99") as caught:
        clusterenv.make_vec(Faulty, 4, shards=2, cluster=client, fault="make")
    assert "worlds.py" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "installed on the workers" not in str(caught.value)


@shared
def test_a_missing_package_is_named_and_asked_for(client: Client) -> None:
    with pytest.raises(errors.EnvError, match="Is the package installed on the workers") as caught:
        clusterenv.make_vec(Faulty, 4, shards=2, cluster=client, fault="import")
    assert "No module named 'doom'" in str(caught.value)


@shared
def test_shards_with_different_spaces_are_refused(client: Client) -> None:
    factories = [functools.partial(World, obs="box" if i < 2 else "image") for i in range(4)]
    for shards in (1, 2):
        with pytest.raises(errors.ConfigError, match="same observation_space"):
            clusterenv.make_vec(factories, 4, shards=shards, cluster=client)


@shared
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"environment 3 of shard 1 .*raised in step(.|\n)*the simulator diverged"),
        ("shape", r"observation has shape \(2,\), but the observation space says \(3,\)"),
        ("exit", r"environment 3 of shard 1 .*raised in step(.|\n)*SystemExit"),
    ],
)
def test_an_environment_that_misbehaves_is_named_and_closes_all(
    client: Client, fault: str, message: str
) -> None:
    factories = [functools.partial(Faulty, fault if i == 3 else "none") for i in range(4)]
    envs = clusterenv.make_vec(factories, 4, shards=2, cluster=client)
    envs.reset(seed=1)
    envs.step([2, 2, 2, 2])
    with pytest.raises(errors.EnvError, match=message):
        envs.step([2, 2, 2, 2])
    with pytest.raises(errors.ClosedError, match="after EnvError"):
        envs.step([2, 2, 2, 2])


@pytest.mark.parametrize("how", ["step", "send"])
def test_a_worker_that_dies_is_noticed_within_five_seconds(fragile: Client, how: str) -> None:
    factories = [functools.partial(Faulty, "die" if i == 3 else "none") for i in range(4)]
    never = clusterenv.Restarts(0)
    envs = clusterenv.make_vec(factories, 4, shards=2, cluster=fragile, restarts=never)
    envs.reset(seed=1)
    envs.step([2] * 4)
    began = time.monotonic()

    def go_on() -> None:
        if how == "step":
            envs.step([2] * 4)
        envs.send([2] * 4)
        while True:
            envs.recv()

    with pytest.raises(errors.WorkerLost, match=r"shard 1 \(environments 2–3\) on tls://"):
        go_on()
    assert time.monotonic() - began < 5
    assert envs.closed


def test_a_worker_killed_between_steps_is_noticed(fragile: Client) -> None:
    never = clusterenv.Restarts(0)
    envs = clusterenv.make_vec(World, 4, shards=2, cluster=fragile, restarts=never)
    envs.reset(seed=1)
    os.kill(envs.call("pid")[0], signal.SIGKILL)
    with pytest.raises(errors.WorkerLost, match="shard 0"):
        envs.step([2] * 4)
    # The cluster itself lives, and serves the next one when its nanny has a new worker.
    with clusterenv.make_vec(World, 4, shards=2, cluster=fragile) as again:
        again.reset(seed=1)


def test_an_environment_that_hangs_does_not_hold_up_close(
    fragile: Client, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    envs = clusterenv.make_vec(
        Faulty, 2, shards=2, cluster=fragile, fault="hang", at=1, signs=str(tmp_path)
    )
    envs.reset(seed=1)
    envs.send([2, 2])
    # A shard that has not yet read its step when the connection closes does not hang.
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    began = time.monotonic()
    envs.close(timeout=0.5)
    assert time.monotonic() - began < 5
    assert "shard 0" in caplog.text
    assert "shard 1" in caplog.text
    assert "client.restart_workers" in caplog.text


# In use


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([2, 2, 2], r"actions must have shape \(4,\).*got \(3,\)"),
        (np.full((4, 1), 2), r"got \(4, 1\)"),
        (2, r"got \(\)"),
        (np.full(4, 2.0), "must be of dtype int64, got float64"),
        (["a", "b", "c", "d"], "must be of dtype int64, got <U1"),
        ([[2], [2, 3], [2], [2]], "not a regular array"),
        (None, "dtype int64, got object|shape"),
    ],
)
def test_wrong_actions_are_refused_and_the_environment_stays_usable(
    envs: clusterenv.ClusterEnv, actions: Any, message: str
) -> None:
    envs.reset(seed=1)
    with pytest.raises(errors.ActionError, match=message):
        envs.step(actions)
    envs.step([2, 3, 4, 5])


def test_wrong_actions_of_a_dict_space_name_the_leaf(client: Client, leaves_nothing: None) -> None:
    with clusterenv.make_vec(World, 2, shards=2, cluster=client, act="dict") as envs:
        envs.reset(seed=1)
        good = envs.action_space.sample()
        with pytest.raises(
            errors.ActionError, match=r"keys \['camera', 'lives'\], got \['lives'\]"
        ):
            envs.step({"lives": good["lives"]})
        with pytest.raises(errors.ActionError, match=r"actions.lives must be of dtype int64"):
            envs.step({**good, "lives": np.zeros(2)})
        envs.step(good)


def test_step_before_reset(envs: clusterenv.ClusterEnv) -> None:
    with pytest.raises(errors.ResetNeeded, match=r"envs.reset\(seed=1\)"):
        envs.step([2] * 4)
    with pytest.raises(errors.ResetNeeded, match="without reset_mask"):
        envs.reset(options={"reset_mask": np.array([True, False, False, False])})


def test_recv_with_nothing_sent(envs: clusterenv.ClusterEnv) -> None:
    with pytest.raises(errors.NothingSent, match="async_reset"):
        envs.recv()
    envs.reset(seed=1)
    with pytest.raises(errors.NothingSent):
        envs.recv()


def test_sending_twice_to_one_environment(envs: clusterenv.ClusterEnv) -> None:
    envs.reset(seed=1)
    envs.send([2], [1])
    for call in (
        lambda: envs.send([2], [1]),
        lambda: envs.step([2] * 4),
        lambda: envs.get_attr("colour"),
    ):
        with pytest.raises(errors.ResultsPending, match=r"environments \[1\].*recv"):
            call()
    assert envs.recv()[4]["env_id"].tolist() == [1]
    envs.step([2] * 4)


@pytest.mark.parametrize("ids", [[4], [-1], [0, 0], [0.5], [], [[0]]])
def test_wrong_env_ids(envs: clusterenv.ClusterEnv, ids: Any) -> None:
    envs.reset(seed=1)
    with pytest.raises(errors.ActionError, match="env_ids must be"):
        envs.send([2] * len(ids), ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": [1, 2]}, "needs 4 seeds.*got 2"),
        ({"seed": 1.5}, "must be an integer or a list of integers, got 1.5"),
        ({"seed": "ab"}, "got 'ab'"),
        ({"seed": -1}, "must not be negative, got -1"),
        ({"options": 5}, r"options must be a dictionary, got 5: reset\(options="),
        ({"options": {"reset_mask": [True] * 4}}, "must be a NumPy array of 4 booleans"),
        ({"options": {"reset_mask": np.ones(3, bool)}}, "must be a NumPy array of 4 booleans"),
        ({"options": {"reset_mask": np.zeros(4, bool)}}, "selects no environment"),
    ],
)
def test_wrong_reset_arguments(
    envs: clusterenv.ClusterEnv, arguments: dict[str, Any], message: str
) -> None:
    envs.reset(seed=1)
    with pytest.raises(errors.ConfigError, match=message):
        envs.reset(**arguments)
    envs.step([2] * 4)


def test_a_finished_episode_needs_a_reset_when_autoreset_is_disabled(
    client: Client, leaves_nothing: None
) -> None:
    with clusterenv.make_vec(
        World, 4, shards=2, cluster=client, autoreset_mode=AutoresetMode.DISABLED
    ) as envs:
        envs.reset(seed=1)
        for _ in range(20):
            _, _, terminated, truncated, _ = envs.step([2] * 4)
            if (terminated | truncated).any():
                break
        over = np.flatnonzero(terminated | truncated).tolist()
        with pytest.raises(errors.ResetNeeded, match=rf"environments \[{over[0]}.*reset_mask"):
            envs.step([2] * 4)
        envs.reset(options={"reset_mask": terminated | truncated})
        envs.step([2] * 4)


def test_a_wrong_attribute_is_an_error_and_no_more(envs: clusterenv.ClusterEnv) -> None:
    envs.reset(seed=1)
    with pytest.raises(errors.EnvError, match="nonsense"):
        envs.get_attr("nonsense")
    with pytest.raises(errors.EnvError, match="raised in call"):
        envs.call("double")
    envs.step([2] * 4)


def test_a_failure_while_another_shard_is_still_being_made_is_reported_at_once(
    client: Client, leaves_nothing: None, caplog: pytest.LogCaptureFixture
) -> None:
    def slow() -> World:
        time.sleep(2)
        return World()

    began = time.monotonic()
    with pytest.raises(errors.EnvError, match="no such level"):
        clusterenv.make_vec([functools.partial(Faulty, "make"), slow], 2, shards=2, cluster=client)
    assert time.monotonic() - began < 6
    assert "hangs" not in caplog.text


def test_an_environment_that_raises_in_close_does_not_hold_up_anything(
    client: Client, leaves_nothing: None, caplog: pytest.LogCaptureFixture
) -> None:
    envs = clusterenv.make_vec(Faulty, 4, shards=2, cluster=client, fault="close")
    envs.reset(seed=1)
    began = time.monotonic()
    envs.close()
    assert time.monotonic() - began < 5
    assert "hangs" not in caplog.text


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import clusterenv\nclusterenv.make_vec('CartPole-v1', 2)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "if __name__ == '__main__':" in done.stderr


def test_a_script_from_standard_input_is_told_to_become_a_file() -> None:
    script = "import clusterenv\nif __name__ == '__main__':\n    clusterenv.connect()\n"
    done = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "save it as a file, and run that" in done.stderr.splitlines()[-1]


def test_a_fork_of_the_head_leaves_the_parents_environments_alone(
    envs: clusterenv.ClusterEnv,
) -> None:
    envs.reset(seed=1)
    child = os.fork()
    if child == 0:
        envs.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    envs.step([2] * 4)


def test_wrong_number_of_attribute_values(envs: clusterenv.ClusterEnv) -> None:
    with pytest.raises(errors.ConfigError, match=r"needs 4 values.*got 2"):
        envs.set_attr("colour", [1, 2])


def test_a_wrong_timeout_closes_nothing(envs: clusterenv.ClusterEnv) -> None:
    envs.reset(seed=1)
    with pytest.raises(errors.ConfigError, match="timeout='soon' is no time: 10, '10s'"):
        envs.close(timeout="soon")
    envs.step([2] * 4)


def test_a_value_that_cannot_be_pickled_is_sent_to_no_shard(envs: clusterenv.ClusterEnv) -> None:
    envs.set_attr("colour", 5)
    with pytest.raises(errors.ConfigError, match=r"cannot be sent to a worker: .*pickle"):
        envs.set_attr("colour", [7, 7, 7, threading.Lock()])
    assert envs.get_attr("colour") == (5, 5, 5, 5)


def test_use_after_close(client: Client, leaves_nothing: None) -> None:
    envs = clusterenv.make_vec(World, 4, shards=2, cluster=client)
    envs.close()
    envs.close()
    for call in (
        lambda: envs.reset(),
        lambda: envs.step([2] * 4),
        lambda: envs.recv(),
        lambda: envs.send([2] * 4),
        lambda: envs.get_attr("colour"),
        lambda: envs.render(),
    ):
        with pytest.raises(errors.ClosedError, match="make a new one"):
            call()


# What remains


def test_close_leaves_no_process_thread_file_or_port(client: Client) -> None:
    # The shared cluster has started the process that all workers are forked from.
    before = footprint()
    envs = clusterenv.make_vec("CartPole-v1", 4, shards=2)
    envs.reset(seed=1)
    assert len(footprint()["processes"]) == len(before["processes"]) + 2
    envs.close()
    assert wait_until(lambda: not left_behind(before)), left_behind(before)


def test_an_exception_leaves_no_process_thread_file_or_port() -> None:
    before = footprint()
    with pytest.raises(errors.EnvError):
        clusterenv.make_vec(Faulty, 4, shards=2, fault="make")
    assert wait_until(lambda: not left_behind(before)), left_behind(before)


def test_a_forgotten_environment_is_closed_when_it_is_collected(
    client: Client, leaves_nothing: None
) -> None:
    envs = clusterenv.make_vec(World, 4, shards=2, cluster=client)
    envs.reset(seed=1)
    del envs  # `leaves_nothing` looks for what is left on the workers


SCRIPT = """
import os, sys, time
import psutil
sys.path.insert(0, {tests!r})
import clusterenv
from worlds import Faulty
if __name__ == "__main__":
    envs = clusterenv.make_vec(Faulty, 4, shards=2, fault={fault!r})
    envs.reset(seed=1)
    envs.step([2] * 4)
    children = psutil.Process().children(recursive=True)
    print(*[child.pid for child in children], flush=True)
    {end}
"""


def run_script(end: str, fault: str = "none") -> tuple[subprocess.Popen[str], list[int]]:
    """Start a head in a process group of its own; return it and its children."""
    source = textwrap.dedent(SCRIPT).format(
        tests=TESTS,
        fault=fault,
        end=end,
    )
    head = subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert head.stdout is not None
    line = head.stdout.readline()
    if not line:
        pytest.fail(f"the head failed: {head.communicate()[1]}")
    return head, [int(pid) for pid in line.split()]


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def all_gone(pids: list[int]) -> bool:
    return not any(map(alive, pids))


def test_interpreter_exit_without_close_leaves_nothing_and_does_not_complain() -> None:
    head, children = run_script("pass")
    _, complaints = head.communicate(timeout=30)
    assert head.returncode == 0
    assert len(children) >= 2
    assert complaints == ""
    assert wait_until(lambda: all_gone(children))


def test_ctrl_c_in_the_middle_of_a_step_leaves_nothing() -> None:
    """As in a terminal: the signal reaches the whole process group."""
    head, children = run_script("print('stepping', flush=True); envs.step([2] * 4)", "hang")
    assert head.stdout is not None
    head.stdout.readline()
    os.killpg(head.pid, signal.SIGINT)
    _, complaints = head.communicate(timeout=30)
    assert head.returncode != 0
    assert "KeyboardInterrupt" in complaints
    assert wait_until(lambda: all_gone(children))


def test_a_killed_head_leaves_nothing() -> None:
    head, children = run_script("time.sleep(60)")
    head.kill()
    head.communicate(timeout=30)
    assert wait_until(lambda: all_gone(children), 30)


@pytest.fixture
def plain() -> Iterator[Client]:
    """Two workers that a head in another process can reach without certificates."""
    with clusterenv.connect("local", n_workers=2, security=False) as client:
        yield client


def test_a_killed_head_frees_the_shards_of_a_cluster_that_lives_on(plain: Client) -> None:
    source = f"""
import sys, time
sys.path.insert(0, {TESTS!r})
import clusterenv
from worlds import World
envs = clusterenv.make_vec(World, 4, shards=2, cluster={plain.scheduler.address!r})
envs.reset(seed=1)
print("up", flush=True)
time.sleep(60)
"""

    def shard_threads() -> int:
        names = plain.run(lambda: [thread.name for thread in threading.enumerate()])
        return sum(name.startswith("clusterenv") for each in names.values() for name in each)

    head = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None
    assert head.stdout.readline() == "up\n"
    assert shard_threads() == 2
    head.kill()
    head.communicate()
    assert wait_until(lambda: shard_threads() == 0, 30)


@pytest.mark.parametrize("wrong", [3, 0, "often"])
def test_a_rule_for_restarts_that_is_none_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(errors.ConfigError, match=r"restarts=clusterenv.Restarts\(5\)"):
        clusterenv.make_vec("CartPole-v1", 4, restarts=wrong)
