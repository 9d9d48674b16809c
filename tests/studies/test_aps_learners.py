"""The comparison of learners that pull on divergence: its rule, its table, and that it resumes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from distributed import Client

from benchmarks.studies import records
from benchmarks.studies.aps_defaults import Outcome, judge, table
from benchmarks.studies.aps_learners import Args, cases, plan, sweep
from clusterenv.errors import ConfigError


def runs(
    arm: str, returns: list[float], steps: list[int | None], env: str = "CartPole-v1"
) -> list[Outcome]:
    seeds = range(100, 100 * len(returns) + 1, 100)
    return [
        Outcome(
            env=env,
            learner="dqn",
            arm=arm,
            seed=seed,
            total_steps=1_000,
            final_return=final,
            final_low=final - 1,
            final_high=final + 1,
            goal_steps=at,
            steps=at or 1_000,
            versions=50,
            pulls=100 if arm == "every-version" else 10,
            pulls_saved=0 if arm == "every-version" else 90,
            weight_bytes=1_000_000 if arm == "every-version" else 100_000,
            seconds=10.0,
        )
        for seed, final, at in zip(seeds, returns, steps, strict=True)
    ]


EVERY = runs("every-version", [490, 500, 495], [400, 400, 400])


def tiny(out: Path, cluster: str, **changes: object) -> Args:
    options: dict[str, object] = {
        "envs": ("CartPole-v1",),
        "thresholds": (0.05,),
        "seeds": (1,),
        "total_steps": 2_048,
        "evaluate_episodes": 2,
    }
    return Args(out=out, cluster=cluster, **{**options, **changes})  # type: ignore[arg-type]


def test_the_largest_threshold_that_costs_nothing_becomes_the_default() -> None:
    outcomes = [
        *EVERY,
        *runs("divergence-0.01", [480, 480, 480], [400, 400, 400]),
        *runs("divergence-0.05", [480, 480, 480], [440, 440, 440]),  # just within both
        *runs("divergence-0.1", [500, 500, 500], [441, 441, 441]),  # too long
    ]
    verdict = judge(outcomes)["dqn"]
    assert verdict.default == 0.05
    assert "0.1 costs steps to the goal 441 instead of 400" in verdict.text


def test_a_threshold_must_cost_nothing_on_every_environment_with_enough_seeds() -> None:
    other = "LunarLander-v3"
    outcomes = [
        *EVERY,
        *runs("divergence-0.05", [500, 500, 500], [400, 400, 400]),
        *runs("every-version", [200, 200, 200], [500, 500, 500], other),
        *runs("divergence-0.05", [180, 180, 180], [500, 500, 500], other),
    ]
    verdict = judge(outcomes)["dqn"]
    assert verdict.default is None
    assert "LunarLander-v3: 0.05 costs return 180 instead of 200" in verdict.text
    assert judge(outcomes[:-1])["dqn"].default == 0.05  # two whole seeds there: not judged
    assert "not judged, 2 of at least 3 seeds" in judge(outcomes[:-1])["dqn"].text


def test_a_run_that_misses_the_goal_counts_with_its_limit() -> None:
    outcomes = [*EVERY, *runs("divergence-0.05", [490, 490, 490], [None, None, None])]
    assert judge(outcomes)["dqn"].default is None


def test_differences_within_one_standard_error_are_no_cost() -> None:
    far = runs("every-version", [100, 200, 300], [400, 400, 400])
    assert judge([*far, *runs("divergence-0.1", [80, 170, 280], [400] * 3)])["dqn"].default == 0.1


def test_the_table_counts_only_seeds_that_all_arms_have() -> None:
    rows = table([*EVERY, *runs("divergence-0.05", [480, 490], [400, None])]).splitlines()[2:]
    assert rows == [
        "| CartPole-v1 | dqn | every-version | 2 | 495.0 ± 7.1 | 2 | 400 ± 0 | 10 ± 0 | 100 ± 0 "
        "| 0% | 1.00 ± 0.00 | 1.000 |",
        "| CartPole-v1 | dqn | divergence-0.05 | 2 | 485.0 ± 7.1 | 1 | 700 ± 424 | 10 ± 0 | 10 ± 0 "
        "| 90% | 0.10 ± 0.00 | 0.100 |",
    ]


def test_arms_of_a_seed_run_side_by_side_and_cartpole_comes_first() -> None:
    planned = cases(Args())
    assert len(planned) == 2 * 3 * 4 * 5
    assert [case.name for case in planned[:5]] == [
        "CartPole-v1-ppo-every-version-100",
        "CartPole-v1-ppo-divergence-0.01-100",
        "CartPole-v1-ppo-divergence-0.05-100",
        "CartPole-v1-ppo-divergence-0.1-100",
        "CartPole-v1-dqn-every-version-100",
    ]
    assert {case.env for case in planned[:60]} == {"CartPole-v1"}


def test_only_the_rule_differs_between_the_arms() -> None:
    args = Args()
    of_dqn = [plan(args, case) for case in cases(args) if case.learner == "dqn"][:4]
    assert [each.sync for each in of_dqn] == ["every-version", *["divergence"] * 3]
    alike = {"sync": "never", "threshold": 0.0, "out": None}
    assert len({dataclasses.replace(each, **alike) for each in of_dqn}) == 1


def test_the_comparison_is_finished_by_a_second_call(
    tmp_path: Path, client: Client, leaves_nothing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = str(client.scheduler.address)
    sweep(tiny(tmp_path, cluster, learners=("ppo",)))
    sweep(tiny(tmp_path, cluster))
    outcomes = records.read(tmp_path / "summary.csv", Outcome)
    found = [(o.learner, o.arm) for o in outcomes]
    assert found == [
        (n, a) for n in ("ppo", "dqn", "apex") for a in ("every-version", "divergence-0.05")
    ]
    assert all(o.final_low <= o.final_return <= o.final_high for o in outcomes)
    assert "run 1 of 4: CartPole-v1-dqn-every-version-1" in capsys.readouterr().out
    assert (tmp_path / "CartPole-v1.png").stat().st_size > 10_000
    before = (tmp_path / "summary.csv").read_bytes()
    verdicts = sweep(tiny(tmp_path, cluster, plot_only=True))
    assert (tmp_path / "summary.csv").read_bytes() == before
    assert "no verdict, too few seeds" in verdicts["apex"].text
    with pytest.raises(ConfigError, match="total_steps 2048, not 4096"):
        sweep(tiny(tmp_path, cluster, total_steps=4_096))


def test_a_forced_lag_is_an_arm_and_never_a_default() -> None:
    args = Args(envs=("CartPole-v1",), learners=("impala",), thresholds=(), every=(32, 8))
    names = {case.arm.name: plan(args, case) for case in cases(args)}
    assert list(names) == ["every-version", "every-8", "every-32"]
    assert (names["every-8"].sync, names["every-8"].every) == ("every", 8)
    verdict = judge([*EVERY, *runs("every-8", [500, 500, 500], [400, 400, 400])])["dqn"]
    assert verdict.default is None
    assert "every-8 costs nothing" in verdict.text
