"""Draws the sweep over synchronization rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.studies.aps_arms import Args, Arm, Curves, Outcome, by_arm, mean

__all__ = ["draw", "spread", "together"]


def style(arm: Arm, among: Sequence[Arm]) -> dict[str, Any]:
    """Return how to draw an arm: thresholds in viridis, in order; controls grey and dashed."""
    place = [other for other in among if other.rule == arm.rule].index(arm)
    if arm.rule == "divergence":
        last = sum(other.rule == arm.rule for other in among) - 1
        return {"color": mpl.colormaps["viridis"](0.93 * place / max(1, last))}
    color = {"every-version": "black", "every": "0.45", "never": "0.6"}[arm.rule]
    dashes = {"every-version": (4, 4), "every": (4 + 4 * place, 2), "never": (1, 2)}[arm.rule]
    return {"color": color, "linestyle": (0, dashes), "zorder": 3}  # seen where lines coincide


def draw(args: Args, outcomes: Sequence[Outcome], curves: Curves) -> None:
    """Draw ``return.png``, ``pulls.png``, ``throughput.png`` and ``bytes.png``."""
    groups = by_arm(outcomes)
    title = f"PPO on {args.env}"
    for file, column, label, share in (
        ("return.png", "mean_return", "mean return of the last 100 episodes", 1),
        ("pulls.png", "pulls", "pulls per worker", args.shards),
    ):
        figure, axes = blank(title, "steps", label)
        for arm, group in groups.items():
            steps, values = together([curves[f"{o.arm}-{o.seed}"] for o in group], column, share)
            look = style(arm, list(groups))
            axes.plot(steps, [fmean(v) for v in values], label=arm.name, **look)
            band = [min(v) for v in values], [max(v) for v in values]
            axes.fill_between(steps, *band, color=look["color"], alpha=0.12, linewidth=0)
        if column == "pulls":
            axes.set_yscale("symlog", linthresh=1)  # from 0 pulls to every version
            axes.set_ylim(bottom=-0.2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        figure.legend(loc="outside right upper", fontsize="small", frameon=False)
        figure.savefig(args.out / file, dpi=120)

    figure, axes = blank(title, "steps per second", "")
    for arm, group in groups.items():
        color = style(arm, list(groups))["color"]
        axes.barh(arm.name, mean(group, "steps_per_second"), color=color, alpha=0.6)
        rates = [outcome.steps_per_second for outcome in group]
        axes.plot(rates, [arm.name] * len(rates), "o", color="black", markersize=3)
    axes.invert_yaxis()
    figure.savefig(args.out / "throughput.png", dpi=120)
    draw_bytes(args, groups, title)


def draw_bytes(args: Args, groups: Mapping[Arm, Sequence[Outcome]], title: str) -> None:
    """Draw ``bytes.png``: the return of each arm over its share of every-version's bytes."""
    base = groups.get(Arm("every-version"), [])
    whole = (mean(base, "weight_bytes") if base else 0) or 1
    sent = [o.weight_bytes / whole for group in groups.values() for o in group if o.weight_bytes]
    zero = min(sent, default=1) / 4  # where the log axis shows arms that sent nothing
    low, high = zero / 1.5, max(sent, default=1) * 1.5
    figure, axes = blank("", f"weight bytes{' ÷ every-version’s' if base else ''}", "final return")
    figure.suptitle(f"{title}; plain numbers are thresholds of divergence", fontsize="medium")
    axes.set(xscale="log", xlim=(low, high))
    points: list[tuple[float, float, str]] = []
    for arm, group in groups.items():
        color = style(arm, list(groups))["color"]
        xs = [outcome.weight_bytes / whole or zero for outcome in group]
        axes.plot(xs, [o.final_return for o in group], ".", color=color, alpha=0.6)
        x, y = mean(group, "weight_bytes") / whole or zero, mean(group, "final_return")
        mark = "o" if arm.rule == "divergence" else "s"
        axes.plot(x, y, mark, color=color, markersize=8, markeredgecolor="white")
        name = arm.name.removeprefix("divergence-")
        points.append((x, y, f"{name}, no bytes" if x == zero else name))
    points.sort()
    places = spread([math.log(x / low) / math.log(high / low) for x, _, _ in points], 0.035)
    for (x, y, name), place in zip(points, places, strict=True):
        axes.annotate(
            name,
            (x, y),
            (place, 1.03),
            textcoords="axes fraction",
            fontsize="small",
            rotation=60,
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.6, "relpos": (0, 0)},
        )
    figure.savefig(args.out / "bytes.png", dpi=120)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move places between 0 and 1, in ascending order, until they are ``gap`` apart."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else place)
    most = 1.0
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], most)
        most = moved[index] - gap
    return moved


def blank(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """Return a figure with labelled axes."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def together(
    curves: Sequence[Sequence[Mapping[str, float]]], column: str, share: int
) -> tuple[list[float], list[list[float]]]:
    """Return the steps at which all curves have a value, and there the values of all."""
    found: dict[float, list[float]] = {}
    for curve in curves:
        for row in curve:
            if math.isfinite(row[column]):
                found.setdefault(row["steps"], []).append(row[column] / share)
    steps = sorted(step for step, values in found.items() if len(values) == len(curves))
    return steps, [found[step] for step in steps]
