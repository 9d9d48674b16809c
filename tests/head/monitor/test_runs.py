"""The runs of a cluster: names, those that ended, and heads that were killed."""

from __future__ import annotations

import time
from typing import Any

import pytest
from agents import cartpole_policy
from conftest import wait_until
from distributed import Client

import clusterenv
from clusterenv.errors import ConfigError
from clusterenv.head.monitor.runs import RUNS, RunEntry, is_connected, register, running


def collecting(client: Client, **options: Any) -> clusterenv.Collector:
    given = {"num_envs": 2, "horizon": 4, "shards": 1, "cluster": client, **options}
    return clusterenv.Collector("CartPole-v1", cartpole_policy(), **given)


def test_a_run_is_listed_while_it_goes_on(client: Client) -> None:
    with collecting(client) as collector:
        (entry,) = [each for each in running(client) if each.number == collector.run]
        assert entry.run == collector.name == f"CartPole-v1-{collector.run}"
        assert (entry.title, entry.topic) == ("CartPole-v1", collector.topic)
    assert collector.run not in [each.number for each in running(client)]


def test_a_name_is_one_runs_at_a_time(client: Client) -> None:
    with collecting(client, name="lander"):
        began = time.monotonic()
        with pytest.raises(
            ConfigError, match=r"name='lander' is that of a run on CartPole-v1 .* name='lander-2'"
        ):
            collecting(client, name="lander")
        assert time.monotonic() - began < 30
        collecting(client, name="lander-2").close()
    collecting(client, name="lander").close()
    assert [entry for entry in running(client) if "lander" in entry.run] == []


def test_of_two_runs_that_begin_at_once_the_first_has_the_name(client: Client) -> None:
    first = RunEntry("twins", 1, "A", client.id, 0.0)
    client.log_event(RUNS, {**first._asdict(), "state": "begun"})
    with pytest.raises(ConfigError, match="'twins' is that of a run on A"):
        register(client, "twins", 2, "B")
    client.log_event(RUNS, {"number": 1, "state": "ended"})
    register(client, "twins", 3, "B")
    client.log_event(RUNS, {"number": 3, "state": "ended"})


def test_a_head_that_was_killed_leaves_its_name_free(client: Client) -> None:
    head = Client(client.scheduler.address, security=client.security, set_as_default=False)
    register(head, "killed", 11, "A")
    assert "killed" in [entry.run for entry in running(client)]
    head.close()  # says nothing of the run
    assert wait_until(lambda: "killed" not in [entry.run for entry in running(client)])
    register(client, "killed", 12, "B")
    client.log_event(RUNS, {"number": 12, "state": "ended"})


def test_a_head_stays_connected_after_so_many_events_that_its_beginning_is_forgotten() -> None:
    graphs = 1000 * [(0.0, {"action": "update-graph"})]
    assert is_connected(graphs)
    assert not is_connected([*graphs[1:], (1.0, {"action": "remove-client"})])


@pytest.mark.parametrize("name", ["", 7, "a\nb", 201 * "x", 51 * "🙂"])
def test_what_is_no_name_is_refused_at_once(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"name=.* must be printable text of 1 to 200 bytes"):
        clusterenv.Collector("CartPole-v1", cartpole_policy(), num_envs=2, horizon=4, name=name)
