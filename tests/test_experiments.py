"""What docs/experiments says follows from the files beside it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from benchmarks.studies import (
    aps_arms,
    aps_learners,
    aps_sweep,
    criteria,
    curves,
    overlap,
    rare_tasks,
    records,
)
from pipelines import learners

EXPERIMENTS = Path(__file__).parents[1] / "docs" / "experiments"
PAGE = " ".join((EXPERIMENTS / "README.md").read_text().replace("\n> ", "\n").split())


def rows(table: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith("|") and "---" not in line]


def test_ppo_reaches_its_goals_with_three_seeds() -> None:
    within = {"CartPole-v1": 300_000, "LunarLander-v3": 1_500_000, "Pendulum-v1": 400_000}
    found: dict[str, dict[str, curves.Curve]] = {env: {} for env in within}
    for env, steps in within.items():
        for file in sorted((EXPERIMENTS / "ppo").glob(f"{env}-*.csv")):
            curve = found[env][file.stem.rpartition("-")[2]] = curves.read(file)
            assert (curves.reached(curve, curves.GOALS[env]) or 10**9) <= steps, file
            assert curve[-1][1] >= curves.GOALS[env], file
        assert len(found[env]) == 3
    for row in rows(curves.table(found)):
        assert row in PAGE


@pytest.mark.parametrize(("name", "holds"), [("aps", True), ("aps-large-steps", False)])
def test_the_sweep_says_what_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, holds: bool
) -> None:
    """``--plot-only`` judges and draws again what is there."""
    shutil.copytree(EXPERIMENTS / name, tmp_path / name)
    for plot in (tmp_path / name).glob("*.png"):
        plot.unlink()
    verdict = aps_sweep.sweep(aps_arms.Args(out=tmp_path / name, plot_only=True))
    assert verdict.never_failed
    assert bool(verdict.thresholds) == holds
    said = rows(capsys.readouterr().out)
    assert len(said) == 12
    for row in said:
        assert row in PAGE
    if holds:
        assert " ".join(verdict.text.split()) in PAGE
    for plot in re.findall(rf"\({name}/(\w+\.png)\)", PAGE):
        assert (tmp_path / name / plot).stat().st_size > 10_000


def test_the_comparison_of_learners_says_what_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--plot-only`` judges and draws again; the defaults are those that the page names."""
    out = tmp_path / "aps-learners"
    shutil.copytree(
        EXPERIMENTS / out.name, out, ignore=shutil.ignore_patterns("*.png", "runs", "*.tmp")
    )
    verdicts = aps_learners.sweep(aps_learners.Args(out=out, plot_only=True))
    said = rows(capsys.readouterr().out)
    assert len(said) > 12
    for row in said:
        assert row in PAGE
    for learner, verdict in verdicts.items():
        assert " ".join(verdict.text.split()) in PAGE
        default = learners.load(learner).args_type()
        pulls = default.threshold if default.sync == "divergence" else None
        if pulls != verdict.default:  # a departure from the rule must be told
            said = (
                f"{learners.load(learner).title}'s default is {pulls or 'every-version'}, not the"
            )
            assert f"{said} {verdict.default:g}" in PAGE
    for plot in re.findall(rf"\({out.name}/(\S+\.png)\)", PAGE):
        assert (out / plot).stat().st_size > 10_000


def test_the_study_of_overlap_says_what_the_page_of_benchmarks_says() -> None:
    benchmarks = (EXPERIMENTS.parents[1] / "benchmarks" / "README.md").read_text()
    outcomes = records.read(EXPERIMENTS / "overlap" / "summary.csv", overlap.Outcome)
    assert len(outcomes) == 40
    for line in overlap.judge(outcomes).splitlines():
        assert line in benchmarks


@pytest.mark.parametrize(
    ("name", "least"), [("criteria", 6), ("criteria-r2d2", 2), ("criteria-sac", 2)]
)
def test_the_study_of_criteria_says_what_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, least: int
) -> None:
    out = tmp_path / name
    shutil.copytree(EXPERIMENTS / out.name, out, ignore=shutil.ignore_patterns("*.png", "runs"))
    criteria.study(criteria.Args(out=out, plot_only=True))
    said = rows(capsys.readouterr().out)
    assert len(said) >= least
    for row in said:
        assert row in PAGE
    for plot in re.findall(rf"\({out.name}/(\S+\.png)\)", PAGE):
        assert (out / plot).stat().st_size > 10_000


def test_the_study_of_rare_tasks_says_what_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rare-tasks"
    shutil.copytree(EXPERIMENTS / out.name, out, ignore=shutil.ignore_patterns("*.png", "runs"))
    outcomes = rare_tasks.study(rare_tasks.Args(out=out, plot_only=True))
    said = rows(capsys.readouterr().out)
    assert len(said) > len(outcomes)
    for row in said:
        assert row in PAGE
    assert (out / "accuracy.png").stat().st_size > 10_000
