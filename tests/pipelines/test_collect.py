"""Collection with no learner: exact row counts, sessions that go on, checkpoints as policies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from batches import Fleet, Frames, all_of, same, transitions
from conftest import wait_until
from distributed import Client
from small_runs import ROOT, check_rows, small

import clusterenv
from clusterenv.errors import ConfigError, UnknownEnv
from clusterenv.policies import Context, Random
from clusterenv.store import ReplayStore, Stack, Uniform
from pipelines.dqn import DQN
from pipelines.experiment import run
from pipelines.experiment.directories import note_of
from pipelines.ppo import PPO
from pipelines.tools.collect import Args, collect, cut, main
from pipelines.tools.inspection import describe
from pipelines.tools.saved_policies import collecting_policy

BOX = gym.spaces.Box(-1, 1, (4,), np.float32)
TWO = gym.spaces.Discrete(2)


@pytest.fixture
def cluster(client: Client, leaves_nothing: None) -> str:
    return str(client.scheduler.address)


def few(out: Path, cluster: str, **changes: object) -> Args:
    settings = {"rows": 1_000, "num_envs": 4, "horizon": 16, "shards": 2, "quiet": True}
    return Args(**{"env": "CartPole-v1", "out": out, "cluster": cluster, **settings, **changes})


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 11, 12, 13, 40])
@pytest.mark.parametrize("frames", [None, 4])
def test_a_batch_that_is_cut_keeps_what_follows_each_row(rows: int, frames: int | None) -> None:
    content = None if frames is None else Frames(frames)
    fleet = Fleet(content, shards=1, envs=3, horizon=4, episode=3, seed=rows)
    batch, expected = fleet.next()
    stack = None if frames is None else Stack(frames)
    store = ReplayStore(64, sampler=Uniform(replace=False), stack=stack)
    for part in cut(batch, rows):
        store.add(part)
    kept = expected[:rows]
    assert len(store) == len(kept) == min(rows, 12)
    same(all_of(store), transitions(kept, fleet.content))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12])
def test_a_batch_that_is_cut_keeps_the_state_of_its_environments(rows: int) -> None:
    batch, _ = Fleet(shards=1, envs=3, horizon=4, episode=3, seed=rows, state=True).next()
    parts = list(cut(batch, rows))
    assert parts[0].record_batch.num_rows == sum(p.num_rows for p in parts[:1])
    (name,) = batch.state
    kept = parts[0].state[name]
    np.testing.assert_array_equal(kept, batch.state[name][: min(rows, 3)])
    assert all(not len(part.state[name]) for part in parts[1:])
    for part in parts:
        assert part.record_batch.num_rows == part.num_rows


def test_a_dataset_has_exactly_the_rows_and_grows_with_another_session(
    tmp_path: Path, cluster: str
) -> None:
    out = tmp_path / "data"
    first = collect(few(out, cluster, rows=777))
    assert (first.rows, first.collected) == (777, 777)
    assert first.mean_return > 5
    assert clusterenv.open_dataset(out).count_rows() == 777

    assert collect(few(out, cluster, rows=777)).collected == 0
    second = collect(few(out, cluster, rows=1_500))
    assert (second.rows, second.collected) == (1_500, 723)
    table = clusterenv.open_dataset(out).to_table()
    assert table.num_rows == 1_500
    runs = table["run"].to_numpy()
    assert runs[0] < runs[-1]
    assert (runs == np.repeat([runs[0], runs[-1]], [777, 723])).all()
    assert not table["incarnation"].to_numpy().any()
    told = dict(describe(out))
    assert told["collectors"].startswith("2:")
    assert told["restarts"].startswith("0:")
    starts = np.array(table["obs"].to_pylist())[table["step"].to_numpy() == 0]
    assert len(np.unique(starts, axis=0)) == len(starts)  # other seeds, other episodes
    assert len(ReplayStore.load(out)) == 1_500

    with pytest.raises(ConfigError, match=r"--num-envs 4 instead of --num-envs 8"):
        collect(few(out, cluster, rows=2_000, num_envs=8))


def test_a_collection_that_is_killed_goes_on_with_the_same_command(
    tmp_path: Path, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    command = [
        *(sys.executable, "-m", "pipelines.cli", "collect"),
        *("--env", "CartPole-v1", "--out", str(out)),
        *("--rows", "100_000", "--num-envs", "4", "--horizon", "32", "--shards", "2"),
        *("--commit-seconds", "0.05", "--cluster", cluster),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            committed = wait_until(lambda: note_of(out) is not None, 60)
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert committed
    before = clusterenv.open_dataset(out).count_rows()
    assert 0 < before < 100_000
    main(command[4:])
    said = capsys.readouterr().out
    assert f"from {before:,} rows" in said
    assert "100%" in said
    assert check_rows(out) == 100_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_commits_what_there_is(tmp_path: Path, cluster: str, number: int) -> None:
    out = tmp_path / "data"
    command = [
        *(sys.executable, "-m", "pipelines.cli", "collect"),
        *("--env", "CartPole-v1", "--out", str(out)),
        *("--rows", "1_000_000_000", "--num-envs", "4", "--horizon", "32", "--shards", "2"),
        *("--commit-seconds", "0.05", "--cluster", cluster),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert wait_until(lambda: note_of(out) is not None, 60)
            process.send_signal(number)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "committing and stopping" in said
    assert f"{clusterenv.open_dataset(out).count_rows():,} rows" in said.splitlines()[-4]


def test_it_goes_on_when_nobody_reads_what_it_says(tmp_path: Path, cluster: str) -> None:
    words = (
        f"{sys.executable} -m pipelines.cli collect --env CartPole-v1 --out {tmp_path / 'data'} "
        f"--rows 4_000 --num-envs 4 --horizon 32 --shards 2 --cluster {cluster} | head -1"
    )
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "BrokenPipe" not in done.stderr
    assert clusterenv.open_dataset(tmp_path / "data").count_rows() == 4_000


def test_what_learners_wrote_acts(tmp_path: Path, cluster: str) -> None:
    run(DQN, small(tmp_path / "dqn", total_steps=300, cluster=cluster, duelling=True))
    policy = collecting_policy(str(tmp_path / "dqn"), BOX, TWO, epsilon=0.0)
    saved = torch.load(next((tmp_path / "dqn").glob("learner-*.pt")), weights_only=True)
    obs = torch.randn(16, 4)
    torch.testing.assert_close(
        policy.state_dict()["module.value.bias"], saved["learner"]["q"]["value.bias"]
    )
    first, second = (policy.act(obs, Context(torch.arange(16))).action for _ in range(2))
    assert first.equal(second)  # greedy

    args = {"total_steps": 256, "num_envs": 8, "horizon": 32, "shards": 1, "hidden": (24, 12)}
    run(
        PPO,
        PPO.preset(
            "CartPole-v1", **args, epochs=1, cluster=cluster, out=tmp_path / "ppo", quiet=True
        ),
    )
    (checkpoint,) = (tmp_path / "ppo").glob("learner-*.pt")
    agent = collecting_policy(str(checkpoint), BOX, TWO)
    saved = torch.load(checkpoint, weights_only=True)["learner"]
    assert all(agent.state_dict()[name].equal(saved["agent"][name]) for name in saved["agent"])
    result = collect(few(tmp_path / "data", cluster, policy=str(tmp_path / "ppo"), rows=100))
    assert result.rows == 100
    assert "log_prob" in clusterenv.open_dataset(tmp_path / "data").schema.names


def test_bad_input_is_refused_at_once(tmp_path: Path) -> None:
    assert isinstance(collecting_policy("random", BOX, TWO), Random)
    with pytest.raises(ConfigError, match="does not exist"):
        collecting_policy(str(tmp_path / "nothing.pt"), BOX, TWO)
    (tmp_path / "junk.pt").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="no checkpoint"):
        collecting_policy(str(tmp_path / "junk.pt"), BOX, TWO)
    with pytest.raises(UnknownEnv):
        collect(Args(env="Nowhere-v0", out=tmp_path / "data"))
    assert not (tmp_path / "data").exists()
