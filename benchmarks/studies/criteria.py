"""Do the learners reach the goals that others publish? Judged by 100 episodes without exploration.

``python -m benchmarks.studies.criteria`` trains every learner on every task with three seeds that
had no part in choosing its settings, evaluates the last weights, and writes a summary, the curves
of the evaluations beside training, and a plot for each task. The same command resumes what was
stopped; ``--learners``, ``--envs`` and ``--seeds`` select.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.studies import records
from benchmarks.studies.aps_learners import evaluations
from benchmarks.studies.command import main
from clusterenv.errors import ConfigError
from pipelines import learners
from pipelines.envs.football import EASIEST
from pipelines.experiment import run
from pipelines.experiment.checks import Count, Natural, Options
from pipelines.experiment.directories import check_kind
from pipelines.experiment.sinks import read_csv
from pipelines.tools import evaluate

__all__ = ["TASKS", "Args", "Outcome", "Task", "judge"]


class Task(NamedTuple):
    """What a learner has to reach."""

    steps: int
    """Allowed."""
    goal: float
    """Mean return of the last weights, over 100 episodes."""
    others: str = "–"
    """The criterion that others publish."""


NO_VELOCITY = "clusterenv/CartPoleNoVelocity-v1"
EMPTY_GOAL_CLOSE, EMPTY_GOAL, RUN_TO_SCORE = EASIEST
CARTPOLE = "RLlib: 450 in 2M"
TASKS: dict[tuple[str, str], Task] = {
    ("CartPole-v1", "ppo"): Task(150_000, 475, "RLlib: 450 in 300k"),
    ("CartPole-v1", "dqn"): Task(200_000, 475, "RLlib: 450 in 200k"),
    ("CartPole-v1", "apex"): Task(200_000, 475),
    ("CartPole-v1", "impala"): Task(500_000, 475, CARTPOLE),
    ("CartPole-v1", "impact"): Task(500_000, 475, CARTPOLE),
    ("CartPole-v1", "vmpo"): Task(300_000, 475),
    (NO_VELOCITY, "impala"): Task(1_500_000, 400, "RLlib: 350 in 2M"),
    (NO_VELOCITY, "r2d2"): Task(400_000, 400, "RLlib: 150 in 1M"),
    (NO_VELOCITY, "r2d2-zero-state"): Task(400_000, 400),
    (NO_VELOCITY, "r2d2-no-burn-in"): Task(400_000, 400),
    ("LunarLander-v3", "ppo"): Task(500_000, 200, "rl-zoo: 242 at 1M"),
    ("LunarLander-v3", "dqn"): Task(400_000, 200, "rl-zoo: 154 at 100k"),
    ("LunarLander-v3", "apex"): Task(400_000, 200),
    ("LunarLander-v3", "impala"): Task(1_500_000, 220),
    ("LunarLander-v3", "impact"): Task(1_500_000, 220),
    ("LunarLander-v3", "vmpo"): Task(1_500_000, 220),
    ("Pendulum-v1", "impact"): Task(500_000, -200, "RLlib: -300"),
    ("Pendulum-v1", "vmpo"): Task(500_000, -200),
    ("Pendulum-v1", "sac"): Task(20_000, -200, "RLlib: -250 in 20k"),
    ("LunarLanderContinuous-v3", "sac"): Task(500_000, 240),
    ("HalfCheetah-v5", "sac"): Task(500_000, 4_000),
    # Football's presets evaluate the score: goals per episode, which ends with the first.
    (EMPTY_GOAL_CLOSE, "ppo"): Task(1_000_000, 0.9),
    (EMPTY_GOAL_CLOSE, "impala"): Task(1_000_000, 0.9),
    (EMPTY_GOAL_CLOSE, "apex"): Task(1_000_000, 0.9),
    (EMPTY_GOAL, "ppo"): Task(1_000_000, 0.7),
    (RUN_TO_SCORE, "ppo"): Task(1_000_000, 0.7),
}
ABLATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "r2d2-zero-state": ("r2d2", "R2D2 without stored state", {"zero_state": True}),
    "r2d2-no-burn-in": ("r2d2", "R2D2 without burn-in", {"burn_in": 0}),
}
"""Learner, title and other options of what is not a learner of its own."""
EVALUATIONS = 25  # beside each run


@dataclass(frozen=True)
class Args(Options):
    """What to train, and where the results are."""

    learners: tuple[str, ...] = ()  # default: all
    envs: tuple[str, ...] = ()  # default: all
    seeds: tuple[Natural, ...] = (1, 1001, 2001)  # far apart: environment i gets seed + i
    shards: Count = 2  # worker processes
    out: Path = Path("docs/experiments/criteria")  # summary, curves, plots; runs/ is not for git
    keep_runs: bool = (
        False  # leave the run directories in --out, for videos; by default only curves
    )
    plot_only: bool = False  # draw and tabulate what is in --out

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, chosen, place in (("learners", self.learners, 1), ("envs", self.envs, 0)):
            known = sorted({task[place] for task in TASKS})
            for each in chosen:
                if each not in known:
                    raise ConfigError(f"--{name} {each} is unknown; one of {', '.join(known)}")


@dataclass(frozen=True)
class Outcome:
    """How one run ended; a row of ``summary.csv``."""

    env: str
    learner: str
    seed: int
    steps: int
    goal: float
    final_return: float
    """Of the last weights, over 100 episodes without exploration."""
    final_low: float
    final_high: float
    """The 95 % interval of its mean over episodes."""
    goal_steps: int | None
    """Steps of the first version that was evaluated at the goal beside training."""


def train(args: Args, env: str, learner: str, seed: int) -> Outcome:
    """Start or resume one run, evaluate its last weights, and save its curve."""
    base, _, changes = ABLATIONS.get(learner, (learner, "", {}))
    task, kind = TASKS[env, learner], learners.load(base)
    name = _name(env, learner, seed)
    planned = kind.preset(
        env,
        total_steps=task.steps,
        seed=seed,
        shards=args.shards,
        evaluate_every=task.steps // EVALUATIONS,
        out=args.out / "runs" / name,
        **changes,
    )
    result = run(kind, planned)
    if result.steps < planned.total_steps:
        raise KeyboardInterrupt(f"stopped in {result.out}; the same command goes on from there")
    played = evaluate.evaluate(evaluate.Args(result.out, version="last", seed=10**6 + seed))
    curve = evaluations(read_csv(result.out / "progress.csv"))
    records.write(args.out / "curves" / f"{name}.csv", curve)
    above = (row for row in curve if float(row["eval_return"]) >= task.goal)
    return Outcome(
        env=env,
        learner=learner,
        seed=seed,
        steps=result.steps,
        goal=task.goal,
        final_return=played.mean,
        final_low=played.interval[0],
        final_high=played.interval[1],
        goal_steps=next((int(float(row["eval_steps"])) for row in above), None),
    )


def _name(env: str, learner: str, seed: int) -> str:
    """Return the name of a run's directory and curve."""
    return f"{env.replace('/', '-')}-{learner}-{seed}"


def _title(learner: str) -> str:
    """Return the name of a learner for people."""
    return ABLATIONS[learner][1] if learner in ABLATIONS else learners.load(learner).title


def judge(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table: a row for each task, with every seed."""
    lines = [
        "| task | learner | goal | published | returns, by seed | reached | first at the goal |",
        "|---|---|---:|---|---|---:|---|",
    ]
    for (env, learner), task in TASKS.items():
        runs = [each for each in outcomes if (each.env, each.learner) == (env, learner)]
        if not runs:
            continue
        runs.sort(key=lambda each: each.seed)
        digits = 2 if abs(task.goal) < 10 else 1
        returns = ", ".join(f"{each.final_return:.{digits}f}" for each in runs)
        firsts = ", ".join("–" if r.goal_steps is None else f"{r.goal_steps:,}" for r in runs)
        reached = sum(each.final_return >= task.goal for each in runs)
        lines.append(
            f"| {env} | {learner} | {task.goal:g} in {task.steps:,} | {task.others} | {returns} "
            f"| {reached} of {len(runs)} | {firsts} |"
        )
    return "\n".join(lines)


def draw(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Draw the evaluations beside training: a figure for each environment."""
    for env in dict.fromkeys(each.env for each in outcomes):
        figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
        axes = figure.subplots()
        names = [name for (task_env, name) in TASKS if task_env == env]
        for outcome in outcomes:
            if outcome.env != env:
                continue
            stem = _name(env, outcome.learner, outcome.seed)
            rows = read_csv(out / "curves" / f"{stem}.csv")
            steps, returns = (
                [float(row[n]) for row in rows] for n in ("eval_steps", "eval_return")
            )
            task = outcome.env, outcome.learner
            first = outcome.seed == min(o.seed for o in outcomes if (o.env, o.learner) == task)
            axes.plot(
                steps,
                returns,
                color=mpl.colormaps["tab10"](names.index(outcome.learner)),
                label=_title(outcome.learner) if first else None,
                linewidth=1.2,
            )
        goals = {task.goal for (task_env, _), task in TASKS.items() if task_env == env}
        for goal in goals:
            axes.axhline(goal, color="grey", linestyle="--", linewidth=1)
        axes.set(xlabel="environment steps", ylabel="return of 20 episodes", title=env)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(out / f"{env.replace('/', '-')}.png")


def study(args: Args) -> list[Outcome]:
    """Do all runs that are missing in the summary; plot and tabulate it."""
    check_kind(args.out, "criteria")
    outcomes = records.read(args.out / "summary.csv", Outcome)
    finished = {(each.env, each.learner, each.seed) for each in outcomes}
    wanted = [
        (env, learner, seed)
        for env, learner in TASKS
        if learner in (args.learners or [learner]) and env in (args.envs or [env])
        for seed in args.seeds
    ]
    todo = [] if args.plot_only else [each for each in wanted if each not in finished]
    for index, (env, learner, seed) in enumerate(todo):
        print(f"run {index + 1} of {len(todo)}: {learner} on {env}, seed {seed}", flush=True)
        found = train(args, env, learner, seed)
        outcomes = [*records.read(args.out / "summary.csv", Outcome), found]
        records.write(args.out / "summary.csv", [dataclasses.asdict(each) for each in outcomes])
        if not args.keep_runs:  # curves and summary are
            shutil.rmtree(args.out / "runs" / _name(env, learner, seed), ignore_errors=True)
    if not outcomes:
        raise ConfigError(f"{args.out} has no finished run; leave --plot-only out")
    draw(args.out, outcomes)
    print(judge(outcomes), flush=True)
    return outcomes


if __name__ == "__main__":
    main(study, Args)
