"""What a run directory says of the run: options, command, versions, commits."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from distributed import Client
from small_runs import ROOT, small

from pipelines import cli
from pipelines.dqn import DQN
from pipelines.experiment import options, run
from pipelines.experiment.config_file import record
from pipelines.experiment.directories import note_of
from pipelines.experiment.run_directory import arguments
from pipelines.ppo import PPO


def git(directory: Path, *words: str) -> str:
    who = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    done = subprocess.run(["git", *who, *words], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_run_writes_down_what_ran(
    tmp_path: Path, client: Client, leaves_nothing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, out = str(client.scheduler.address), tmp_path / "run"
    sizes: dict[str, Any] = {"num_envs": 4, "horizon": 32, "shards": 2, "epochs": 1, "quiet": True}
    args = PPO.preset("CartPole-v1", total_steps=256, out=out, cluster=cluster, **sizes)
    run(PPO, args)
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["learner"] == "ppo"
    assert PPO.args_type(**config["options"]) == args  # every option
    words = shlex.split(config["command"])
    assert words[:3] == ["clusterenv", "train", "ppo"]
    assert options.read(PPO.args_type, words[3:], presets=PPO.presets) == args
    assert config["versions"]["torch"] == torch.__version__
    assert {"clusterenv", "python", "gymnasium", "dask", "pyarrow"} <= config["versions"].keys()
    # The rest is said in one place only.
    state = json.loads((out / "run.json").read_text())
    assert state.keys() == {"learner", "number", "steps", "finished"}

    more = PPO.preset("CartPole-v1", total_steps=512, out=out, cluster=cluster, **sizes)
    run(PPO, more)
    assert yaml.safe_load((out / "config.yaml").read_text())["options"]["total_steps"] == 512

    assert cli.main(["inspect", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for said in ("train ppo --env", "--epochs 1", "horizon 32", "hidden 64 64", "versions"):
        assert said in shown, said
    assert f"torch {torch.__version__}" in shown


def test_the_commit_is_that_of_the_learners_checkout(tmp_path: Path) -> None:
    home = tmp_path / "mine"
    home.mkdir()
    source = home / "my_learner.py"
    source.write_text((ROOT / "examples" / "own_learner.py").read_text())

    def commits() -> dict[str, str]:
        spec = importlib.util.spec_from_file_location("my_learner", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["my_learner"] = module
        try:
            spec.loader.exec_module(module)
            found: dict[str, str] = record(module.A2C, "python my_learner.py", {})["commits"]
            return found
        finally:
            del sys.modules["my_learner"]

    assert "my_learner" not in commits()  # in no checkout
    git(home, "init", "--quiet")
    assert "my_learner" not in commits()  # beneath one that does not have it
    git(home, "add", ".")
    git(home, "commit", "--quiet", "--message", "First")
    assert commits()["my_learner"] == git(home, "rev-parse", "HEAD")
    source.write_text(f"{source.read_text()}\n# changed\n")
    assert commits()["my_learner"] == f"{git(home, 'rev-parse', 'HEAD')}-dirty"


def test_a_run_that_older_code_has_begun_goes_on(
    tmp_path: Path, client: Client, leaves_nothing: None
) -> None:
    """Its options were in run.json."""
    cluster = str(client.scheduler.address)
    args = PPO.preset("CartPole-v1", total_steps=128, num_envs=4, horizon=32, epochs=1, shards=2)
    given = {**arguments(args), "out": str(tmp_path), "quiet": True, "cluster": cluster}
    run(PPO, PPO.args_type(**given))
    (tmp_path / "config.yaml").unlink()
    state = json.loads((tmp_path / "run.json").read_text())
    old = {name: value for name, value in given.items() if name != "init_from"}
    (tmp_path / "run.json").write_text(json.dumps({"kind": "ppo", "args": old, **state}))
    result = run(PPO, PPO.args_type(**{**given, "total_steps": 256}))
    assert result.steps == 256
    assert (note_of(tmp_path) or {})["args"]["total_steps"] == 256


def test_a_run_with_a_store_has_one_too(
    tmp_path: Path, client: Client, leaves_nothing: None
) -> None:
    run(DQN, small(tmp_path, total_steps=256, cluster=str(client.scheduler.address)))
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["learner"] == "dqn"
    assert not (tmp_path / "run.json").exists()  # the journal's commit names the checkpoint
    assert (note_of(tmp_path) or {})["steps"] == 256
