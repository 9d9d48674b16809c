"""Which learners may pull weights on divergence? Thresholds against every-version.

``python -m benchmarks.studies.aps_learners`` trains every learner on every environment with every
rule, then plots, tabulates and judges by :mod:`benchmarks.studies.aps_defaults`. The same command
resumes what was stopped. All settings but the rule come from the learners' presets. With
``--every 8 32`` it also measures what a lag of so many versions costs.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from benchmarks.studies import records
from benchmarks.studies.aps_arms import Arm
from benchmarks.studies.aps_defaults import Outcome, Verdict, judge, table
from benchmarks.studies.aps_learner_plots import draw
from benchmarks.studies.command import main
from benchmarks.studies.curves import GOALS
from clusterenv.errors import ConfigError
from pipelines import learners
from pipelines.experiment import run
from pipelines.experiment.checks import Count, Limit, Natural, Options
from pipelines.experiment.directories import check_kind, unused
from pipelines.experiment.sinks import read_csv

__all__ = ["Args", "sweep"]

CURVE = ("steps", "eval_steps", "eval_return", "pulls", "weight_bytes", "seconds")
TOTAL_STEPS = {  # of each run; a run on CartPole stops when an evaluation reaches the goal
    ("CartPole-v1", "ppo"): 150_000,
    ("CartPole-v1", "dqn"): 200_000,
    ("CartPole-v1", "apex"): 200_000,
    ("LunarLander-v3", "ppo"): 300_000,
    ("LunarLander-v3", "dqn"): 150_000,
    ("LunarLander-v3", "apex"): 150_000,
    **{("CartPole-v1", name): 200_000 for name in ("impala", "impact", "vmpo")},
    **{("LunarLander-v3", name): 500_000 for name in ("impala", "impact", "vmpo")},
}
STOPS = ("CartPole-v1",)
EVALUATE_EVERY = {"CartPole-v1": 5_000, "LunarLander-v3": 20_000}  # steps


@dataclass(frozen=True)
class Args(Options):
    """What to compare, and where the results are."""

    envs: tuple[Literal["CartPole-v1", "LunarLander-v3"], ...] = ("CartPole-v1", "LunarLander-v3")
    learners: tuple[Literal["ppo", "dqn", "apex", "impala", "impact", "vmpo"], ...] = (
        *("ppo", "dqn", "apex"),
    )
    thresholds: tuple[Limit, ...] = (0.01, 0.05, 0.1)  # beside every-version
    every: tuple[Count, ...] = ()  # further arms: pull when this many versions behind
    seeds: tuple[Natural, ...] = (100, 200, 300, 400, 500)  # far apart: environment i gets seed + i
    total_steps: Count | None = (
        None  # of each run; default: TOTAL_STEPS in benchmarks/studies/aps_learners.py
    )
    evaluate_episodes: Count = 20  # of each evaluation
    shards: Count = 2  # worker processes
    cluster: str | None = None  # scheduler address, file or jobqueue name; else this machine
    out: Path = Path(
        "docs/experiments/aps-learners"
    )  # summary, curves, plots; runs/ is not for git
    plot_only: bool = False  # draw and judge what is in --out

    @property
    def arms(self) -> list[Arm]:
        """Every-version, the thresholds, and the forced lags."""
        divergence = [Arm("divergence", number) for number in sorted(set(self.thresholds))]
        every = [Arm("every", number) for number in sorted(set(self.every))]
        return [Arm("every-version"), *divergence, *every]


@dataclass(frozen=True)
class Case:
    """One run of the experiment."""

    env: str
    learner: str
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """Of its directory and its curve."""
        return f"{self.env}-{self.learner}-{self.arm.name}-{self.seed}"


def cases(args: Args) -> list[Case]:
    """Return all runs in order: arms side by side, so that a busy machine affects all alike."""
    return [
        Case(env, learner, arm, seed)
        for env in args.envs
        for seed in args.seeds
        for learner in args.learners
        for arm in args.arms
    ]


def plan(args: Args, case: Case) -> Any:
    """Return the learner's arguments for one run."""
    changes: dict[str, Any] = {
        "sync": case.arm.rule,
        "seed": case.seed,
        "total_steps": args.total_steps or TOTAL_STEPS[case.env, case.learner],
        "stop_at": GOALS[case.env] if case.env in STOPS else None,
        "evaluate_every": EVALUATE_EVERY[case.env],
        "evaluate_episodes": args.evaluate_episodes,
        "shards": args.shards,
        "cluster": args.cluster,
        "out": args.out / "runs" / case.name,
    }
    if case.learner == "ppo":
        changes["overlap"] = False  # the lag is the rule's alone
    if case.arm.rule == "divergence":
        changes["threshold"] = case.arm.number
    elif case.arm.number is not None:
        changes["every"] = int(case.arm.number)
    return learners.load(case.learner).preset(case.env, **changes)


def train(args: Args, case: Case) -> Outcome:
    """Start or resume one run, and save its curve."""
    planned = plan(args, case)
    result = run(learners.load(case.learner), planned)
    if result.steps < planned.total_steps and result.reached_at is None:
        raise KeyboardInterrupt(f"stopped in {result.out}; the same command goes on from there")
    rows = read_csv(result.out / "progress.csv")
    curve = evaluations(rows)
    if not curve:
        raise ConfigError(f"{result.out} has no evaluation: delete it and run this command again")
    records.write(args.out / "curves" / f"{case.name}.csv", curve)
    goal, last = GOALS[case.env], rows[-1]
    reached = (row for row in curve if float(row["eval_return"]) >= goal)
    first = next((int(float(row["eval_steps"])) for row in reached), None)
    return Outcome(
        env=case.env,
        learner=case.learner,
        arm=case.arm.name,
        seed=case.seed,
        total_steps=planned.total_steps,
        final_return=float(last["eval_return"]),
        final_low=float(last["eval_return_low"]),
        final_high=float(last["eval_return_high"]),
        goal_steps=result.reached_at or first,
        steps=result.steps,
        versions=result.version,
        pulls=result.pulls,
        pulls_saved=int(last["pulls_saved"]),
        weight_bytes=result.weight_bytes,
        seconds=result.seconds,
    )


def evaluations(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return the rows of a ``progress.csv`` that first show an evaluation."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        if math.isfinite(float(row.get("eval_return") or math.nan)):
            found.setdefault(row["eval_steps"], {name: row[name] for name in CURVE})
    return list(found.values())


def sweep(args: Args) -> dict[str, Verdict]:
    """Do all runs that are missing in the summary; plot, tabulate and judge the summary.

    Raises
    ------
    ConfigError
        If the arguments cannot work, or differ from those of the runs in ``out``.
    """
    check_kind(args.out, "aps_learners")
    outcomes = records.read(args.out / "summary.csv", Outcome)
    finished = {(o.env, o.learner, o.arm, o.seed): o for o in outcomes}
    todo = []
    for case in [] if args.plot_only else cases(args):
        steps = plan(args, case).total_steps
        before = finished.get((case.env, case.learner, case.arm.name, case.seed))
        if before is None:
            todo.append(case)
        elif before.total_steps != steps:
            raise ConfigError(
                f"{args.out} holds runs of {case.learner} with total_steps {before.total_steps}, "
                f"not {steps}; write elsewhere: --out {unused(args.out)}"
            )
    for index, case in enumerate(todo):
        alike = [o.seconds for o in outcomes if (o.env, o.learner) == (case.env, case.learner)]
        took = f"about {timedelta(seconds=round(fmean(alike)))}" if alike else "unknown"
        print(f"run {index + 1} of {len(todo)}: {case.name}; duration: {took}", flush=True)
        outcomes.append(train(args, case))
        records.write(args.out / "summary.csv", [dataclasses.asdict(each) for each in outcomes])
        # The rows of a finished run are of no further use, and are many.
        shutil.rmtree(args.out / "runs" / case.name / "replay", ignore_errors=True)
    if not outcomes:
        raise ConfigError(f"{args.out} has no finished run; run some: --seeds 100 200 300")
    draw(args.out, outcomes)
    verdicts = judge(outcomes)
    print(f"{table(outcomes)}\n\n" + "\n".join(each.text for each in verdicts.values()), flush=True)
    return verdicts


if __name__ == "__main__":
    main(sweep, Args)
