"""Processes are tuned where they are ours, or where the user allows it, and nowhere else."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

import dask
import pytest
import torch
from distributed import Client, LocalCluster

import clusterenv
from clusterenv.cluster.jobqueue import job_options
from clusterenv.data.processes import OWN_WORKER, this_process
from clusterenv.errors import ConfigError
from clusterenv.policies import Context, Decision, Policy
from clusterenv.worker.tuning import keep_freed_memory, may_tune

HEAD, ELSEWHERE = this_process(), (0, 0)

_FAULTS = """
import resource
import numpy as np
from clusterenv.worker.tuning import keep_freed_memory


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        np.empty(1 << 20, np.uint8)[:] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


given_back = faults()
assert keep_freed_memory()
faults()
print(given_back, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no mallopt")
def test_an_array_of_the_same_size_takes_no_page_from_the_system() -> None:
    environ = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536"}  # as Dask's nannies do
    shown = subprocess.run(
        [sys.executable, "-c", _FAULTS], env=environ, capture_output=True, text=True, check=True
    ).stdout
    given_back, kept = map(int, shown.split())
    assert kept < given_back / 10


@pytest.mark.parametrize("ours", [True, False])
def test_a_process_is_tuned_if_it_is_ours_or_if_the_user_says_so(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OWN_WORKER, raising=False)
    if ours:
        monkeypatch.setenv(OWN_WORKER, "1")
    assert may_tune("auto", ELSEWHERE) is ours
    assert may_tune(True, ELSEWHERE)
    assert not may_tune(False, ELSEWHERE)
    assert not may_tune(True, HEAD)  # a worker that is a thread of the head


def test_an_unknown_setting_is_named() -> None:
    with (
        dask.config.set({"clusterenv.worker.tune": "yes"}),
        pytest.raises(ConfigError, match=r"clusterenv\.worker\.tune='yes'; one of 'auto', True"),
    ):
        clusterenv.make_vec("CartPole-v1", 1)


def test_jobs_know_that_they_are_ours() -> None:
    options = job_options({"job_script_prologue": ["module load python"]}, {})
    assert options["job_script_prologue"] == ["module load python", f"export {OWN_WORKER}=1"]
    settings = {"job-script-prologue": ["module load cuda"]}
    assert job_options({}, settings)["job_script_prologue"][0] == "module load cuda"


class Threads(Policy):
    """Tells how many threads torch uses where it acts."""

    def act(self, obs: Any, context: Context) -> Decision:
        actions = torch.zeros(len(context.envs), dtype=torch.int64)
        return Decision(actions, {"threads": torch.full(actions.shape, torch.get_num_threads())})


def kept() -> bool:
    """Whether malloc was told to keep freed memory."""
    return keep_freed_memory.cache_info().currsize > 0


def use(client: Client, tune: bool | str) -> tuple[int, int, bool]:
    """Return torch's threads in stepping and in collecting shards, and whether memory is kept."""
    client.run(torch.set_num_threads, 2)
    client.run(keep_freed_memory.cache_clear)
    with dask.config.set({"clusterenv.worker.tune": tune}):
        with clusterenv.make_vec("CartPole-v1", 2, shards=1, cluster=client) as envs:
            envs.reset(seed=1)
            *_, info = envs.step(Threads())
        with clusterenv.Collector(
            "CartPole-v1", Threads(), num_envs=2, horizon=4, shards=1, cluster=client
        ) as collector:
            (batch,) = collector.rollout()
    (memory,) = client.run(kept).values()
    return int(info["threads"][0]), int(batch["threads"][0, 0]), memory


def test_workers_that_others_may_share_are_left_as_they_are() -> None:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        assert use(client, "auto") == (2, 2, False)
        assert use(client, True) == (1, 1, True)


def test_workers_of_our_own_clusters_are_tuned() -> None:
    with clusterenv.connect("local", n_workers=1, set_as_default=False) as client:
        assert use(client, False) == (2, 2, False)
        assert use(client, "auto") == (1, 1, True)
