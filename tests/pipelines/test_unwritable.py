"""Commands refuse a path that they cannot write before they start anything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipelines import cli
from pipelines.experiment.directories import check_writable

COMMANDS = {
    "train ppo": ("train", "ppo", "--env", "CartPole-v1"),
    "train dqn": ("train", "dqn", "--env", "CartPole-v1"),
    "collect": ("collect", "--env", "CartPole-v1"),
    "plot": ("plot", "runs/a"),
}
OUT = {"plot": "picture.png"}


@pytest.fixture
def below_a_file(tmp_path: Path) -> Path:
    """A directory that cannot be made, not even by root."""
    (tmp_path / "file").write_text("not a directory")
    return tmp_path / "file" / "run"


def refused(command: str, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command says of ``--out``; a cluster that it connected to would fail."""
    words = [*COMMANDS[command], "--out", str(out / OUT.get(command, ""))]
    if command != "plot":
        words += ["--cluster", "nowhere"]
    assert cli.main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""  # nothing was begun
    (line,) = said.err.splitlines()
    return line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_below_a_file_is_refused_in_one_line(
    command: str, below_a_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(command, below_a_file, capsys)
    assert line.startswith(f"clusterenv {command}: --out {below_a_file}")
    assert (
        f"cannot be written: {below_a_file.parent} is no directory; write elsewhere: --out" in line
    )
    assert "nowhere" not in line


def without_privileges(words: Sequence[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a directory, as a user for whom permissions count: root has to drop that."""
    drop = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    return subprocess.run(
        [*(drop if os.geteuid() == 0 else []), sys.executable, "-m", "pipelines.cli", *words],
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "HOME": str(directory.parent / "home"),
        },
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_read_only_directory_is_refused_in_one_line(command: str, tmp_path: Path) -> None:
    sealed, home = tmp_path / "sealed", tmp_path / "home"
    sealed.mkdir(mode=0o500)
    nowhere = [] if command == "plot" else ["--cluster", "nowhere"]
    cases = (
        (tmp_path, sealed / "out.png", Path()),
        (sealed, Path("out.png"), home),  # what it proposes can be written
    )
    for directory, out, where in cases:
        done = without_privileges([*COMMANDS[command], "--out", str(out), *nowhere], directory)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"clusterenv {command}: --out {out} cannot be written: {sealed} is")
        said, _, right = line.partition(" is read-only for this user; write elsewhere: --out ")
        assert said
        assert right.startswith(str(where) if where.is_absolute() else ("runs", "data", "plot"))


def test_the_default_directory_is_checked_too(
    below_a_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(below_a_file.parents[1])
    Path("runs").write_text("not a directory")
    monkeypatch.setenv("HOME", str(below_a_file.parents[1] / "home"))
    assert cli.main([*COMMANDS["train ppo"], "--cluster", "nowhere"]) == 2
    right = f"runs is no directory; write elsewhere: --out {Path.home()}/runs/mine"
    assert right in capsys.readouterr().err  # runs/mine cannot be written either


def test_what_can_be_made_is_not_made_by_the_check(tmp_path: Path) -> None:
    check_writable(tmp_path / "some" / "where")
    check_writable(tmp_path)
    assert not list(tmp_path.iterdir())
