"""Commands refuse a path that they cannot write before they start anything."""

from __future__ import annotations

import os
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
    """A directory that nobody can make, not even root."""
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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_read_only_directory_is_refused_in_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o500)
    for out in (sealed, sealed / "run"):
        assert "is read-only for this user; write elsewhere" in refused(command, out, capsys)


def test_the_default_directory_is_checked_too(
    below_a_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(below_a_file.parents[1])
    Path("runs").write_text("not a directory")
    assert cli.main([*COMMANDS["train ppo"], "--cluster", "nowhere"]) == 2
    assert "runs is no directory; write elsewhere: --out runs/mine" in capsys.readouterr().err


def test_what_can_be_made_is_not_made_by_the_check(tmp_path: Path) -> None:
    check_writable(tmp_path / "some" / "where")
    check_writable(tmp_path)
    assert not list(tmp_path.iterdir())
