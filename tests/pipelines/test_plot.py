"""``clusterenv plot``: seeds as mean and band, a panel per environment, no spike at a resume."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import cli
from pipelines.experiment.config_file import write_config
from pipelines.tools.curves import band, grouped, read_run

COLUMNS = ("steps", "seconds", "steps_per_second", "mean_return", "pulls", "lag_mean")


def made(
    out: Path,
    rows: Iterable[Iterable[float]] | None = None,
    learner: str = "ppo",
    **options: Any,
) -> Path:
    """Write what a run would, with a return of its seed."""
    given = {"env": "CartPole-v1", "seed": 1, "lr": 0.001, "shards": 2, "init_from": None}
    given |= {"out": str(out), **options}
    out.mkdir(parents=True)
    write_config(out, {"learner": learner, "options": given})
    steps = range(1_000, 11_000, 1_000)
    rows = rows or [(n, n / 500, 500.0, n / 100 + given["seed"], n / 50, 0.5) for n in steps]
    lines = [",".join(COLUMNS), *(",".join(map(str, row)) for row in rows)]
    (out / "progress.csv").write_text("\n".join(lines) + "\n")
    return out


def texts(picture: Path) -> list[str]:
    """Return what is written in a picture: matplotlib notes it beside the glyphs."""
    return re.findall(r"<!-- (.*?) -->", picture.read_text())


def test_the_rate_has_no_spike_at_a_resume(tmp_path: Path) -> None:
    """The column is the mean of a session, whose first records are of a moment."""
    rows = []
    for n in range(1_000, 41_000, 1_000):
        session = 50.0 if n == 21_000 else 500.0 + 4_000 / (1 + (n - 1) // 1_000 % 20)
        rows.append((n, n / 500, session, 20.0, 0, 0.5))
    run = read_run(made(tmp_path / "run", rows), "run")
    steps, rates = run.points("steps", "steps_per_second")
    assert steps.tolist() == [row[0] for row in rows]
    np.testing.assert_allclose(rates, 500.0)


def test_the_rate_follows_what_the_run_did(tmp_path: Path) -> None:
    half = [(n, n / 500, 1.0, 20.0, 0, 0.5) for n in range(1_000, 21_000, 1_000)]
    rest = [(n, 40 + (n - 20_000) / 250, 1.0, 20.0, 0, 0.5) for n in range(21_000, 41_000, 1_000)]
    run = read_run(made(tmp_path / "run", [*half, *rest]), "run")
    _, rates = run.points("steps", "steps_per_second")
    assert rates[10] == pytest.approx(500)
    assert rates[-1] == pytest.approx(250)


def test_seeds_of_a_setting_are_one_group_and_settings_are_named(tmp_path: Path) -> None:
    paths = [
        made(tmp_path / f"a{seed}", seed=seed, shards=seed % 3 + 1) for seed in (1, 1001, 2001)
    ]
    paths += [made(tmp_path / f"b{seed}", seed=seed, lr=0.01) for seed in (1, 1001)]
    paths += [made(tmp_path / "c", env="Acrobot-v1", lr=0.01)]
    paths += [made(tmp_path / "d", learner="dqn")]
    paths += [made(tmp_path / f"e{n}", init_from=f"runs/{n}", seed=n) for n in (1, 2)]
    found = grouped([read_run(path, path.name, True) for path in paths])
    names = {key: [run.name for run in runs] for key, runs in found.items()}
    assert names == {
        ("CartPole-v1", "ppo --lr 0.001 --no-init-from (3 seeds)"): ["a1", "a1001", "a2001"],
        ("CartPole-v1", "ppo --lr 0.01 --no-init-from (2 seeds)"): ["b1", "b1001"],
        ("Acrobot-v1", "ppo (1 seed)"): ["c"],
        ("CartPole-v1", "dqn (1 seed)"): ["d"],
        ("CartPole-v1", "ppo --lr 0.001 --init-from (2 seeds)"): ["e1", "e2"],
    }


def test_the_band_is_of_all_seeds_and_ends_with_the_shortest(tmp_path: Path) -> None:
    long = made(tmp_path / "a", seed=0)
    short = [(n, n / 500, 1.0, n / 100 + 30, 0, 0.5) for n in (1_500, 4_500)]
    other = made(tmp_path / "b", short, seed=30)
    curves = [read_run(path, path.name).points("steps", "mean_return") for path in (long, other)]
    found = band(curves)
    assert found.x.tolist() == [1_500, 2_000, 3_000, 4_000, 4_500]
    np.testing.assert_allclose(found.low, found.x / 100)
    np.testing.assert_allclose(found.high, found.x / 100 + 30)
    np.testing.assert_allclose(found.mean, found.x / 100 + 15)


def test_every_environment_has_its_panels(tmp_path: Path) -> None:
    paths = [made(tmp_path / f"a{seed}", seed=seed) for seed in (1, 1001)]
    paths.append(made(tmp_path / "b", env="Acrobot-v1"))
    picture = tmp_path / "all.svg"
    words = ["plot", *map(str, paths), "--out", str(picture)]
    assert cli.main(words) == 0
    said = texts(picture)
    for env in ("CartPole-v1", "Acrobot-v1"):
        assert sum(text.startswith(f"{env}: ") for text in said) == 4
    assert {"a1", "a1001", "b"} <= set(said)
    assert cli.main([*words, "--group"]) == 0
    said = texts(picture)
    assert "ppo (2 seeds)" in said
    assert "a1" not in said


def test_a_group_needs_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "a")
    (run / "config.yaml").unlink()
    assert cli.main(["plot", str(run), "--out", str(tmp_path / "a.png")]) == 0
    assert cli.main(["plot", str(run), "--group", "--out", str(tmp_path / "a.png")]) == 2
    assert f"--group needs the options of {run}" in capsys.readouterr().err
