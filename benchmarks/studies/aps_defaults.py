"""The rule by which a divergence threshold becomes a learner's default, and its tables.

A threshold costs a learner nothing on an environment if, in the mean over at least
:data:`SEEDS` seeds, its final greedy return is not lower than every-version's, and its steps to the
goal are not more. What does not count as lower or more: 5 % of every-version's return, 10 % of
its steps, or one standard error of the difference of the means, whichever is larger. A run that
never reaches the goal counts with the steps that it was allowed.

The default of a learner is the largest threshold that costs nothing on every environment with
enough seeds; without one it stays every-version. Only seeds that all arms have finished count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance

from benchmarks.studies.aps_arms import Arm

__all__ = ["Outcome", "Verdict", "cases", "judge", "table"]

NEAR, LONGER, SEEDS = 0.05, 0.10, 3
EVERY_VERSION = Arm("every-version")


@dataclass(frozen=True)
class Outcome:
    """How one run ended; a row of ``summary.csv``."""

    env: str
    learner: str
    arm: str
    seed: int
    total_steps: int
    """Allowed."""
    final_return: float
    """Greedy, of the final weights."""
    final_low: float
    final_high: float
    """The 95 % interval of its mean over episodes."""
    goal_steps: int | None
    """Steps of the first evaluated version at the goal."""
    steps: int
    versions: int
    pulls: int
    pulls_saved: int
    weight_bytes: int
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """What the rule says about one learner."""

    default: float | None
    """The threshold; ``None`` is every-version."""
    text: str


Groups = dict[Arm, list[Outcome]]


def cases(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], Groups]:
    """Return the runs of each environment and learner by arm, of seeds that all arms finished."""
    found: dict[tuple[str, str], Groups] = {}
    for outcome in outcomes:
        groups = found.setdefault((outcome.env, outcome.learner), {})
        groups.setdefault(Arm.named(outcome.arm), []).append(outcome)
    for groups in found.values():
        whole = set.intersection(*({run.seed for run in group} for group in groups.values()))
        for arm in sorted(groups, key=lambda arm: arm.number or 0):
            group = groups.pop(arm)
            groups[arm] = sorted((r for r in group if r.seed in whole), key=lambda r: r.seed)
    return found


def goal_steps(run: Outcome) -> float:
    """Return the steps to the goal; those that were allowed, if it was not reached."""
    return run.total_steps if run.goal_steps is None else run.goal_steps


def costs(base: Sequence[Outcome], group: Sequence[Outcome]) -> list[str]:
    """Return what an arm loses against every-version beyond what the rule allows."""
    found = []
    for name, sign, share, values in (
        ("return", 1, NEAR, [[run.final_return for run in runs] for runs in (base, group)]),
        (
            "steps to the goal",
            -1,
            LONGER,
            [[goal_steps(r) for r in runs] for runs in (base, group)],
        ),
    ):
        ours, theirs = map(fmean, values)
        error = math.sqrt(sum(variance(each) / len(each) for each in values))
        if sign * (ours - theirs) > max(share * abs(ours), error):
            found.append(f"{name} {theirs:,.0f} instead of {ours:,.0f}")
    return found


def judge(outcomes: Sequence[Outcome]) -> dict[str, Verdict]:
    """Apply the rule to every learner.

    Returns
    -------
    dict
        A verdict per learner, in words too: what each threshold cost, and where seeds are missing.
    """
    verdicts = {}
    for learner in dict.fromkeys(outcome.learner for outcome in outcomes):
        lines, passed, judged = [], dict[Arm, bool](), 0
        for (env, who), groups in cases(outcomes).items():
            if who != learner:
                continue
            base = groups.get(EVERY_VERSION, [])
            if len(base) < SEEDS:
                lines.append(f"{env}: not judged, {len(base)} of at least {SEEDS} seeds")
                continue
            judged += 1
            for arm, group in groups.items():
                if arm != EVERY_VERSION:
                    lost = costs(base, group)
                    passed[arm] = passed.get(arm, True) and not lost
                    name = arm.name.removeprefix("divergence-")
                    lines.append(f"{env}: {name} costs {', '.join(lost) or 'nothing'}")
        free = [
            arm.number
            for arm, holds in passed.items()
            if holds and arm.rule == "divergence" and arm.number is not None
        ]
        default = max(free, default=None)
        rule = "every-version" if default is None else f"divergence, threshold {default:g}"
        said = f"{learner}: {rule}" if judged else f"{learner}: no verdict, too few seeds"
        verdicts[learner] = Verdict(default, "\n".join([said, *(f"  {line}" for line in lines)]))
    return verdicts


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with a row per arm: means over the seeds, ± standard deviations."""
    lines = [
        "| environment | learner | arm | seeds | greedy return | reached | steps to the goal "
        "| seconds | pulls | pulls saved | weight MB | bytes ÷ every-version |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (env, learner), groups in cases(outcomes).items():
        base = groups.get(EVERY_VERSION)
        whole = fmean(run.weight_bytes for run in base) if base else 0.0
        for arm, runs in groups.items():
            if not runs:
                continue
            possible = sum(run.pulls + run.pulls_saved for run in runs)
            cells = [
                *(env, learner, arm.name, str(len(runs))),
                _mean([run.final_return for run in runs], 1),
                str(sum(run.goal_steps is not None for run in runs)),
                _mean([goal_steps(run) for run in runs], 0),
                _mean([run.seconds for run in runs], 0),
                _mean([run.pulls for run in runs], 0),
                f"{sum(run.pulls_saved for run in runs) / possible:.0%}" if possible else "–",
                _mean([run.weight_bytes / 1e6 for run in runs], 2),
                f"{fmean(run.weight_bytes for run in runs) / whole:.3f}" if whole else "–",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(values: Sequence[float], digits: int) -> str:
    deviation = f" ± {stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):,.{digits}f}{deviation}"
