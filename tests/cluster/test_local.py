"""Processes of a local cluster: interrupted while they start, closed, ended with the head."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import wait_until

Head = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run_head() -> Iterator[Head]:
    """Run code in a process that leads a session of its own, as in a terminal."""
    heads: list[subprocess.Popen[str]] = []

    def run(source: str, **environ: str) -> subprocess.Popen[str]:
        pipe: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", source]
        head = subprocess.Popen(
            command, env={**os.environ, **environ}, start_new_session=True, **pipe
        )
        heads.append(head)
        return head

    yield run
    for head in heads:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        head.communicate()


def processes_of(head: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return what runs in the session of a head, dead or alive, apart from the head itself."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            ended = process.status() == psutil.STATUS_ZOMBIE
            if not ended and process.pid != head.pid and os.getsid(process.pid) == head.pid:
                found.append(process)
    return found


def importing(head: subprocess.Popen[str]) -> bool:
    """Whether the fork server imports what workers need; that takes some seconds."""
    return any(time.time() - server.create_time() > 1 for server in fork_servers(head))


def forking(head: subprocess.Popen[str]) -> bool:
    """Whether there is a worker, which has hardly begun."""
    return any(server.children() for server in fork_servers(head))


def fork_servers(head: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(head.pid).children()
    return [child for child in children if "forkserver" in " ".join(child.cmdline())]


MAKE_VEC = """
import time, clusterenv
print("starting", flush=True)
envs = clusterenv.make_vec("CartPole-v1", 4, shards=2)
time.sleep(60)
"""
COLLECTOR = """
import time, clusterenv, torch
policy = clusterenv.policies.Categorical(torch.nn.Linear(4, 2))
print("starting", flush=True)
collector = clusterenv.Collector("CartPole-v1", policy, num_envs=4, shards=2, horizon=8)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
@pytest.mark.parametrize(
    ("source", "moment", "send"),
    [
        (MAKE_VEC, importing, os.killpg),
        (MAKE_VEC, forking, os.killpg),
        (COLLECTOR, forking, os.kill),
    ],
    ids=["make_vec, importing", "make_vec, forking", "Collector, forking"],
)
def test_ctrl_c_while_workers_start_gives_one_traceback_and_leaves_nothing(
    run_head: Head,
    source: str,
    moment: Callable[[subprocess.Popen[str]], bool],
    send: Callable[[int, int], None],
) -> None:
    """A terminal sends the signal to the whole process group; others, to the head alone."""
    head = run_head(source)
    assert head.stdout is not None
    assert head.stdout.readline() == "starting\n"
    assert wait_until(lambda: moment(head), 30)
    send(head.pid, signal.SIGINT)
    _, complaints = head.communicate(timeout=60)
    assert complaints.count("Traceback") == 1, complaints
    assert complaints.endswith("\nKeyboardInterrupt\n"), complaints
    assert wait_until(lambda: not processes_of(head)), processes_of(head)


# Of two workers, one is stopped, and one holds the GIL: neither can notice anything by itself.
DEAF = """
import ctypes, os, pathlib, signal, time
import clusterenv

def hold_gil(path):
    path.touch()
    ctypes.PyDLL(None).sleep(600)

if __name__ == "__main__":
    client = clusterenv.connect("local", n_workers=2)
    stopped, busy = client.nthreads()
    os.kill(client.run(os.getpid, workers=[stopped])[stopped], signal.SIGSTOP)
    path = pathlib.Path({path!r})
    future = client.submit(hold_gil, path, workers=[busy])
    while not path.exists():
        time.sleep(0.01)
    print("deaf", flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot end deaf processes")
@pytest.mark.parametrize("fork", ["true", "false"])
def test_workers_that_cannot_notice_it_end_with_a_killed_head(
    run_head: Head, fork: str, tmp_path: Path
) -> None:
    source = DEAF.format(path=str(tmp_path / "busy"))
    head = run_head(source, DASK_CLUSTERENV__LOCAL__FORK=fork)
    assert head.stdout is not None
    assert head.stdout.readline() == "deaf\n"
    assert len(processes_of(head)) >= 3  # both workers, and Python's resource tracker
    head.kill()
    assert wait_until(lambda: not processes_of(head)), processes_of(head)


# Answers to heartbeats are late, as they are when a head has many workers.
SLOW = """
import asyncio, threading
import clusterenv
waiting = threading.Event()

def answer_late(dask_scheduler):
    answer = dask_scheduler.handlers["heartbeat_worker"]

    async def late(**heartbeat):
        waiting.set()
        await asyncio.sleep(0.3)
        return answer(**heartbeat)

    dask_scheduler.handlers["heartbeat_worker"] = late

client = clusterenv.connect("local", n_workers=2)
client.cluster.loop.add_callback(answer_late, client.cluster.scheduler)
assert waiting.wait(60)
client.close()
"""


def test_a_heartbeat_under_way_does_not_complain_of_a_cluster_that_closes(run_head: Head) -> None:
    head = run_head(SLOW)
    assert head.communicate(timeout=60) == ("", "")
    assert head.returncode == 0
