"""Evaluation beside training: metrics, the best version, the goal, and unchanged learning."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client

import clusterenv
from clusterenv import Evaluation
from clusterenv.errors import ConfigError
from pipelines import ppo
from pipelines.apex import Apex
from pipelines.dqn import DQN
from pipelines.experiment import run
from pipelines.experiment.evaluation import SEED
from pipelines.experiment.metrics import Metrics
from pipelines.experiment.sinks import CsvFile, TensorBoard
from pipelines.experiment.splits import check_splits, environments, judge
from pipelines.impala import IMPALA
from pipelines.ppo import PPO
from pipelines.tools import evaluate
from pipelines.tools.saved_policies import load_run

EVALUATED = ("eval_return", "eval_return_low", "eval_return_high", "eval_length", "eval_steps")


@pytest.fixture
def cluster(client: Client, leaves_nothing: None) -> str:
    """The shared workers' scheduler."""
    return str(client.scheduler.address)


def short(out: Path, cluster: str, **changes: Any) -> ppo.Args:
    """Some updates of 8 × 32 rows."""
    settings = {"num_envs": 8, "horizon": 32, "shards": 2, "epochs": 2, "quiet": True}
    settings |= {"anneal": False, "log_every": 1, "total_steps": 6 * 256, "cluster": cluster}
    return PPO.preset("CartPole-v1", **{**settings, "out": out, **changes})


def progress(out: Path) -> list[dict[str, str]]:
    with (out / "progress.csv").open() as file:
        return list(csv.DictReader(file))


def test_learning_is_the_same_with_and_without_evaluation(tmp_path: Path, cluster: str) -> None:
    plain = run(PPO, short(tmp_path / "plain", cluster))
    judged = run(PPO, short(tmp_path / "judged", cluster, evaluate_every=256, evaluate_episodes=4))
    assert plain.eval_return is None
    assert judged.eval_return is not None
    same = ("steps", "policy_loss", "value_loss", "entropy", "kl", "mean_return")
    with_, without = (
        {row["steps"]: [row[name] for name in same] for row in progress(tmp_path / name)}
        for name in ("judged", "plain")
    )
    assert with_ == without


def test_an_evaluation_may_measure_something_else(tmp_path: Path, cluster: str) -> None:
    changes: dict[str, Any]
    changes = {"evaluate_every": 512, "evaluate_episodes": 3, "total_steps": 2 * 256}
    changes["evaluate_env_args"] = ("sutton_barto_reward=true",)  # -1 at the end
    result = run(PPO, short(tmp_path, cluster, **changes))
    assert result.eval_return == -1.0
    assert result.mean_return > 5.0
    saved = load_run(tmp_path)
    assert saved.evaluated_with == ("sutton_barto_reward=true",)
    play = evaluate.Args(tmp_path, episodes=3, cluster=cluster)
    assert set(evaluate.evaluate(play, saved).returns) == {-1.0}
    changed = dataclasses.replace(play, env_args=())
    assert evaluate.evaluate(changed, saved).mean > 5.0
    said = dict(evaluate.describe(play, saved, evaluate.evaluate(play, saved)))
    assert said["policy"].endswith("CartPole-v1 sutton_barto_reward=true")
    with pytest.raises(ConfigError, match="--evaluate-env-args reward is no argument"):
        PPO.preset("CartPole-v1", evaluate_env_args=("reward",))


def test_a_run_logs_its_evaluations_and_keeps_the_best(tmp_path: Path, cluster: str) -> None:
    args = short(tmp_path, cluster, evaluate_every=512, evaluate_episodes=4)
    result = run(PPO, args)
    rows = progress(tmp_path)
    assert set(EVALUATED) <= set(rows[0])
    assert rows[0]["eval_return"] == ""  # none yet
    assert rows[-1]["eval_steps"] == "1536"  # the last weights are evaluated at the end
    assert float(rows[-1]["eval_return"]) == pytest.approx(result.eval_return, rel=1e-4)
    assert float(rows[-1]["eval_return_low"]) <= float(rows[-1]["eval_return"])
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["eval_return"] is None
    assert records[-1]["eval_length"] == records[-1]["eval_return"]  # as CartPole has it
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    returns = {float(row["eval_return"]) for row in rows if row["eval_return"]}
    assert best["return"] == pytest.approx(max(returns), rel=1e-4)
    assert best["kind"] == "ppo"
    assert best["steps"] in {int(row["eval_steps"]) for row in rows if row["eval_steps"]}
    (last,) = tmp_path.glob("learner-*.pt")
    weights = torch.load(last, weights_only=True)["learner"]["agent"]
    assert best["policy"].keys() == weights.keys()

    # A resumed run keeps the best, and may be evaluated otherwise, or not at all.
    kept = {**best, "return": 9999.0}
    torch.save(kept, tmp_path / "best.pt")
    run(PPO, short(tmp_path, cluster, total_steps=7 * 256))
    assert progress(tmp_path)[-1]["eval_return"] == ""
    again = {"evaluate_every": 256, "evaluate_episodes": 3}
    run(PPO, short(tmp_path, cluster, total_steps=8 * 256, **again))
    assert torch.load(tmp_path / "best.pt", weights_only=True)["return"] == 9999.0
    assert progress(tmp_path)[-1]["eval_steps"] == "2048"


def test_a_run_that_is_resumed_may_begin_to_be_evaluated(tmp_path: Path, cluster: str) -> None:
    run(PPO, short(tmp_path, cluster, total_steps=256))
    assert not (tmp_path / "best.pt").exists()
    args = short(tmp_path, cluster, total_steps=512, evaluate_every=256)
    run(PPO, args)
    rows = progress(tmp_path)
    assert rows[0]["eval_steps"] == ""
    assert rows[-1]["eval_steps"] == "512"


def test_an_evaluation_decides_on_the_goal(tmp_path: Path, cluster: str) -> None:
    args = short(
        tmp_path, cluster, total_steps=10**6, evaluate_every=256, evaluate_episodes=2, stop_at=1.0
    )
    result = run(PPO, args)
    assert result.reached_at is not None
    assert result.reached_at <= result.steps < 10**5
    assert result.reached_at % 256 == 0


@pytest.mark.parametrize("learner", [DQN, Apex])
def test_learners_with_a_store_are_evaluated_too(
    tmp_path: Path, cluster: str, learner: Any
) -> None:
    options: dict[str, Any] = {"cluster": cluster, "evaluate_every": 256, "evaluate_episodes": 3}
    sizes: dict[str, Any] = {"total_steps": 512, "num_envs": 4, "horizon": 8, "shards": 2}
    sizes |= {"min_rows": 128, "log_every": 128, "batch": 16, "hidden": (16,), "quiet": True}
    goal = 1.0 if learner is DQN else None
    args = learner.preset("CartPole-v1", **sizes, **options, stop_at=goal, out=tmp_path)
    result = run(learner, args)
    last = progress(tmp_path)[-1]
    assert float(last["eval_return"]) == pytest.approx(result.eval_return, rel=1e-4)
    best = load_run(tmp_path)
    assert best.path.name == "best.pt"
    assert 0 < best.steps <= result.steps
    if goal is not None:
        assert result.reached_at is not None
        assert result.reached_at <= result.steps
        again = run(learner, args)  # it is finished
        assert (again.steps, again.reached_at) == (result.steps, result.reached_at)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate_episodes": 0}, "--evaluate-episodes must be 1 or more, got 0"),
        ({"evaluate_every": 0}, "--evaluate-every must be 1 or more, got 0"),
    ],
)
def test_no_episodes_are_refused(changes: dict[str, Any], message: str) -> None:
    for preset in (PPO.preset, DQN.preset, Apex.preset):
        with pytest.raises(ConfigError, match=message):
            preset("CartPole-v1", **changes)


def test_columns_that_come_later_are_empty_before(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    sink = CsvFile(path, None)
    sink.write(Metrics(steps=1, mean_return=2.0))
    sink.write(Metrics(steps=2, mean_return=3.0, eval_return=math.nan, eval_steps=math.nan))
    sink.write(Metrics(steps=3, mean_return=4.0, eval_return=7.5, eval_steps=2))
    sink.close()
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["eval_return"] for row in rows] == ["", "", "7.5"]
    assert [row["mean_return"] for row in rows] == ["2", "3", "4"]


def test_tensorboard_shows_an_evaluation_once_at_its_own_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path, None)
    for steps, at in ((10, math.nan), (20, 12), (30, 12), (40, 31)):
        sink.write(Metrics(steps=steps, eval_return=float(at), eval_steps=at))
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    found = [(event.step, event.value) for event in events.Scalars("eval/eval_return")]
    assert found == [(12, 12.0), (31, 31.0)]


GRID = "clusterenv/ZipfGridworldSmall-v0"


def test_splits_are_judged_apart_by_their_own_episodes(tmp_path: Path, cluster: str) -> None:
    """The means are those of an evaluator that knows nothing of the others."""
    splits = ("rare", "uniform", "zipf")
    sizes = {"num_envs": 4, "horizon": 16, "shards": 2, "cnn": "tiles:9", "engine": "native"}
    evaluated = {"evaluate_every": 64, "evaluate_episodes": 7, "evaluate_splits": splits}
    more = {"total_steps": 64, "log_every": 1, "quiet": True, "cluster": cluster, "out": tmp_path}
    result = run(IMPALA, IMPALA.preset(GRID, **sizes, **evaluated, **more))
    (*_, last) = progress(tmp_path)
    assert float(last["eval_rare"]) == pytest.approx(result.eval_return, rel=1e-4)  # the first
    count = min(10, 7)
    played = []
    with clusterenv.Evaluator(
        environments(GRID, splits, count),
        load_run(tmp_path, "last").policy,
        episodes=21,
        num_envs=21,
        seed=1 + SEED,
        cluster=cluster,
    ) as evaluator:
        evaluator.publish(load_run(tmp_path, "last").policy, 0)
        evaluator.wait(60)
        played = list(evaluator.results())
    found = judge(played[0], splits, count)
    assert {len(each.returns) for each in found.values()} == {7}
    for split in splits:
        assert float(last[f"eval_{split}"]) == pytest.approx(found[split].mean, rel=1e-4)
    envs = environments(GRID, splits, 2)
    assert [env().unwrapped.reset(seed=1)[1]["map"] == 2 for env in envs[::3]] == [True, True]


def test_an_uneven_number_of_episodes_stays_with_its_split() -> None:
    returns = np.repeat([0.0, 1.0, 0.0, 1.0, 0.0, 1.0], [3, 3, 2, 2, 2, 2])  # of 3 envs each
    found = judge(Evaluation(1, returns, returns.astype(np.int64)), ("a", "b"), 3)
    assert [(each.mean, len(each.returns)) for each in found.values()] == [(0, 7), (1, 7)]


@pytest.mark.parametrize(
    ("env", "changes", "message"),
    [
        (GRID, {"evaluate_splits": ("rear",)}, r"split='rear'.*none of 'zipf', 'uniform', 'rare'"),
        ("CartPole-v1", {"evaluate_splits": ("rare",)}, r"CartPole-v1 cannot .*split='rare'"),
        (GRID, {"evaluate_splits": ("rare", "rare")}, "has 'rare', twice; leave it out"),
        (GRID, {"evaluate_splits": ("return",)}, "'return', which is the name of another metric"),
        (GRID, {"evaluate_splits": ("rare",), "engine": "envpool"}, "--engine auto"),
    ],
)
def test_splits_that_are_not_there_are_refused(
    env: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_splits(env, changes["evaluate_splits"], changes.get("engine", "auto"))


@pytest.mark.parametrize("engine", ["auto", "gymnasium", "native", "envpool"])
def test_a_run_without_splits_may_have_any_engine(engine: str) -> None:
    check_splits("CartPole-v1", (), engine)


def test_metrics_of_splits_are_read_back_apart_from_the_learners() -> None:
    metrics = Metrics(steps=3, eval_splits={"eval_rare": 0.5}, learner={"kl": 0.1})
    assert Metrics.read(metrics.given()) == metrics
    assert metrics.tags()["eval/eval_rare"] == 0.5
    assert metrics.tags()["losses/kl"] == 0.1
