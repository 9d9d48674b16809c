"""Several hosts, as network namespaces: one is cut off and comes back, another is far away."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from collecting import check, collecting
from conftest import wait_until
from wire import TUN, Wire

import clusterenv
from clusterenv import Batch

NET = "10.213.77"
NAME = f"ce{os.getpid() % 10_000}"
TESTS = Path(__file__).parents[1]
PATHS = [str(TESTS), str(TESTS / "head" / "fleet")]  # of modules that the workers import


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Namespaces with an address each, on a bridge that this process is on too."""

    def __init__(self, count: int, far: int | None = None) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.count = count
        self.wire: Wire | None = None
        ip("link", "add", NAME, "type", "bridge")
        ip("addr", "add", f"{NET}.1/24", "dev", NAME)
        ip("link", "set", NAME, "up")
        for host in range(count):
            space, outer, inner = f"{NAME}-{host}", self.outer(host), f"{NAME}i{host}"
            ip("netns", "add", space)
            if host == far:
                self.wire = Wire(outer, inner, delay=0.05, loss=0.01)
            else:
                ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            ip("link", "set", inner, "netns", space)
            ip("link", "set", outer, "master", NAME)
            ip("link", "set", outer, "up")
            ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", inner)
            ip("-n", space, "link", "set", inner, "up")
            ip("-n", space, "link", "set", "lo", "up")

    def outer(self, host: int) -> str:
        return f"{NAME}o{host}"

    def address(self, host: int) -> str:
        return f"{NET}.{10 + host}"

    def start(self, host: int, *command: str) -> None:
        paths = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        words = ["ip", "netns", "exec", f"{NAME}-{host}", sys.executable, "-m", "dask", *command]
        self.processes.append(
            subprocess.Popen(words, env=environment, start_new_session=True, **quiet)  # type: ignore[call-overload]
        )

    def start_worker(self, host: int) -> None:
        where = ["--host", self.address(host), "--nthreads", "1", "--nworkers", "1"]
        self.start(host, "worker", f"tcp://{self.address(0)}:8786", *where, "--no-dashboard")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)
        if self.wire is not None:
            self.wire.close()
        for host in range(self.count):
            pids = subprocess.run(
                ["ip", "netns", "pids", f"{NAME}-{host}"], capture_output=True, text=True
            )
            for pid in pids.stdout.split():
                with contextlib.suppress(ProcessLookupError):  # ended with its parent
                    os.kill(int(pid), 9)
            subprocess.run(["ip", "link", "del", self.outer(host)], capture_output=True)
            subprocess.run(["ip", "netns", "del", f"{NAME}-{host}"], capture_output=True)
        subprocess.run(["ip", "link", "del", NAME], capture_output=True)


@pytest.fixture
def far(request: pytest.FixtureRequest) -> int | None:
    """The host that is far away, if a test is given one."""
    return getattr(request, "param", None)


@pytest.fixture
def hosts(far: int | None) -> Iterator[Hosts]:
    """A scheduler on the first of four hosts, a worker on each of the others."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    if far is not None and not TUN.exists():
        pytest.skip(f"a long cable needs {TUN}")
    made = Hosts.__new__(Hosts)
    made.processes, made.count, made.wire = [], 4, None
    try:
        made.__init__(4, far)  # type: ignore[misc]
    except (subprocess.CalledProcessError, OSError) as error:
        made.close()
        said = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"no network namespaces here: {said.strip()}")
    try:
        where = ["--host", made.address(0), "--port", "8786", "--no-dashboard"]
        made.start(0, "scheduler", *where)
        for host in (1, 2, 3):
            made.start_worker(host)
        yield made
    finally:
        made.close()


def take_until_restarted(
    collector: clusterenv.Collector, batches: list[Batch], restarts: int
) -> bool:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        batches.append(next(iter(collector)))
        newest = collector.stats().incarnations
        delivered = {(batch.shard, batch.incarnation) for batch in batches}
        if sum(newest) >= restarts and set(enumerate(newest)) <= delivered:
            return True
    return False


@pytest.mark.timeout(300)
def test_a_host_that_is_cut_off_and_comes_back(hosts: Hosts) -> None:
    batches: list[Batch] = []
    deadlines = {"clusterenv.timeout.silence": "4s", "clusterenv.timeout.close": "3s"}
    with (
        dask.config.set(deadlines),
        clusterenv.connect(f"tcp://{hosts.address(0)}:8786") as client,
    ):
        client.wait_for_workers(3, timeout=60)
        with collecting(client, num_envs=6, shards=3) as collector:
            while {batch.shard for batch in batches} != {0, 1, 2}:
                batches += collector.collect(500)
            addresses = {shard.worker for shard in collector.shards}
            assert len(addresses) == 3
            ip("link", "set", hosts.outer(1), "down")
            assert take_until_restarted(collector, batches, 1)
            ip("link", "set", hosts.outer(1), "up")
            batches += collector.collect(1_000)
            # Dask ends a worker that its scheduler gave up; its parent process starts another.
            hosts.start_worker(1)
            on_host = f"tcp://{hosts.address(1)}:"
            assert wait_until(lambda: any(w.startswith(on_host) for w in client.nthreads()), 60)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and collector.stats().moves == 0:
                batches.append(next(iter(collector)))
            assert collector.stats().moves >= 1
            batches += collector.collect(1_000)
    check(batches)


def seconds_to_connect(host: str, port: int) -> float:
    began = time.monotonic()
    socket.create_connection((host, port), timeout=10).close()
    return time.monotonic() - began


@pytest.mark.timeout(300)
@pytest.mark.parametrize("far", [2], indirect=True)
def test_a_host_that_is_far_away_is_slow_and_not_lost(hosts: Hosts) -> None:
    """Frames to it take 50 ms, and 1 % of all are lost."""
    batches: list[Batch] = []
    with clusterenv.connect(f"tcp://{hosts.address(0)}:8786") as client:
        client.wait_for_workers(3, timeout=60)
        (worker,) = (name for name in client.nthreads() if hosts.address(2) in name)
        assert seconds_to_connect(hosts.address(2), int(worker.rpartition(":")[2])) > 0.05
        with collecting(client, num_envs=6, shards=3) as collector:
            while (
                len(batches) < 300
                or {batch.shard for batch in batches} != {0, 1, 2}
                or hosts.wire.lost < 5  # type: ignore[union-attr]
            ):
                batches.append(next(iter(collector)))
            assert collector.stats().restarts == 0
    check(batches)
