"""Draws the comparison of learners that pull weights on divergence."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.studies.aps_arms import Arm
from benchmarks.studies.aps_defaults import Outcome, cases
from benchmarks.studies.aps_plots import style
from benchmarks.studies.curves import GOALS
from pipelines import learners
from pipelines.experiment.sinks import read_csv

__all__ = ["draw", "held"]

POINTS = 100  # of a curve

Curve = list[tuple[float, float]]
"""Steps of an evaluated version, and its greedy return."""


def held(curve: Curve, steps: float) -> float:
    """Return the newest value at some steps; after a run's end, its last.

    Examples
    --------
    >>> held([(10, 1.0), (20, 2.0)], 15), held([(10, 1.0), (20, 2.0)], 99)
    (1.0, 2.0)
    """
    return curve[bisect.bisect_right([at for at, _ in curve], steps) - 1][1]


def read(out: Path, run: Outcome) -> Curve:
    """Return the curve of a run."""
    name = f"{run.env}-{run.learner}-{run.arm}-{run.seed}.csv"
    rows = read_csv(out / "curves" / name)
    return [(float(row["eval_steps"]), float(row["eval_return"])) for row in rows]


def draw(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Draw ``<environment>.png``: greedy returns over steps, and over weight bytes, by learner."""
    found = cases(outcomes)
    for env in dict.fromkeys(env for env, _ in found):
        of_env = {learner: groups for (e, learner), groups in found.items() if e == env}
        figure = Figure(figsize=(4 * len(of_env), 6.5), layout="constrained")
        panels = figure.subplots(2, len(of_env), squeeze=False, sharey="row")
        figure.suptitle(f"{env}: mean greedy return, and its range over the seeds")
        shown = {}
        for (above, below), (learner, groups) in zip(panels.T, of_env.items(), strict=True):
            above.set(title=learners.load(learner).title, xlabel="steps")
            below.set(xlabel="weight bytes sent, MB (each seed)", xscale="log")
            for axes in (above, below):
                axes.axhline(GOALS[env], color="0.8", linewidth=0.8, zorder=0)
                axes.grid(alpha=0.3)
            above.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:,.0f}k")
            below.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            below.xaxis.set_major_formatter("{x:g}")
            below.xaxis.set_minor_locator(NullLocator())
            for arm, runs in groups.items():
                if not runs:
                    continue
                look = style(arm, list(groups))
                curves = [read(out, run) for run in runs]
                first = max(curve[0][0] for curve in curves)
                width = max(run.steps for run in runs) - first
                grid = [first + width * point / POINTS for point in range(POINTS + 1)]
                values = [[held(curve, at) for curve in curves] for at in grid]
                (shown[arm],) = above.plot(grid, [fmean(each) for each in values], **look)
                low, high = [min(each) for each in values], [max(each) for each in values]
                above.fill_between(grid, low, high, color=look["color"], alpha=0.1, linewidth=0)
                sent = [run.weight_bytes / 1e6 for run in runs]
                mark = "s" if arm == Arm("every-version") else "o"
                finals = [run.final_return for run in runs]
                below.plot(sent, finals, mark, color=look["color"], markersize=5, alpha=0.7)
        panels[0, 0].set_ylabel("greedy return")
        panels[1, 0].set_ylabel("final greedy return")
        names = [arm.name.replace("divergence-", "divergence above ") for arm in shown]
        figure.legend(shown.values(), names, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(out / f"{env}.png", dpi=110)
