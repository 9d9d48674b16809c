"""The experiment runner: what holds for every learner, also for one's own."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import wait_until
from distributed import Client
from small_runs import ROOT, small

from clusterenv.errors import ConfigError, StaleBatch
from pipelines import cli, learners
from pipelines.dqn import DQN
from pipelines.experiment import ReplayAlgorithm, RolloutAlgorithm, RolloutArgs, run
from pipelines.experiment.directories import note_of
from pipelines.experiment.run_directory import RunDirectory
from pipelines.ppo import PPO
from pipelines.tools.saved_policies import load_run


@pytest.fixture
def cluster(client: Client, leaves_nothing: None) -> str:
    """The shared workers' scheduler: no cluster is started for each run."""
    return str(client.scheduler.address)


def short(out: Path | None, steps: int, **changes: Any) -> Any:
    """A few updates of 8 × 32 rows."""
    sizes = {"num_envs": 8, "horizon": 32, "shards": 2, "epochs": 1, "log_every": 1, "quiet": True}
    return PPO.preset("CartPole-v1", total_steps=steps, out=out, **{**sizes, **changes})


def progress(out: Path) -> list[int]:
    with (out / "progress.csv").open() as file:
        return [int(row["steps"]) for row in csv.DictReader(file)]


# Going on


def test_a_killed_run_goes_on_with_the_same_command(tmp_path: Path, cluster: str) -> None:
    """As of learners with a store, whose test is in test_dqn.py."""
    out = tmp_path / "run"
    sizes = "--num-envs 8 --horizon 32 --shards 2 --epochs 1 --log-every 1 --checkpoint-every 256"
    words = f"train ppo --env CartPole-v1 --total-steps 20000 {sizes} --cluster {cluster}".split()
    command = [sys.executable, "-m", "pipelines.cli", *words, "--out", str(out)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            saved = wait_until(lambda: (note_of(out) or {}).get("steps", 0) >= 512, 60)
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert saved
    note = note_of(out)
    assert not note["finished"]
    assert cli.main([*words, "--out", str(out)]) == 0
    steps = progress(out)
    assert steps == list(range(256, 20_000 + 256, 256))  # no row twice, none missing
    assert note_of(out)["finished"]
    assert note_of(out)["number"] > note["number"]


def test_without_out_the_same_command_finds_its_run_and_fresh_begins_another(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = run(PPO, short(None, 256, cluster=cluster))
    assert first.out == Path("runs/ppo-CartPole-v1-seed1")
    assert run(PPO, short(None, 256, cluster=cluster)).out.name == "ppo-CartPole-v1-seed1-2"
    more = run(PPO, short(first.out, 512, cluster=cluster))
    assert (more.out, more.steps) == (first.out, 512)
    fresh = run(PPO, short(None, 256, cluster=cluster, fresh=True))
    assert fresh.out.name == "ppo-CartPole-v1-seed1-3"


def test_two_runs_do_not_write_to_one_directory(tmp_path: Path, cluster: str) -> None:
    args = short(tmp_path, 256, cluster=cluster)
    first = RunDirectory(args, "ppo", ())
    with pytest.raises(ConfigError, match=r"another process is writing to .*: --fresh"):
        run(PPO, args)
    first.close()
    assert run(PPO, args).steps == 256


def test_a_checkpoint_of_another_network_is_refused_and_left_alone(
    tmp_path: Path, cluster: str
) -> None:
    run(PPO, short(tmp_path, 256, cluster=cluster))
    (path,) = tmp_path.glob("learner-*.pt")
    saved = torch.load(path, weights_only=True)
    saved["learner"]["agent"]["actor.0.weight"] = torch.zeros(3, 3)
    torch.save(saved, path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"does not fit the learner.*--out {tmp_path}-2"):
        run(PPO, short(tmp_path, 512, cluster=cluster))
    path.write_bytes(before[:-100])
    with pytest.raises(ConfigError, match=rf"cannot be read: .*--out {tmp_path}-2"):
        run(PPO, short(tmp_path, 512, cluster=cluster))
    assert path.read_bytes() == before[:-100]


def test_rows_older_than_allowed_end_the_run_with_what_there_is(
    tmp_path: Path, cluster: str
) -> None:
    args = short(tmp_path, 2_048, cluster=cluster, sync="never", max_lag=2)
    with pytest.raises(StaleBatch, match="3 behind version 3, and max_lag=2"):
        run(PPO, args)
    assert note_of(tmp_path)["steps"] == 3 * 256
    assert not note_of(tmp_path)["finished"]


# A learner of one's own


@pytest.mark.timeout(240)  # it starts two clusters
def test_a_learner_of_ones_own_is_a_command_like_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site, out = tmp_path / "site", tmp_path / "run"
    info = site / "own-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "own_learner.py", site / "own_learner.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[clusterenv.learners]\na2c = own_learner:A2C\nbroken = own_learner:Nothing\n"
    )

    def train(steps: int) -> str:
        evaluated = "--evaluate-every 256 --evaluate-episodes 2 --log-every 256"
        line = f"train a2c --num-envs 8 --shards 1 {evaluated} --total-steps {steps} --out {out}"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
        words = [sys.executable, "-m", "pipelines.cli", *line.split()]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        return done.stdout

    train(512)
    said = train(1024)
    assert f"going on with {out} from 512 steps" in said
    assert "clusterenv train a2c --env CartPole-v1 --total-steps 2048" in said
    assert progress(out)[-1] == 1024
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.syspath_prepend(str(site))
    best = load_run(out)
    assert best.path == out / "best.pt"
    assert type(best.policy.module).__name__ == "ActorCritic"
    assert cli.main(["--help"]) == 0
    assert "train a2c" in capsys.readouterr().out
    assert cli.main(["train", "broken"]) == 2
    assert "'broken' of own_learner:Nothing cannot be imported" in capsys.readouterr().err


class Lazy(RolloutAlgorithm):
    name, title, args_type = "lazy", "Lazy", RolloutArgs


class Nameless(RolloutAlgorithm):
    def learn(self, rows: Any, progress: float) -> Any:
        return {}


class Mixed(ReplayAlgorithm):
    name, title, args_type = "mixed", "Mixed", RolloutArgs

    def learn(self, rows: Any, progress: float) -> Any:
        return {}, None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Lazy, r"Lazy lacks learn; docs/own-learner\.md"),
        (Nameless, "Nameless lacks name, title, args_type"),
        (Mixed, r"Mixed\.args_type must derive from ReplayArgs: class Args\(ReplayArgs\)"),
        (dict, "is no learner; derive a class from RolloutAlgorithm"),
        (None, "is no learner; derive a class from RolloutAlgorithm"),
    ],
)
def test_a_class_that_lacks_something_is_refused(kind: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(kind, RolloutArgs(out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_options_of_another_learner_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\(PPO, args\) got .*PPO\.preset\('CartPole-v1'\)"):
        run(PPO, small(tmp_path / "run"))


def test_a_learner_that_does_not_fit_the_environment_writes_nothing(tmp_path: Path) -> None:
    args = DQN.preset("Pendulum-v1", out=tmp_path / "run", quiet=True)
    with pytest.raises(ConfigError, match="for continuous actions: clusterenv train sac"):
        run(DQN, args)
    assert not (tmp_path / "run").exists()


def test_an_unknown_learner_is_named() -> None:
    with pytest.raises(ConfigError, match="'pp' is no learner that is installed; there is ppo"):
        learners.load("pp")


def test_overlap_gives_the_same_curve_whatever_the_timing(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = PPO.learn
    curves = []
    for name, seconds in (("quick", 0.0), ("slow", 0.3)):

        def waits(self: PPO, rows: Any, progress: float, seconds: float = seconds) -> Any:
            time.sleep(seconds)  # so that the next rollout is there before this one is learned from
            return learn(self, rows, progress)

        monkeypatch.setattr(PPO, "learn", waits)
        run(PPO, short(tmp_path / name, 6 * 256, cluster=cluster, overlap=True, max_lag=1))
        with (tmp_path / name / "progress.csv").open() as file:
            rows = list(csv.DictReader(file))
        timed = (
            "seconds",
            "steps_per_second",
            "queued",
            "learner_rows_per_second",
            "learner_share",
        )
        curves.append([{k: v for k, v in row.items() if k not in timed} for row in rows])
    assert len(curves[0]) == 6
    assert curves[0] == curves[1]
