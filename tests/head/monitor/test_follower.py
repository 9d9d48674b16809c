"""Following a run: from a second process, from its beginning, and to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import cartpole_policy, changed
from conftest import wait_until
from distributed import Client

import clusterenv
from clusterenv.errors import ConfigError
from clusterenv.head.monitor.runs import register
from clusterenv.sync.announcement import FORMAT

FOLLOWER = """
import sys, clusterenv
client = clusterenv.connect(sys.argv[1])
for announcement in clusterenv.follow(client, sys.argv[2]):
    told = announcement.version, sorted(announcement.divergences), dict(announcement.scalars)
    print(*told, announcement.run, flush=True)
print("ended", flush=True)
client.close()
"""


def collecting(client: Client, **options: Any) -> clusterenv.Collector:
    given = {"num_envs": 4, "horizon": 8, "shards": 2, "cluster": client, **options}
    return clusterenv.Collector("CartPole-v1", cartpole_policy(), **given)


def test_a_second_process_follows_a_run_from_its_newest_version_to_its_end(
    client: Client, tmp_path: Path
) -> None:
    script = tmp_path / "follower.py"
    script.write_text(FOLLOWER)
    policy = cartpole_policy()
    with collecting(client, name="followed", sync=clusterenv.Divergence(9.0)) as collector:
        collector.rollout()
        collector.publish(changed(policy, 0.1, 1))
        assert wait_until(lambda: len(client.get_events(collector.topic)) == 2)
        command = [sys.executable, str(script), client.scheduler.address, "followed"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
            assert follower.stdout is not None
            said = [follower.stdout.readline().strip()]
            for seed in (2, 3):
                collector.publish(changed(policy, 0.1, seed), epsilon=seed / 10)
                said.append(follower.stdout.readline().strip())
            collector.close()
            said += follower.stdout.read().split("\n")[:1]
            assert follower.wait(30) == 0
    assert said == [
        "1 [0] {} followed",
        "2 [0] {'epsilon': 0.2} followed",
        "3 [0] {'epsilon': 0.3} followed",
        "ended",
    ]


def test_events_of_a_run_show_its_versions(client: Client) -> None:
    with collecting(client) as collector:
        collector.publish(changed(cartpole_policy(), 0.1, 1), epsilon=0.5)

        def newest() -> Any:
            return client.get_events(collector.topic)[-1][1]

        assert wait_until(lambda: newest()["version"] == 1)
        assert newest()["run"] == collector.name
        assert newest()["scalars"] == {"epsilon": 0.5}
        assert newest()["digest"] > 0
        assert newest()["format"] == FORMAT


def test_a_follower_of_a_head_that_was_killed_ends(client: Client) -> None:
    head = Client(client.scheduler.address, security=client.security, set_as_default=False)
    register(head, "gone", 21, "A")
    following = clusterenv.follow(client, "gone")
    head.close()
    assert list(following) == []


def test_a_follower_must_name_one_of_several_runs(client: Client) -> None:
    with pytest.raises(ConfigError, match=r"no run was named; .* none: begin one first"):
        clusterenv.follow(client)
    with collecting(client, name="a") as first:
        assert next(clusterenv.follow(client)).run == "a"
        with collecting(client, name="b"):
            with pytest.raises(ConfigError, match=r"'a' \(CartPole-v1\), 'b' \(CartPole-v1\)"):
                clusterenv.follow(client)
            with pytest.raises(ConfigError, match=r"there is no run 'c'; .* follow\(client, 'b'\)"):
                clusterenv.follow(client, "c")
            assert next(clusterenv.follow(client, first.run)).run == "a"


def test_a_message_of_a_newer_version_is_refused_by_followers_and_ignored_by_shards(
    client: Client,
) -> None:
    with collecting(client) as collector:
        following = clusterenv.follow(client)
        message = {"kind": "version", "format": FORMAT + 1, "version": 10**6}
        assert next(following).version == 0
        client.log_event(collector.topic, message)
        client.log_event(collector.topic, "not ours at all")
        with pytest.raises(ConfigError, match="pip install --upgrade clusterenv"):
            next(following)
        assert {batch.policy_version for batch in collector.rollout()} == {0}


def test_step_policy_announces_its_versions(client: Client) -> None:
    policy = cartpole_policy()
    with clusterenv.make_vec("CartPole-v1", 4, shards=2, cluster=client) as envs:
        envs.reset(seed=1)
        envs.step(policy)
        following = clusterenv.follow(client)
        assert next(following).version == 0
        envs.step(changed(policy, 0.1, 1))
        assert next(following).version == 1
        assert client.get_events(envs.topic)
    assert list(following) == []


def test_what_is_no_client_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"follow\(clusterenv.connect"):
        clusterenv.follow("tcp://scheduler:8786")  # type: ignore[arg-type]
