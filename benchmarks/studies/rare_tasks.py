"""Does an episodic memory help with rare tasks? IMPALA with and without one, on Zipf's gridworld.

``python -m benchmarks.studies.rare_tasks`` trains both with five seeds that had no part in
choosing their settings, for the same steps; judges the last weights on the zipf, uniform and rare
splits; compares the rarity that the memory computes with the true one; and writes a summary, the
curves of the evaluations beside training, and a plot. The same command resumes what was stopped.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure

import clusterenv
from benchmarks.studies import records
from benchmarks.studies.command import main
from clusterenv import Evaluation
from clusterenv.errors import ConfigError
from pipelines import learners
from pipelines.envs.zipf_gridworld import ZipfGridworld, observation, task_probabilities
from pipelines.experiment import run
from pipelines.experiment.checks import Count, Natural, Options
from pipelines.experiment.directories import check_kind
from pipelines.experiment.sinks import read_csv
from pipelines.experiment.splits import environments, judge
from pipelines.tools.saved_policies import load_run

__all__ = ["Args", "Outcome", "compare", "spearman", "study", "true_rarity"]

Arm = Literal["impala", "episodic_memory"]
ARMS: tuple[Arm, ...] = ("impala", "episodic_memory")
SPLITS = ("zipf", "uniform", "rare")
ENVS = 20  # of each split, that are evaluated together
GOAL = 0.3  # of the rank correlation of rarity


@dataclass(frozen=True)
class Args(Options):
    """What to train, and where the results are."""

    env: str = "clusterenv/ZipfGridworldSmall-v0"  # a Zipf gridworld
    seeds: tuple[Natural, ...] = (1, 1001, 2001, 3001, 4001)  # far apart: env i gets seed + i
    arms: tuple[Arm, ...] = ARMS  # which learners
    total_steps: Count | None = None  # of each run; default: the preset's
    evaluations: Count = 20  # beside each run
    episodes: Count = 200  # of each split, that judge the last weights
    shards: Count = 2  # worker processes
    out: Path = Path("docs/experiments/rare-tasks")  # summary, curves, plot; runs/ is not for git
    plot_only: bool = False  # draw and tabulate what is in --out


@dataclass(frozen=True)
class Outcome:
    """How one run ended; a row of ``summary.csv``."""

    arm: str
    seed: int
    steps: int
    seconds: float
    zipf: float
    uniform: float
    rare: float
    """Accuracies of the last weights, with sampled actions."""
    spearman: float | None
    """Rank correlation of the rarity of what is familiar with its true rarity."""


def train(args: Args, arm: str, seed: int) -> Outcome:
    """Start or resume one run, judge its last weights, and save its curve."""
    kind, name = learners.load(arm), f"{arm}-{seed}"
    planned = kind.preset(args.env, seed=seed, shards=args.shards, out=args.out / "runs" / name)
    steps = args.total_steps or planned.total_steps
    planned = dataclasses.replace(
        planned,
        total_steps=steps,
        evaluate_every=max(1, steps // args.evaluations),
        evaluate_splits=SPLITS,
    )
    result = run(kind, planned)
    if result.steps < steps:
        raise KeyboardInterrupt(f"stopped in {result.out}; the same command goes on from there")
    records.write(args.out / "curves" / f"{name}.csv", curve(result.out / "progress.csv"))
    accuracies = {split: each.mean for split, each in play(args, result.out, seed).items()}
    familiar = checkpoint(result.out)["learner"].get("familiarity")
    return Outcome(
        arm=arm,
        seed=seed,
        steps=result.steps,
        seconds=round(result.seconds, 1),
        **accuracies,
        spearman=None if familiar is None else correlation(args.env, familiar),
    )


def curve(progress: Path) -> list[dict[str, str]]:
    """Return the rows of a ``progress.csv`` that first show an evaluation."""
    found: dict[str, dict[str, str]] = {}
    for row in read_csv(progress):
        if row.get("eval_steps"):
            names = ("eval_steps", *(f"eval_{split}" for split in SPLITS))
            found.setdefault(row["eval_steps"], {name: row[name] for name in names})
    return list(found.values())


def play(args: Args, out: Path, seed: int) -> dict[str, Evaluation]:
    """Return episodes of the last weights on each split.

    Actions are sampled: the best ones alone would make every task succeed always or never.
    """
    saved = load_run(out, "last")
    count = min(ENVS, args.episodes)
    with clusterenv.Evaluator(
        environments(args.env, SPLITS, count),
        saved.policy,
        episodes=args.episodes * len(SPLITS),
        num_envs=count * len(SPLITS),
        seed=10**6 + seed,
        deterministic=False,
    ) as evaluator:
        evaluator.publish(saved.policy, 0)
        evaluator.wait()
        (played,) = evaluator.results()
    return judge(played, SPLITS, count)


def checkpoint(out: Path) -> dict[str, Any]:
    """Return the last checkpoint of a run."""
    (path,) = out.glob("learner-*.pt")
    return dict(torch.load(path, weights_only=True))


def correlation(env: str, familiar: Mapping[str, Any]) -> float:
    """Return Spearman's correlation of the momentum in a familiarity buffer with true rarity.

    Ranks of the momentum are those of the rarity, which grows with it.
    """
    momentum = familiar["momentum"].numpy()
    images = familiar["image"].numpy()
    judged = momentum >= 0
    return spearman(momentum[judged], true_rarity(env, images[judged]))


def true_rarity(env: str, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Return the inverse probability of the tasks in which each image can be seen."""
    made: Any = gym.make(env).unwrapped
    assert isinstance(made, ZipfGridworld)
    keywords = {"maps": 20, "objects": 20, "exponent": 1.0, **gym.spec(env).kwargs}
    maps, objects = (
        task_probabilities(keywords[name], keywords["exponent"], "zipf")
        for name in ("maps", "objects")
    )
    wanted = {image.tobytes(): 0.0 for image in images}
    for number, each in enumerate(made.world.maps):
        for cell in np.flatnonzero(~each.walls).tolist():
            for target in range(len(objects)):
                seen = observation(made.world, number, target, cell).tobytes()
                if seen in wanted:
                    wanted[seen] += maps[number] * objects[target]
    return np.array([1 / wanted[image.tobytes()] for image in images])


def spearman(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """Return the correlation of ranks; equal values share the mean of theirs.

    Examples
    --------
    >>> round(spearman(np.array([1, 2, 3, 4]), np.array([10, 30, 20, 90])), 3)
    0.8
    """
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (counts.cumsum() - (counts - 1) / 2)[place]
    return ranks


def compare(outcomes: Sequence[Outcome]) -> str:
    """Return Markdown: a row for each run, the means with their intervals, and what they say."""
    lines = [
        "| learner | seed | zipf | uniform | rare | rarity, Spearman |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    by_arm = {arm: {o.seed: o for o in outcomes if o.arm == arm} for arm in ARMS}
    for arm, runs in by_arm.items():
        for seed, each in sorted(runs.items()):
            shown = " | ".join(f"{getattr(each, split):.3f}" for split in SPLITS)
            found = "–" if each.spearman is None else f"{each.spearman:.2f}"
            lines.append(f"| {arm} | {seed} | {shown} | {found} |")
        if len(runs) > 1:
            shown = " | ".join(
                _interval([getattr(each, split) for each in runs.values()]) for split in SPLITS
            )
            lines.append(f"| {arm} | mean, 95 % | {shown} | |")
    without, with_ = (by_arm[arm] for arm in ARMS)
    pairs = sorted(without.keys() & with_.keys())
    if len(pairs) < 2:
        return "\n".join([*lines, "", "Too few pairs for a verdict."])
    changes = {
        split: [getattr(with_[seed], split) - getattr(without[seed], split) for seed in pairs]
        for split in SPLITS
    }
    shown = " | ".join(_interval(values, "+") for values in changes.values())
    lines += [f"| difference | {len(pairs)} pairs | {shown} | |", ""]
    rare, zipf = (_episodes(changes[split]).interval for split in ("rare", "zipf"))
    correlations = [each.spearman for each in with_.values() if each.spearman is not None]
    lines.append(
        f"Rare tasks: {_says(rare)} with the memory. Zipf's distribution: {_says(zipf)}. "
        f"Rarity: {sum(value >= GOAL for value in correlations)} of {len(correlations)} runs at "
        f"least {GOAL:g}."
    )
    return "\n".join(lines)


def _episodes(values: Sequence[float]) -> Evaluation:
    """Return numbers as what has a mean and an interval."""
    return Evaluation(0, np.array(values), np.ones(len(values), np.int64))


def _interval(values: Sequence[float], sign: str = "") -> str:
    found = _episodes(values)
    low, high = found.interval
    return f"{found.mean:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def _says(interval: tuple[float, float]) -> str:
    low, high = interval
    return "higher" if low > 0 else "lower" if high < 0 else "no difference that is certain"


def draw(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Draw the accuracy beside training: a panel for each split, mean and range of the seeds."""
    figure = Figure(figsize=(11, 3.6), dpi=120, layout="constrained")
    for axes, split in zip(figure.subplots(1, len(SPLITS), sharey=True), SPLITS, strict=True):
        for index, arm in enumerate(ARMS):
            curves = [
                [
                    [float(row[name]) for row in read_csv(out / "curves" / f"{arm}-{o.seed}.csv")]
                    for name in ("eval_steps", f"eval_{split}")
                ]
                for o in outcomes
                if o.arm == arm
            ]
            if not curves:
                continue
            steps = sorted({step for at, _ in curves for step in at})
            values = np.array([np.interp(steps, at, found) for at, found in curves])
            colour = mpl.colormaps["tab10"](index)
            axes.plot(steps, values.mean(0), color=colour, label=learners.load(arm).title)
            axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2)
        axes.set(xlabel="environment steps", title=split, ylim=(0, 1))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("accuracy, best actions")
    figure.axes[0].legend(frameon=False)
    figure.savefig(out / "accuracy.png")


def study(args: Args) -> list[Outcome]:
    """Do all runs that are missing in the summary; plot and tabulate it."""
    check_kind(args.out, "rare_tasks")
    summary = args.out / "summary.csv"
    outcomes = records.read(summary, Outcome)
    finished = {(each.arm, each.seed) for each in outcomes}
    wanted = [(arm, seed) for seed in args.seeds for arm in args.arms]
    todo = [] if args.plot_only else [each for each in wanted if each not in finished]
    for index, (arm, seed) in enumerate(todo):
        print(f"run {index + 1} of {len(todo)}: {arm}, seed {seed}", flush=True)
        outcomes.append(train(args, arm, seed))
        records.write(summary, [dataclasses.asdict(each) for each in outcomes])
        # Curves and summary are kept.
        shutil.rmtree(args.out / "runs" / f"{arm}-{seed}", ignore_errors=True)
    if not outcomes:
        raise ConfigError(f"{args.out} has no finished run; leave --plot-only out")
    draw(args.out, outcomes)
    print(compare(outcomes), flush=True)
    return outcomes


if __name__ == "__main__":
    main(study, Args)
