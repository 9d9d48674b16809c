"""Fixtures shared by all tests: real local clusters, and checks for what is left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
import psutil
import pytest
from distributed import Client

import clusterenv


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """Three worker processes that all tests share.

    Dask's configuration holds the certificates, also that of processes which tests start, so
    that they may connect by address too.
    """
    client = clusterenv.connect("local", n_workers=3)
    keys = {
        "ca-file": client.security.tls_ca_file,
        "client.cert": client.security.tls_client_cert,
        "client.key": client.security.tls_client_key,
    }
    for key, pem in keys.items():
        name = key.upper().replace("-", "_").replace(".", "__")
        os.environ[f"DASK_DISTRIBUTED__COMM__TLS__{name}"] = pem
    with dask.config.set({f"distributed.comm.tls.{key}": pem for key, pem in keys.items()}):
        yield client
    client.close()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for a condition; return whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def footprint() -> dict[str, set[str]]:
    """Return what this process holds: children, threads, open files and sockets."""
    process = psutil.Process()
    return {
        "processes": set(filter(None, map(_name, process.children(recursive=True)))),
        "threads": {
            thread.name for thread in threading.enumerate() if thread.name.startswith("clusterenv")
        },
        "connections": {
            f"{connection.laddr} {connection.raddr} {connection.status}"
            for connection in process.net_connections()
        },
        "files": {file.path for file in process.open_files()},
    }


def _name(child: psutil.Process) -> str | None:
    try:
        # Python's own helper serves the whole process until its end.
        tracker = "resource_tracker" in " ".join(child.cmdline())
        return None if tracker else f"{child.pid} {child.name()}"
    except psutil.NoSuchProcess:  # it has ended since
        return None


def left_behind(before: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return what this process holds and did not hold before; others' leftovers may go.

    The shared cluster's own processes connect to its scheduler, in this one, as they like.
    """
    listening = [name.split(" () ")[0] for name in before["connections"] if "LISTEN" in name]
    now = footprint()
    now["connections"] = {
        name for name in now["connections"] if not any(address in name for address in listening)
    }
    return {kind: now[kind] - before[kind] for kind in now if now[kind] - before[kind]}


def shard_footprint(client: Client) -> dict[str, list[str]]:
    """Return what shards hold on every worker: threads, and actors that Dask still knows."""

    def look(dask_worker: object) -> list[str]:
        threads = [t.name for t in threading.enumerate() if t.name.startswith("clusterenv")]
        return threads + [str(key) for key in dask_worker.state.actors]  # type: ignore[attr-defined]

    return client.run(look)  # type: ignore[no-any-return]


def memory(client: Client) -> list[int]:
    """Return the resident bytes of this process and of every worker."""
    workers = client.run(lambda: psutil.Process().memory_info().rss)
    return [psutil.Process().memory_info().rss, *workers.values()]


@pytest.fixture
def leaves_nothing(client: Client) -> Iterator[None]:
    """Fail a test after which a shard's thread or actor remains on the shared workers."""
    yield
    assert wait_until(lambda: not any(shard_footprint(client).values())), shard_footprint(client)


@pytest.fixture
def separate_cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and two workers, each a process that can be killed by itself."""
    file = tmp_path / "scheduler.json"
    dask_cli = [sys.executable, "-m", "dask"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    where = ["--host", "127.0.0.1", "--no-dashboard"]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
    commands = [["scheduler", *where, "--port", "0", "--scheduler-file", str(file)]]
    commands += 2 * [
        ["worker", *where, "--nthreads", "1", "--nworkers", "1", "--scheduler-file", str(file)]
    ]
    processes = [subprocess.Popen([*dask_cli, *c], env=env, **quiet) for c in commands]  # type: ignore[call-overload]
    try:
        assert wait_until(file.exists, 30)
        yield str(file), processes
    finally:
        for process in processes:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # ended with its scheduler
                    child.kill()
            process.kill()
            process.wait(10)


@pytest.fixture(autouse=True, scope="session")
def _quiet_sdl() -> None:
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
