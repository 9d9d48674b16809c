"""The study of the learners' criteria: it trains, evaluates, resumes and tabulates."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.studies import criteria
from benchmarks.studies.criteria import TASKS, Args, Outcome, Task, judge, study
from clusterenv.errors import ConfigError


def outcome(seed: int, final: float, at: int | None) -> Outcome:
    return Outcome(
        env="CartPole-v1",
        learner="impala",
        seed=seed,
        steps=500_000,
        goal=475.0,
        final_return=final,
        final_low=final - 1,
        final_high=final + 1,
        goal_steps=at,
    )


def test_the_last_weights_decide_not_the_best() -> None:
    text = judge([outcome(2001, 474.9, 20_000), outcome(1, 500.0, None)])
    row = text.splitlines()[-1]
    assert "500.0, 474.9 | 1 of 2 | –, 20,000 |" in row
    assert "RLlib: 450 in 2M" in row


def test_scores_have_two_digits() -> None:
    env = criteria.EMPTY_GOAL_CLOSE
    scored = dataclasses.replace(outcome(1, 0.97, 40_000), env=env, goal=0.9, steps=1_000_000)
    missed = dataclasses.replace(scored, seed=1001, final_return=0.89)
    row = judge([scored, missed]).splitlines()[-1]
    assert f"| {env} | impala | 0.9 in 1,000,000 | – | 0.97, 0.89 | 1 of 2 |" in row


@pytest.mark.timeout(240)  # it starts clusters
def test_a_study_trains_evaluates_and_leaves_out_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TASKS, ("CartPole-v1", "impala"), Task(2_560, 8))
    args = Args(("impala",), ("CartPole-v1",), (1,), shards=1, out=tmp_path)
    monkeypatch.setattr(criteria, "EVALUATIONS", 2)
    (found,) = study(args)
    assert found.steps >= 2_560
    assert found.final_return >= 8
    assert (tmp_path / "curves" / "CartPole-v1-impala-1.csv").is_file()
    assert (tmp_path / "CartPole-v1.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "runs").iterdir())
    capsys.readouterr()
    assert study(args) == [found]
    said = capsys.readouterr().out
    assert "run 1" not in said
    assert "1 of 1" in said


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match="--learners ppq is unknown; one of apex, dqn"):
        Args(learners=("ppq",))
    with pytest.raises(ConfigError, match="--envs Pong is unknown; one of CartPole-v1"):
        Args(envs=("Pong",))
