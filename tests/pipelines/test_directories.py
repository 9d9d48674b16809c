"""No command writes into a directory that holds what another one made."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batches import Fleet
from distributed import Client
from small_runs import small

from benchmarks.studies import aps_arms, aps_sweep
from clusterenv.errors import ConfigError
from clusterenv.store import Journal, ReplayStore
from pipelines.apex import Apex
from pipelines.dqn import DQN
from pipelines.experiment import run
from pipelines.experiment.directories import check_kind, content
from pipelines.experiment.run_directory import find_directory
from pipelines.ppo import PPO
from pipelines.tools import collect


@pytest.fixture
def cluster(client: Client, leaves_nothing: None) -> str:
    """The shared workers' scheduler: no cluster is started for each run."""
    return str(client.scheduler.address)


def files(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def run_ppo(out: Path, cluster: str, steps: int) -> object:
    few = {"total_steps": steps, "num_envs": 4, "horizon": 32, "shards": 2, "epochs": 1}
    args = PPO.preset("CartPole-v1", **few, out=out, cluster=cluster, quiet=True)
    return run(PPO, args)


def run_dqn(out: Path, cluster: str, steps: int) -> object:
    return run(DQN, small(out, total_steps=steps, cluster=cluster))


def run_apex(out: Path, cluster: str, steps: int) -> object:
    few = {"num_envs": 4, "horizon": 8, "shards": 2, "min_rows": 64, "batch": 16, "hidden": (16,)}
    args = Apex.preset("CartPole-v1", **few, total_steps=steps, out=out, cluster=cluster)
    return run(Apex, args)


def run_collect(out: Path, cluster: str, steps: int) -> object:
    few = {"rows": steps, "num_envs": 4, "horizon": 16, "shards": 2, "quiet": True}
    return collect.collect(collect.Args("CartPole-v1", out, cluster=cluster, **few))


COMMANDS: dict[str, Callable[..., Any]] = {
    "ppo": run_ppo,
    "dqn": run_dqn,
    "apex": run_apex,
    "collect": run_collect,
}


@pytest.mark.parametrize("maker", COMMANDS)
def test_a_run_or_a_dataset_is_left_to_the_command_that_made_it(
    maker: str, tmp_path: Path, cluster: str
) -> None:
    out = tmp_path / "run"
    COMMANDS[maker](out, cluster, 256)
    (tmp_path / "run-2").mkdir()
    before = files(tmp_path)
    refusal = re.escape(f"write elsewhere: --out {tmp_path / 'run-3'}")  # a free one
    for other in COMMANDS.keys() - {maker}:
        with pytest.raises(ConfigError, match=rf"and {other} would write into it; {refusal}$"):
            COMMANDS[other](out, cluster, 512)
    with pytest.raises(ConfigError, match=refusal):
        aps_sweep.sweep(aps_arms.Args(out=out, cluster=cluster, only=("never",)))
    assert files(tmp_path) == before
    COMMANDS[maker](out, cluster, 512)
    assert files(tmp_path) != before  # it went on


def committed(directory: Path, note: dict[str, Any]) -> None:
    journal = Journal(directory)
    journal.append(Fleet().next()[0])
    journal.commit(note=note)
    journal.close()


def begun(out: Path, kind: str, journal: bool = False) -> None:
    (out / "run.json").write_text(json.dumps({"kind": kind, "args": {}}))
    if journal:
        Journal(out / "replay").close()


def saved_store(directory: Path) -> None:
    store = ReplayStore(64)
    store.add(Fleet().next()[0])
    store.save(directory)


STATES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "nothing": (lambda out: out.mkdir(), ("ppo", "dqn", "apex", "collect")),
    "ppo before its first checkpoint": (lambda out: begun(out, "ppo"), ("ppo",)),
    "dqn before its first commit": (lambda out: begun(out, "dqn", journal=True), ("dqn",)),
    "a run that no command here has begun": (lambda out: (out / "progress.csv").touch(), ()),
    "collect before its first commit": (lambda out: Journal(out).close(), ("collect",)),
    "a dataset in a run's place": (lambda out: committed(out / "replay", {"dataset": {}}), ()),
    "the journal of a learner": (lambda out: committed(out, {"args": {}, "kind": "dqn"}), ()),
    "a saved store": (saved_store, ()),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", COMMANDS)
def test_what_was_only_begun_is_known_too(state: str, kind: str, tmp_path: Path) -> None:
    make, allowed = STATES[state]
    out = tmp_path / "out"
    if state != "nothing":
        out.mkdir()
    make(out)
    if kind in allowed:
        check_kind(out, kind)
    else:
        with pytest.raises(ConfigError, match=f"holds .*--out {out}-2$"):
            check_kind(out, kind)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match=f"is no directory.*--out {tmp_path}/run-2$"):
        check_kind(tmp_path / "run", "ppo")


def test_without_out_a_directory_of_another_kind_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path("runs/dqn-CartPole-v1-seed1")
    out.mkdir(parents=True)
    begun(out, "ppo")
    assert content(out) == ("a run of ppo", "ppo")
    assert find_directory(small(None), "dqn") == Path(f"{out}-2")
    begun(out, "dqn")
    assert find_directory(small(None), "dqn") == out
    assert find_directory(small(None, fresh=True), "dqn") == Path(f"{out}-2")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"kind": 3, "args": {}}'])
def test_a_damaged_note_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run.json is damaged; restore it, or .*--out"):
        check_kind(tmp_path, "ppo")
