"""Learning curves: what they say and that they are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.studies.curves import main, reached, read, table
from clusterenv.errors import ConfigError


def write(path: Path, returns: list[str]) -> None:
    rows = [f"{100 * i},{value},{50 * (i + 1)}" for i, value in enumerate(returns)]
    path.write_text("\n".join(["steps,mean_return,episodes", *rows]) + "\n")


def test_a_curve_begins_with_its_hundredth_episode(tmp_path: Path) -> None:
    write(tmp_path / "run.csv", ["nan", "500", "10", "20"])
    assert read(tmp_path / "run.csv") == [(100, 500.0), (200, 10.0), (300, 20.0)]
    assert reached(read(tmp_path / "run.csv"), 20) == 100
    assert reached(read(tmp_path / "run.csv"), 501) is None


def test_every_environment_is_drawn_and_tabulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "CartPole-v1-1.csv", ["1", "20", "480"])
    write(tmp_path / "CartPole-v1-2.csv", ["1", "20", "30"])
    write(tmp_path / "Mystery-v0-1.csv", ["1", "20", "30"])
    write(tmp_path / "CartPole-v1-3.csv", ["nan"])  # it was stopped at once
    main(tmp_path)
    output = capsys.readouterr().out
    assert "| CartPole-v1 | 1 | 475 | 200 steps | 480.0 | 480.0 |" in output
    assert "| CartPole-v1 | 2 | 475 | not | 30.0 | 30.0 |" in output
    assert "| CartPole-v1 | 3 | 475 | not | – | – |" in output
    assert (tmp_path / "CartPole-v1.png").stat().st_size > 1000
    assert (tmp_path / "Mystery-v0.png").exists()
    assert table({}) == table({}).strip()


def test_an_empty_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CartPole-v1-1.csv"):
        main(tmp_path)
