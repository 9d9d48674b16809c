"""The doctor on real clusters."""

from __future__ import annotations

import dask
import pytest
from distributed import Client

from clusterenv import doctor


def test_a_healthy_cluster_is_ready(
    client: Client, leaves_nothing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["--cluster", client.scheduler.address, "--env", "CartPole-v1"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("ready\n")
    assert "TLS         yes" in said
    assert said.count("3 workers on") <= 1  # a note on machines with fewer cores
    for worker in client.nthreads():
        assert f"    {worker}: 3." in said  # Python's version and the others
        assert f"to {worker}: " in said
        assert f"{worker} on " in said
    assert "MB/s" in said
    assert "environment CartPole-v1: " in said
    assert "change:" not in said


def test_an_environment_that_workers_cannot_make_is_what_to_change(
    client: Client, leaves_nothing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["--cluster", client.scheduler.address, "--env", "Nowhere-v1"]) == 1
    said = capsys.readouterr().out
    assert "change: Nowhere-v1 does not run on the workers" in said
    assert said.endswith("not ready\n")


def test_a_cluster_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with dask.config.set({"clusterenv.timeout.connect": "1s"}):
        assert doctor.main(["--cluster", "tcp://127.0.0.1:1"]) == 1
    assert "change: no cluster: " in capsys.readouterr().out


def test_a_local_cluster_is_started_and_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--workers", "1"]) == 0
    assert capsys.readouterr().out.endswith("ready\n")
