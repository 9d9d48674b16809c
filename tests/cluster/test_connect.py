"""``connect`` takes whatever names a cluster, and closes only what it opened."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from conftest import wait_until
from distributed import Client, LocalCluster
from distributed.deploy import Cluster

import clusterenv
from clusterenv.cluster.jobqueue import JOBQUEUES
from clusterenv.errors import ConfigError


def test_local_is_one_single_threaded_process_per_core_on_loopback() -> None:
    client = clusterenv.connect()
    try:
        workers = client.nthreads()
        assert list(workers.values()) == [1] * len(psutil.Process().cpu_affinity())
        assert all(address.startswith("tls://127.0.0.1") for address in workers)
        assert client.direct_to_workers
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        beyond = [
            connection.laddr
            for process in processes
            for connection in process.net_connections()
            if connection.status == psutil.CONN_LISTEN and connection.laddr.ip != "127.0.0.1"
        ]
        assert beyond == []
    finally:
        client.close()
    assert client.cluster.status.name == "closed"


def test_defaults_come_from_dasks_configuration() -> None:
    with dask.config.set({"clusterenv.local.n-workers": 3}):
        client = clusterenv.connect("local")
    assert len(client.nthreads()) == 3
    client.close()


def test_settings_come_from_environment_variables_too() -> None:
    code = "import clusterenv; print(clusterenv.config.get('local.n-workers'))"
    environment = {**os.environ, "DASK_CLUSTERENV__LOCAL__N_WORKERS": "5"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "5", done.stderr


def test_news_of_an_unknown_worker_do_no_harm() -> None:
    def lose(dask_scheduler: Any) -> None:
        (told,) = (
            plugin
            for plugin in dask_scheduler.plugins.values()
            if type(plugin).__name__ == "WorkerStatusPlugin"
        )
        told.remove_worker(dask_scheduler, "tls://127.0.0.1:1")

    client = clusterenv.connect("local", n_workers=1, set_as_default=False)
    cluster = client.cluster
    client.run_on_scheduler(lose)
    cluster.scale(2)
    assert wait_until(lambda: len(cluster.scheduler_info["workers"]) == 2)  # it still listens
    client.close()
    assert cluster.status.name == "closed"


def test_a_dashboard_address_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = clusterenv.connect("local", n_workers=1, dashboard_address=f"127.0.0.1:{port}")
    assert client.cluster.scheduler.http_server.port == port
    client.close()


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" + 100 * b" "])
def test_a_server_that_is_no_scheduler_ends_the_attempt(words: bytes) -> None:
    connections = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # until the socket is closed
            while True:
                connections.append(server.accept()[0])
                connections[-1].sendall(words)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(ConfigError, match=rf"no scheduler answers at {address} .*dashboard"):
            clusterenv.connect(address, timeout="1 s")
        gc.collect()  # what was not wholly made does not wait for anything
        assert time.monotonic() - begun < 15
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    for connection in connections:
        connection.close()


def test_a_cluster_of_the_user_is_never_closed(tmp_path: Path) -> None:
    with LocalCluster(
        n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0"
    ) as cluster:
        file = tmp_path / "scheduler.json"
        file.write_text(json.dumps(cluster.scheduler.identity()))
        for way in (cluster, cluster.scheduler_address, str(file), file):
            client = clusterenv.connect(way)
            assert client.direct_to_workers
            assert client.submit(lambda: 5).result() == 5
            client.close()
            with clusterenv.make_vec("CartPole-v1", 2, cluster=way) as envs:
                envs.reset(seed=1)
            assert cluster.status.name == "running"


def test_a_direct_client_of_the_user_is_used_as_it_is_and_left_open(client: Client) -> None:
    assert clusterenv.connect(client) is client
    with clusterenv.make_vec("CartPole-v1", 2, shards=2, cluster=client) as envs:
        envs.reset(seed=1)
    assert client.status == "running"


def test_an_indirect_client_gets_a_direct_companion(client: Client) -> None:
    with Client(client.scheduler.address, set_as_default=False) as theirs:
        companion = clusterenv.connect(theirs)
        assert companion is not theirs
        assert companion.direct_to_workers
        companion.close()
        assert theirs.status == "running"


def test_clients_that_cannot_serve_are_refused(client: Client) -> None:
    closed = Client(client.scheduler.address, set_as_default=False)
    closed.close()
    with pytest.raises(ConfigError, match="the Client is closed"):
        clusterenv.connect(closed)
    with pytest.raises(ConfigError, match=r"takes no further options, got \['timeout'\]"):
        clusterenv.connect(client, timeout=3)


def test_an_address_where_nobody_listens() -> None:
    told = r"no scheduler answers at tcp://127\.0\.0\.1:1 .*is the scheduler running"
    with (
        dask.config.set({"clusterenv.timeout.connect": "1s"}),
        pytest.raises(ConfigError, match=told),
    ):
        clusterenv.connect("tcp://127.0.0.1:1")


def test_a_scheduler_that_is_just_starting_is_waited_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    words = ["--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
    scheduler = subprocess.Popen([sys.executable, "-m", "dask", "scheduler", *words])
    try:
        clusterenv.connect(f"tcp://127.0.0.1:{port}", set_as_default=False).close()
    finally:
        scheduler.terminate()
        scheduler.wait()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("locla", "'local'"),
        ("nowhere.json", "scheduler file"),
        ("", "address"),
        ("x" * 5000, "address"),
    ],
)
def test_names_of_nothing(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        clusterenv.connect(name)


@pytest.mark.parametrize("text", ["no store", "{}", "[1]", '{"address": 5}'])
def test_a_file_that_names_no_scheduler_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "scheduler.json"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match=r"scheduler\.json names no scheduler; .*--scheduler-file"
    ):
        clusterenv.connect(path)


def test_a_jobqueue_name_without_dask_jobqueue_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
    with pytest.raises(ConfigError, match=r"pip install 'clusterenv\[hpc\]'"):
        clusterenv.connect("slurm")


def test_jobqueue_names_are_classes_of_dask_jobqueue() -> None:
    jobqueue = pytest.importorskip("dask_jobqueue")
    for name in JOBQUEUES.values():
        assert issubclass(getattr(jobqueue, name), Cluster)


def test_a_jobqueue_cluster_prints_the_script_that_the_configuration_asks_for(
    tmp_path: Path,
) -> None:
    """The class is found, configured by Dask's own settings, and closed with its client."""
    pytest.importorskip("dask_jobqueue")
    settings: dict[str, Any] = {
        "jobqueue.slurm.cores": 1,
        "jobqueue.slurm.memory": "1GB",
        "jobqueue.slurm.interface": "lo",
        "jobqueue.slurm.walltime": "00:07:00",
        "jobqueue.slurm.scheduler-options": {"dashboard_address": None},
        "jobqueue.slurm.shared-temp-directory": str(tmp_path),
    }
    with dask.config.set(settings):
        client = clusterenv.connect("slurm")
        try:
            assert "#SBATCH -t 00:07:00" in client.cluster.job_script()
        finally:
            client.close()
    assert client.cluster.status.name == "closed"


@pytest.mark.parametrize(("local", "kind"), [(False, "SSLSocket"), (True, "socket")])
def test_steps_travel_under_tls_unless_they_stay_on_the_machine(local: bool, kind: str) -> None:
    with (
        dask.config.set({"clusterenv.channel.local": local}),
        clusterenv.make_vec("CartPole-v1", 4, shards=2) as envs,
    ):
        envs.reset(seed=1)
        envs.step([0, 1, 0, 1])
        envs.async_reset(seed=1)
        for _ in range(50):
            obs, *_, info = envs.recv()
            envs.send([0] * len(obs), info["env_id"])
        socks = [handle.connection._socket._sock for handle in envs._fleet.handles]
        assert {type(sock).__name__ for sock in socks} == {kind}
        assert all((sock.family == socket.AF_UNIX) is local for sock in socks)


def test_workers_that_are_threads_of_the_head_serve_too() -> None:
    with LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster:
        envs = clusterenv.make_vec("CartPole-v1", 2, cluster=cluster)
        assert envs.reset(seed=1)[0].shape == (2, 4)
        envs.close()
