"""Does adaptive policy synchronization save weights without costing return? An experiment.

``python -m benchmarks.studies.aps_sweep`` trains PPO with every rule, then plots, tabulates and
judges. The same command resumes a sweep that was stopped. A resumed run sends its workers the
newest version without counting it, so an interrupted run of ``never`` starts over.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.studies import records
from benchmarks.studies.aps_arms import (
    CURVE,
    SETTINGS,
    Args,
    Arm,
    Outcome,
    Verdict,
    arms,
    judge,
    mean,
    table,
)
from benchmarks.studies.aps_plots import draw
from benchmarks.studies.command import main
from clusterenv.errors import ConfigError
from pipelines.experiment import run
from pipelines.experiment.directories import check_kind, unused
from pipelines.experiment.sinks import read_csv
from pipelines.ppo import PPO
from pipelines.ppo import Args as PPOArgs

__all__ = ["sweep"]

# Files


def read_curves(out: Path, outcomes: Sequence[Outcome]) -> dict[str, list[dict[str, float]]]:
    """Return the curve of each finished run."""
    names = [f"{outcome.arm}-{outcome.seed}" for outcome in outcomes]
    files = {name: read_csv(out / "curves" / f"{name}.csv") for name in names}
    return {
        name: [{column: float(row[column]) for column in CURVE} for row in rows]
        for name, rows in files.items()
    }


def settle(args: Args) -> Args:
    """Save the settings of all runs; refuse to mix runs with different settings."""
    path = args.out / "settings.json"
    wanted = {name: getattr(args, name) for name in SETTINGS}
    kept = json.loads(path.read_text()) if path.is_file() else None
    if args.plot_only:
        if kept is None:
            raise ConfigError(f"--plot-only: no sweep is in {args.out}; run one: --out {args.out}")
        return dataclasses.replace(args, **kept)
    if kept is None:
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(wanted, indent=2) + "\n")
    elif kept != wanted:
        changed = [
            f"{name} {wanted[name]} (was {kept.get(name)})"
            for name in SETTINGS
            if wanted[name] != kept.get(name)
        ]
        raise ConfigError(
            f"{args.out} holds runs with other settings: {', '.join(changed)}; go on with those, "
            f"or write elsewhere: --out {unused(args.out)}"
        )
    return args


# Running


def plan(args: Args, arm: Arm, seed: int) -> PPOArgs:
    """Return the arguments of one run."""
    changes: dict[str, Any] = {name: getattr(args, name) for name in (*SETTINGS, "cluster")}
    changes |= {"sync": arm.rule, "seed": seed, "out": args.out / "runs" / f"{arm.name}-{seed}"}
    changes |= {"overlap": False, "log_every": 1}  # every update is a point of the curve
    if arm.rule == "divergence":
        changes["threshold"] = arm.number
    elif arm.rule == "every":
        changes["every"] = int(arm.number or 0)
    planned: PPOArgs = PPO.preset(**changes)
    return planned


def train(args: Args, arm: Arm, seed: int) -> Outcome:
    """Start or resume one run, and save its curve."""
    planned = plan(args, arm, seed)
    if planned.out is not None and arm.rule == "never":
        shutil.rmtree(planned.out, ignore_errors=True)  # what a cut run left
    result = run(PPO, planned)
    if result.steps < args.total_steps:
        raise KeyboardInterrupt(f"stopped in {result.out}; the same command goes on from there")
    rows = read_csv(result.out / "progress.csv")
    records.write(
        args.out / "curves" / f"{arm.name}-{seed}.csv",
        [{name: row[name] for name in CURVE} for row in rows],
    )
    full = [row for row in rows if int(row["episodes"]) >= 100] or rows  # few episodes say little
    returns = [float(row["mean_return"]) for row in full]
    return Outcome(
        arm=arm.name,
        rule=arm.rule,
        threshold=arm.number if arm.rule == "divergence" else None,
        seed=seed,
        final_return=result.mean_return,
        best_return=max(filter(math.isfinite, returns), default=math.nan),
        steps=result.steps,
        versions=result.version,
        pulls=result.pulls,
        pulls_per_worker=result.pulls / args.shards,
        weight_bytes=result.weight_bytes,
        steps_per_second=result.steps / result.seconds,
        lag_mean=float(rows[-1]["lag_mean"]),
        seconds=result.seconds,
    )


def sweep(args: Args) -> Verdict:
    """Do all runs that are missing in the summary; plot, tabulate and judge the summary.

    Raises
    ------
    ConfigError
        If the arguments cannot work, or differ from those of the runs in ``out``.
    """
    chosen = [] if args.plot_only else arms(args)
    check_kind(args.out, "aps_sweep")
    for arm in chosen:
        plan(args, arm, 0)  # refuses what cannot work before anything is written
    args = settle(args)
    outcomes = records.read(args.out / "summary.csv", Outcome)
    finished = {(outcome.arm, outcome.seed) for outcome in outcomes}
    # Seed by seed: a sweep that was stopped has something of every arm.
    runs = [(arm, seed) for seed in args.seeds for arm in chosen]
    todo = [(arm, seed) for arm, seed in runs if (arm.name, seed) not in finished]
    if runs:
        print(f"{len(runs)} runs, {len(runs) - len(todo)} of them finished before", flush=True)
    for index, (arm, seed) in enumerate(todo):
        seconds = mean(outcomes, "seconds") * (len(todo) - index) if outcomes else None
        left = "unknown" if seconds is None else f"about {timedelta(seconds=round(seconds))}"
        print(
            f"run {index + 1} of {len(todo)}: {arm.name}, seed {seed}; time left for all: {left}",
            flush=True,
        )
        outcomes.append(train(args, arm, seed))
        records.write(
            args.out / "summary.csv", [dataclasses.asdict(outcome) for outcome in outcomes]
        )
    if not outcomes:
        raise ConfigError(f"{args.out} has no finished run; run some: --seeds 100 200 300")

    curves = read_curves(args.out, outcomes)
    draw(args, outcomes, curves)
    returns = [[row["mean_return"] for row in curve] for curve in curves.values()]
    untrained = fmean(next(filter(math.isfinite, curve), math.nan) for curve in returns)
    verdict = judge(outcomes, untrained)
    print(f"{table(outcomes)}\n\n{verdict.text}\n\nplots are in {args.out}", flush=True)
    return verdict


if __name__ == "__main__":
    main(sweep, Args)
