"""The sweep over synchronization rules: what it concludes, and that it can be called again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from distributed import Client

from benchmarks.studies import records
from benchmarks.studies.aps_arms import Args, Arm, Outcome, arms, judge, table
from benchmarks.studies.aps_plots import spread, together
from benchmarks.studies.aps_sweep import plan, sweep
from clusterenv.errors import ConfigError
from pipelines.experiment import run
from pipelines.ppo import PPO

PLOTS = ("return.png", "pulls.png", "throughput.png", "bytes.png")


def outcome(name: str, final: float, weight_bytes: int, seed: int = 1) -> Outcome:
    arm = Arm.named(name)
    return Outcome(
        arm=name,
        rule=arm.rule,
        threshold=arm.number if arm.rule == "divergence" else None,
        seed=seed,
        final_return=final,
        best_return=final,
        steps=1000,
        versions=10,
        pulls=weight_bytes // 10,
        pulls_per_worker=weight_bytes / 20,
        weight_bytes=weight_bytes,
        steps_per_second=100.0,
        lag_mean=0.5,
        seconds=10.0,
    )


def tiny(out: Path, cluster: str | None = None, **changes: object) -> Args:
    """Two runs of 8 updates each."""
    options: dict[str, object] = {
        "env": "CartPole-v1",
        "seeds": (1,),
        "total_steps": 2048,
        "num_envs": 8,
        "horizon": 32,
        "only": ("every-version", "divergence-0.05"),
    }
    return Args(out=out, cluster=cluster, **{**options, **changes})  # type: ignore[arg-type]


@pytest.fixture
def cluster(client: Client, leaves_nothing: None) -> str:
    """The shared workers' scheduler: no cluster is started for each run."""
    return str(client.scheduler.address)


def contents(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_arms_are_the_thresholds_between_their_controls() -> None:
    found = arms(Args(thresholds=(0.5, 0.0, 0.001, 0.5), every=(16, 4)))
    names = ["every-version", "divergence-0", "divergence-0.001", "divergence-0.5"]
    names += ["every-4", "every-16", "never"]
    assert [arm.name for arm in found] == names
    assert [Arm.named(name) for name in names] == found
    assert len(arms(Args())) * len(Args().seeds) == 55


def test_an_arm_decides_how_its_runs_pull(tmp_path: Path) -> None:
    args = Args(out=tmp_path)
    planned = {arm.name: plan(args, arm, 7) for arm in arms(args)}
    assert planned["divergence-0.2"].sync == "divergence"
    assert planned["divergence-0.2"].threshold == 0.2
    assert (planned["every-16"].sync, planned["every-16"].every) == ("every", 16)
    assert planned["never"].out == tmp_path / "runs" / "never-7"
    assert {(p.seed, p.num_envs * p.horizon) for p in planned.values()} == {(7, 2048)}


def test_a_threshold_that_keeps_the_return_with_few_bytes_is_named() -> None:
    outcomes = [
        *(outcome("every-version", final, 1000, seed) for seed, final in ((1, 190), (2, 210))),
        outcome("divergence-0.01", 210, 101),  # one byte too many
        outcome("divergence-0.05", 190, 100),  # just within both
        outcome("divergence-0.1", 189, 50),  # just too low
        outcome("every-16", 200, 60),  # no threshold
        outcome("never", 19, 0),
    ]
    verdict = judge(outcomes, random_return=-160.0)
    assert verdict.thresholds == (0.05,)
    assert verdict.never_failed is True
    assert "weight bytes: 0.05." in verdict.text
    assert "failed, as it must" in verdict.text


def test_no_threshold_is_named_if_all_lose_return_or_save_too_little() -> None:
    outcomes = [
        outcome("every-version", 200, 1000),
        outcome("divergence-0", 220, 1000),
        outcome("divergence-1", 100, 10),
        outcome("never", -100, 0),
    ]
    verdict = judge(outcomes, random_return=-160.0)
    assert verdict.thresholds == ()
    assert "weight bytes: none." in verdict.text


def test_never_that_learns_is_said_not_to_fail() -> None:
    outcomes = [outcome("every-version", 200, 1000), outcome("never", 20, 0)]
    verdict = judge(outcomes, random_return=-160.0)
    assert verdict.never_failed is False
    assert "never did NOT fail" in verdict.text


def test_within_five_percent_of_a_negative_return_is_still_below_it() -> None:
    outcomes = [
        outcome("every-version", -100, 1000),
        outcome("divergence-0.1", -105, 10),
        outcome("divergence-0.2", -106, 10),
    ]
    assert judge(outcomes, random_return=-1000.0).thresholds == (0.1,)


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        ([outcome("divergence-0.1", 200, 10)], "every-version has not run"),
        ([outcome("every-version", -170, 10), outcome("never", -180, 0)], "did not learn"),
    ],
)
def test_without_a_control_that_learnt_there_is_no_verdict(
    outcomes: list[Outcome], reason: str
) -> None:
    verdict = judge(outcomes, random_return=-160.0)
    assert (verdict.thresholds, verdict.never_failed) == (None, None)
    assert reason in verdict.text


def test_the_table_has_means_deviations_and_ratios() -> None:
    outcomes = [
        outcome("never", -50, 0),
        outcome("divergence-0.1", 150, 100),
        outcome("every-version", 190, 1000, seed=1),
        outcome("every-version", 210, 1000, seed=2),
    ]
    rows = table(outcomes).splitlines()[2:]
    assert rows == [
        "| every-version | 2 | 200.0 ± 14.1 | 50.0 ± 0.0 | 1,000 ± 0 | 1.000 | 1.000 |",
        "| divergence-0.1 | 1 | 150.0 | 5.0 | 100 | 0.100 | 0.750 |",
        "| never | 1 | -50.0 | 0.0 | 0 | 0.000 | -0.250 |",
    ]
    assert table(outcomes[:1]).splitlines()[2].endswith("| – | – |")


def test_curves_are_compared_where_all_have_a_value() -> None:
    nan = float("nan")
    curves = [
        [{"steps": 1, "pulls": nan}, {"steps": 2, "pulls": 4.0}, {"steps": 3, "pulls": 6.0}],
        [{"steps": 1, "pulls": 2.0}, {"steps": 2, "pulls": 8.0}],
    ]
    assert together(curves, "pulls", share=2) == ([2], [[2.0, 4.0]])


def test_labels_do_not_overlap() -> None:
    assert spread([0.1, 0.1, 0.5], 0.2) == pytest.approx([0.1, 0.3, 0.5])
    assert spread([0.9, 0.95, 1.0], 0.2) == pytest.approx([0.6, 0.8, 1.0])


def test_a_sweep_writes_its_results_and_a_second_call_changes_nothing(
    tmp_path: Path, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = sweep(tiny(tmp_path, cluster))
    outcomes = records.read(tmp_path / "summary.csv", Outcome)
    assert [(o.arm, o.threshold, o.seed) for o in outcomes] == [
        ("every-version", None, 1),
        ("divergence-0.05", 0.05, 1),
    ]
    assert [o.steps for o in outcomes] == [2048, 2048]
    assert outcomes[0].weight_bytes > 0
    assert [o.pulls_per_worker for o in outcomes] == [o.pulls / 2 for o in outcomes]
    assert outcomes[1].pulls < outcomes[0].pulls
    curve = (tmp_path / "curves" / "every-version-1.csv").read_text().splitlines()
    assert curve[0] == "steps,mean_return,pulls,weight_bytes"
    assert len(curve) == 1 + 8
    for name in PLOTS:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "run 2 of 2: divergence-0.05, seed 1" in capsys.readouterr().out

    before = contents(tmp_path)
    assert sweep(tiny(tmp_path, cluster)) == first
    assert contents(tmp_path) == before
    (tmp_path / "return.png").unlink()
    # Settings and arms are those of the results, whatever else the command says.
    assert sweep(Args(out=tmp_path, plot_only=True)) == first
    assert contents(tmp_path) == before
    with pytest.raises(ConfigError, match=r"total_steps 4096 \(was 2048\)"):
        sweep(tiny(tmp_path, cluster, total_steps=4096))


@pytest.mark.parametrize("rule", ["every-version", "never"])
def test_a_run_cut_in_the_middle_is_finished_by_the_next_call(
    tmp_path: Path, cluster: str, rule: str
) -> None:
    """It goes on from there, unless that would hand ``never`` a newer version."""
    args = tiny(tmp_path, cluster, only=(rule,), total_steps=1024)
    planned = dataclasses.replace(plan(args, Arm(rule), 1), quiet=True)
    cut = run(PPO, dataclasses.replace(planned, total_steps=512))
    assert (cut.steps, records.read(tmp_path / "summary.csv", Outcome)) == (512, [])
    sweep(args)
    (finished,) = records.read(tmp_path / "summary.csv", Outcome)
    assert finished.steps == 1024
    # A run that goes on publishes what it had learned since the last version.
    assert finished.versions == (4 if rule == "never" else 5)


@pytest.mark.parametrize(
    "bad",
    [
        {"only": ("divergence-3",)},
        {"thresholds": (-1.0,), "only": ()},
        {"every": (0,), "only": ()},
        {"horizon": 0},
        {"plot_only": True},
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_written(
    tmp_path: Path, bad: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="--"):
        sweep(tiny(tmp_path / "out", **bad))
    assert not (tmp_path / "out").exists()
