"""The study of what overlap costs PPO: pairs, their ratio, and what it resumes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.studies import overlap
from benchmarks.studies.overlap import Args, Outcome, judge, study
from clusterenv.errors import ConfigError
from pipelines.ppo import PPO


def pair(seed: int, lockstep: int, overlapping: int, reached: int = 1) -> list[Outcome]:
    return [
        Outcome("LunarLander-v3", 0, seed, lockstep, reached),
        Outcome("LunarLander-v3", 1, seed, overlapping, reached),
    ]


def test_ratios_are_told_with_their_errors_and_the_verdict_of_each() -> None:
    text = judge([*pair(1, 1000, 1099), *pair(2, 3000, 3297)])
    assert "| 1 | 1,000 | 1,099 | 1.10 |" in text
    assert "| mean | 2,000 | 2,198 | 1.10 |" in text
    assert "Ratio of the means 1.10 ± 0.00, geometric mean of the ratios 1.10" in text
    assert text.endswith("the ratio of the means is, the geometric mean is.")
    found = judge([*pair(1, 100, 150), *pair(2, 600, 600)])
    assert found.endswith("the ratio of the means is, the geometric mean is not.")


def test_only_pairs_count_and_runs_that_miss_the_goal_are_marked() -> None:
    text = judge([*pair(1, 100, 200, reached=0), pair(2, 7, 7)[0]])
    assert "| 1 | 100 (not) | 200 (not) | 2.00 |" in text
    assert "| 2 |" not in text
    assert "Too few pairs" in text


def test_an_environment_without_a_goal_is_refused() -> None:
    with pytest.raises(ConfigError, match="--env Acrobot-v1 has no goal; one of CartPole-v1"):
        Args("Acrobot-v1")


@pytest.mark.timeout(240)  # it starts clusters
def test_a_study_trains_pairs_and_leaves_out_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(overlap.GOALS, "CartPole-v1", 15.0)
    monkeypatch.setitem(PPO.presets, "CartPole-v1", {"total_steps": 20_000, "num_envs": 4})
    args = Args("CartPole-v1", (1,), shards=1, out=tmp_path)
    found = study(args)
    assert [(each.overlap, each.reached) for each in found] == [(0, 1), (1, 1)]
    assert not list((tmp_path / "runs").iterdir())
    capsys.readouterr()
    again = [dataclasses.asdict(each) for each in study(args)]
    assert again == [dataclasses.asdict(each) for each in found]
    assert "run 1" not in capsys.readouterr().out
