"""The head's end, and the scheduler's: nothing is left behind, nothing that was saved is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import dask
import pytest
import torch
from conftest import wait_until
from distributed import Client

import clusterenv
from clusterenv import errors
from pipelines.dqn import DQN
from pipelines.experiment import run

TESTS = str(Path(__file__).parents[1])


def shard_threads(client: Client) -> int:
    names = client.run(lambda: [thread.name for thread in threading.enumerate()])
    return sum(name.startswith("clusterenv") for each in names.values() for name in each)


def test_a_killed_head_frees_the_workers_of_its_collector() -> None:
    with clusterenv.connect("local", n_workers=2, security=False) as client:
        source = f"""
import sys
sys.path.insert(0, {TESTS!r})
import clusterenv
from distributed import Client
from collecting import collecting
client = Client({client.scheduler.address!r})
collector = collecting(clusterenv.connect(client))
for count, batch in enumerate(collector):
    if count == 3:
        print("up", flush=True)
"""
        head = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
        assert head.stdout is not None
        assert head.stdout.readline() == "up\n"
        assert wait_until(lambda: shard_threads(client) == 6, 30)  # three of each shard
        head.kill()
        head.communicate(timeout=30)
        assert wait_until(lambda: shard_threads(client) == 0, 30)
        policy = clusterenv.policies.Categorical(torch.nn.Linear(4, 2))
        options: dict[str, Any] = {"num_envs": 2, "shards": 2, "horizon": 8, "cluster": client}
        with clusterenv.Collector("CartPole-v1", policy, **options) as following:
            assert len(following.rollout()) == 2


def test_a_lost_scheduler_ends_a_run_with_all_rows_saved(
    separate_cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    file, processes = separate_cluster
    out = tmp_path / "run"
    killer = threading.Timer(0, processes[0].send_signal, [signal.SIGKILL])

    class Watch(threading.Thread):
        def run(self) -> None:
            progress = out / "progress.csv"
            wait_until(lambda: progress.is_file() and progress.read_text().count("\n") > 2, 60)
            killer.start()

    watch = Watch()
    watch.start()
    args = DQN.preset(
        "CartPole-v1", cluster=file, shards=2, out=out, quiet=True, total_steps=10_000_000
    )
    with (
        dask.config.set({"clusterenv.timeout.scheduler": "3s", "clusterenv.watch": "500ms"}),
        pytest.raises((errors.SchedulerLost, errors.WorkerLost), match="scheduler"),
    ):
        run(DQN, args)
    watch.join()
    rows = clusterenv.open_dataset(out / "replay").count_rows()
    assert rows > 0
    assert f"{rows}," in (out / "progress.csv").read_text().splitlines()[-1]
