"""``clusterenv watch``: the versions of a run, from another client of its cluster."""

from __future__ import annotations

import threading

import pytest
from agents import cartpole_policy, changed
from conftest import wait_until
from distributed import Client

import clusterenv
from clusterenv.errors import ConfigError
from pipelines.tools import watch


def test_the_versions_of_a_run_are_printed_until_it_ends(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = cartpole_policy()
    printed = ""
    with clusterenv.Collector(
        "CartPole-v1", policy, num_envs=2, horizon=8, shards=1, cluster=client, name="watched"
    ) as collector:
        args = watch.Args(cluster=client.scheduler.address, run=str(collector.run))
        watching = threading.Thread(target=watch.watch, args=(args,))
        watching.start()
        for version in (1, 2, 3):

            def shown(version: int = version) -> bool:
                nonlocal printed
                printed += capsys.readouterr().out
                return f" {version - 1} " in printed

            assert wait_until(shown, 30)
            collector.publish(changed(policy, 0.1, version))
        collector.close()
        watching.join(30)
    lines = (printed + capsys.readouterr().out).splitlines()
    assert lines[0].split() == " ".join(watch.COLUMNS).split()
    assert [line.split()[1] for line in lines[1:-1]] == ["0", "1", "2", "3"]
    assert lines[-1] == "the run has ended"


def test_only_a_running_cluster_can_be_watched() -> None:
    with pytest.raises(ConfigError, match="--cluster local is no running cluster"):
        watch.Args(cluster="local")
    with pytest.raises(ConfigError, match="--last"):
        watch.Args(cluster="tcp://127.0.0.1:1", last=0)
