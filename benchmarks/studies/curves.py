"""Plot the learning curves of several runs, one figure per environment.

``python -m benchmarks.studies.curves docs/experiments/ppo`` reads ``<environment>-<seed>.csv``
files; a second argument names another column than ``mean_return``.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from clusterenv.errors import ConfigError

__all__ = ["GOALS", "draw", "reached", "read", "table"]

GOALS = {"CartPole-v1": 475.0, "LunarLander-v3": 200.0, "Pendulum-v1": -250.0}
Curve = list[tuple[int, float]]
"""Steps, and the mean return of the last 100 episodes then."""


def read(path: Path, column: str = "mean_return") -> Curve:
    """Return the curve in a ``progress.csv``, from its hundredth episode on."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    points = [
        (int(row["steps"]), float(row[column])) for row in rows if int(row["episodes"]) >= 100
    ]
    return [point for point in points if math.isfinite(point[1])]


def reached(curve: Curve, goal: float) -> int | None:
    """Return the steps after which the mean return was at the goal, or ``None``."""
    return next((steps for steps, value in curve if value >= goal), None)


def table(curves: dict[str, dict[str, Curve]]) -> str:
    """Return a Markdown table: for each run, when it reached its goal and how it ended."""
    lines = [
        "| environment | seed | goal | reached at | last | best |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for env, runs in curves.items():
        goal = GOALS.get(env, math.nan)
        for seed, curve in runs.items():
            at = reached(curve, goal)
            when = "not" if at is None else f"{at:,} steps"
            if not curve:
                lines.append(f"| {env} | {seed} | {goal:g} | {when} | – | – |")
                continue
            best = max(value for _, value in curve)
            lines.append(
                f"| {env} | {seed} | {goal:g} | {when} | {curve[-1][1]:.1f} | {best:.1f} |"
            )
    return "\n".join(lines)


def draw(env: str, runs: dict[str, Curve], path: Path, column: str = "mean_return") -> None:
    """Draw the runs of one environment."""
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for index, (seed, curve) in enumerate(runs.items()):
        colour = mpl.colormaps["viridis"](index / max(1, len(runs) - 1) * 0.8)
        axes.plot(*zip(*curve, strict=True), color=colour, label=f"seed {seed}")
    if env in GOALS:
        axes.axhline(GOALS[env], color="grey", linestyle="--", label=f"goal {GOALS[env]:g}")
    of = "mean return of 100 episodes" if column == "mean_return" else column.replace("_", " ")
    axes.set(xlabel="environment steps", ylabel=of, title=env)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def main(directory: Path, column: str = "mean_return") -> None:
    """Draw every environment of a directory and print the table."""
    curves: dict[str, dict[str, Curve]] = defaultdict(dict)
    for path in sorted(directory.glob("*.csv")):
        env, _, seed = path.stem.rpartition("-")
        curves[env][seed] = read(path, column)
    if not curves:
        raise ConfigError(f"{directory} has no <environment>-<seed>.csv: CartPole-v1-1.csv")
    for env, runs in curves.items():
        draw(env, runs, directory / f"{env}.png", column)
    print(table(curves))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/experiments/ppo"), *sys.argv[2:3])
    except ConfigError as error:
        sys.exit(f"curves: {error}")
