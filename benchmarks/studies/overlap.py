"""Does ``--overlap`` cost PPO environment steps? Paired runs until a training return of 200.

``python -m benchmarks.studies.overlap`` trains PPO on LunarLander-v3 with and without it, 20 seeds
each, until the mean return of 100 training episodes reaches 200. The same command resumes what was
stopped. A run that does not get there counts with all its steps.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from benchmarks.studies import records
from benchmarks.studies.command import main
from benchmarks.studies.curves import GOALS
from clusterenv.errors import ConfigError
from pipelines.experiment import run
from pipelines.experiment.checks import Count, Natural, Options
from pipelines.experiment.directories import check_kind
from pipelines.ppo import PPO

__all__ = ["Args", "Outcome", "judge", "study"]

MORE = 0.10  # steps that overlap may cost


@dataclass(frozen=True)
class Args(Options):
    """What to compare, and where the results are."""

    env: str = "LunarLander-v3"  # id of a Gymnasium environment with a goal
    seeds: tuple[Natural, ...] = tuple(range(20_001, 40_001, 1_000))  # environment i gets seed + i
    shards: Count = 2  # worker processes
    out: Path = Path("docs/experiments/overlap")  # summary; runs/ is not for git

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.env not in GOALS:
            raise ConfigError(f"--env {self.env} has no goal; one of {', '.join(GOALS)}")


@dataclass(frozen=True)
class Outcome:
    """How one run ended; a row of ``summary.csv``."""

    env: str
    overlap: int
    seed: int
    steps: int
    """Until the goal, or all."""
    reached: int


def train(args: Args, overlap: bool, seed: int) -> Outcome:
    """Start or resume one run."""
    out = args.out / "runs" / f"{args.env}-{'overlap' if overlap else 'lockstep'}-{seed}"
    planned = PPO.preset(
        args.env,
        seed=seed,
        overlap=overlap,
        sync="every-version",
        stop_at=GOALS[args.env],
        shards=args.shards,
        out=out,
        quiet=True,
    )
    result = run(PPO, planned)
    if result.reached_at is None and result.steps < planned.total_steps:
        raise KeyboardInterrupt(f"stopped in {result.out}; the same command goes on from there")
    shutil.rmtree(out, ignore_errors=True)
    steps = result.reached_at or result.steps
    return Outcome(args.env, int(overlap), seed, steps, int(result.reached_at is not None))


def judge(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table of the pairs, and what they say, with standard errors.

    The ratio of the means has the error of a ratio estimator; that of the geometric mean is of the
    logarithms.
    """
    pairs: dict[int, dict[int, Outcome]] = {}
    for each in outcomes:
        pairs.setdefault(each.seed, {})[each.overlap] = each
    whole = [(pair[0], pair[1]) for _, pair in sorted(pairs.items()) if len(pair) == 2]
    lines = ["| seed | lock-step | `--overlap` | ratio |", "|---|--:|--:|--:|"]
    for one, two in whole:
        steps = (f"{each.steps:,}{'' if each.reached else ' (not)'}" for each in (one, two))
        lines.append(f"| {one.seed} | {' | '.join(steps)} | {two.steps / one.steps:.2f} |")
    if len(whole) < 2:
        return "\n".join([*lines, "", "Too few pairs for a verdict."])
    ours, theirs = ([pair[i].steps for pair in whole] for i in (0, 1))
    ratio = fmean(theirs) / fmean(ours)
    apart = [y - ratio * x for x, y in zip(ours, theirs, strict=True)]
    error = stdev(apart) / math.sqrt(len(whole)) / fmean(ours)
    logs = [math.log(y / x) for x, y in zip(ours, theirs, strict=True)]
    middle, spread = math.exp(fmean(logs)), stdev(logs) / math.sqrt(len(logs))
    lines += [
        f"| mean | {fmean(ours):,.0f} | {fmean(theirs):,.0f} | {ratio:.2f} |",
        f"| median | {median(ours):,.0f} | {median(theirs):,.0f} "
        f"| {median(theirs) / median(ours):.2f} |",
        "",
        f"Ratio of the means {ratio:.2f} ± {error:.2f}, geometric mean of the ratios {middle:.2f} "
        f"(a factor of {math.exp(spread):.2f} either way), standard errors of {len(whole)} pairs. "
        f"Within {MORE:.0%} of lock-step's steps: the ratio of the means {_says(ratio)}, "
        f"the geometric mean {_says(middle)}.",
    ]
    return "\n".join(lines)


def _says(ratio: float) -> str:
    return "is" if ratio <= 1 + MORE else "is not"


def study(args: Args) -> list[Outcome]:
    """Do all runs that are missing in the summary, and judge it."""
    check_kind(args.out, "overlap")
    summary = args.out / "summary.csv"
    outcomes = records.read(summary, Outcome)
    finished = {(each.env, each.overlap, each.seed) for each in outcomes}
    wanted = [(overlap, seed) for seed in args.seeds for overlap in (False, True)]
    todo = [each for each in wanted if (args.env, int(each[0]), each[1]) not in finished]
    for index, (overlap, seed) in enumerate(todo):
        print(f"run {index + 1} of {len(todo)}: seed {seed}, overlap {overlap}", flush=True)
        outcomes.append(train(args, overlap, seed))
        records.write(summary, [dataclasses.asdict(each) for each in outcomes])
    print(judge([each for each in outcomes if each.env == args.env]), flush=True)
    return outcomes


if __name__ == "__main__":
    main(study, Args)
