"""The arms of the sweep over synchronization rules, and the verdict on their outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from clusterenv.errors import ConfigError
from pipelines.experiment.checks import Count, Limit, Natural, Options, Positive, check_shards

__all__ = ["Args", "Arm", "Outcome", "Verdict", "arms", "by_arm", "judge", "mean", "table"]

RULES = ("every-version", "divergence", "every", "never")
SETTINGS = ("env", "total_steps", "num_envs", "horizon", "minibatches", "lr", "shards")  # of all
CURVE = ("steps", "mean_return", "pulls", "weight_bytes")
NEAR, FEW = 0.05, 0.10  # of every-version's return and weight bytes: what the claim allows
Curves = Mapping[str, Sequence[Mapping[str, float]]]


@dataclass(frozen=True)
class Args(Options):
    """What to compare, and where the results are."""

    env: str = "LunarLander-v3"  # id of a Gymnasium environment
    thresholds: tuple[Limit, ...] = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1)  # 0 is every-version
    every: tuple[Count, ...] = (4, 16)  # controls that pull when this many versions behind
    seeds: tuple[Natural, ...] = (100, 200, 300, 400, 500)  # far apart: environment i gets seed + i
    total_steps: Count = 1_000_000  # of each run
    num_envs: Count = 16  # environments, all shards together
    horizon: Count = 128  # steps of each environment between two updates
    minibatches: Count = 16  # of each update
    lr: Positive = 3e-4  # of Adam: small, so that a version differs little from the one before
    shards: Count = 2  # worker processes
    cluster: str | None = None  # scheduler address, file or jobqueue name; else this machine
    out: Path = Path("docs/experiments/aps")  # summary, curves and plots; runs/ is not for git
    only: tuple[str, ...] = ()  # names of arms, such as never or divergence-0.05; default: all
    plot_only: bool = False  # draw and judge what is in --out

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shards(self.num_envs, self.shards)
        if not (self.seeds or self.plot_only):
            raise ConfigError("--seeds names none, and each is a run of every arm: --seeds 100 200")


@dataclass(frozen=True)
class Arm:
    """One way to decide when to pull: a rule, and its threshold or number of versions."""

    rule: str
    number: float | None = None

    @property
    def name(self) -> str:
        """The rule, and the number if it has one: ``divergence-0.05``."""
        return self.rule if self.number is None else f"{self.rule}-{self.number:.12g}"

    @classmethod
    def named(cls, name: str) -> Arm:
        """Return the arm of this :attr:`name`."""
        rule, _, number = name.partition("-")
        return cls(name) if name in ("every-version", "never") else cls(rule, float(number))


@dataclass(frozen=True)
class Outcome:
    """How one run ended; a row of ``summary.csv``."""

    arm: str
    rule: str
    threshold: float | None
    seed: int
    final_return: float
    best_return: float
    steps: int
    versions: int
    pulls: int
    pulls_per_worker: float
    weight_bytes: int
    steps_per_second: float
    lag_mean: float
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """Result of the sweep; ``None`` if an arm that is needed is missing."""

    thresholds: tuple[Limit, ...] | None
    """Those that reach every-version's return with a fraction of its weight bytes."""
    never_failed: bool | None
    text: str


def arms(args: Args) -> list[Arm]:
    """Return the arms to run, in order: every-version, thresholds, every, never."""
    divergence = [Arm("divergence", number) for number in sorted(set(args.thresholds))]
    every = [Arm("every", number) for number in sorted(set(args.every))]
    known = [Arm("every-version"), *divergence, *every, Arm("never")]
    if unknown := set(args.only) - {arm.name for arm in known}:
        raise ConfigError(
            f"--only {' '.join(sorted(unknown))} is no arm of this sweep; choose from: "
            f"--only {' '.join(arm.name for arm in known)}"
        )
    return [arm for arm in known if not args.only or arm.name in args.only]


def by_arm(outcomes: Sequence[Outcome]) -> dict[Arm, list[Outcome]]:
    """Group outcomes by arm, in the order of :func:`arms`."""
    found = {Arm.named(outcome.arm) for outcome in outcomes}
    order = sorted(found, key=lambda arm: (RULES.index(arm.rule), arm.number or 0))
    return {arm: [o for o in outcomes if o.arm == arm.name] for arm in order}


def mean(outcomes: Sequence[Outcome], name: str) -> float:
    """Return the mean of one column over the seeds."""
    return fmean(getattr(outcome, name) for outcome in outcomes)


def judge(outcomes: Sequence[Outcome], random_return: float) -> Verdict:
    """Compare every threshold, and never, to every-version.

    Parameters
    ----------
    outcomes
        Of all finished runs.
    random_return
        Of the untrained policy.
    """
    groups = by_arm(outcomes)
    if Arm("every-version") not in groups:
        return Verdict(None, None, "No verdict: every-version has not run.")
    base = groups[Arm("every-version")]
    target, budget = mean(base, "final_return"), FEW * mean(base, "weight_bytes")
    if not target > random_return:
        text = f"No verdict: every-version did not learn ({random_return:.1f} to {target:.1f})."
        return Verdict(None, None, text)
    least = target - NEAR * abs(target)
    reaching = tuple(
        arm.number
        for arm, group in groups.items()
        if arm.rule == "divergence" and arm.number is not None
        if mean(group, "final_return") >= least and mean(group, "weight_bytes") <= budget
    )
    text = (
        f"Thresholds that reach every-version's return of {target:.1f} within {NEAR:.0%} with at "
        f"most {FEW:.0%} of its weight bytes: {', '.join(f'{t:g}' for t in reaching) or 'none'}."
    )
    if Arm("never") not in groups:
        return Verdict(reaching, None, f"{text}\nWhether never fails is unknown: it has not run.")
    half = (random_return + target) / 2
    never = mean(groups[Arm("never")], "final_return")
    failed = not never >= half
    return Verdict(
        reaching,
        failed,
        f"{text}\nnever {'failed, as it must' if failed else 'did NOT fail'}: its return is "
        f"{never:.1f}, half of every-version's improvement over the untrained policy's "
        f"{random_return:.1f} is reached at {half:.1f}.",
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with a row per arm: means over the seeds, ± standard deviations."""
    groups = by_arm(outcomes)
    base = groups.get(Arm("every-version"), [])
    lines = [
        "| arm | seeds | final return | pulls per worker | weight bytes "
        "| bytes ÷ every-version | return ÷ every-version |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for arm, group in groups.items():
        cells = [arm.name, str(len(group))]
        for name in ("final_return", "pulls_per_worker", "weight_bytes"):
            values = [getattr(outcome, name) for outcome in group]
            digits = 0 if name == "weight_bytes" else 1
            deviation = f" ± {stdev(values):,.{digits}f}" if len(values) > 1 else ""
            cells.append(f"{fmean(values):,.{digits}f}{deviation}")
        for name in ("weight_bytes", "final_return"):
            whole = mean(base, name) if base else 0.0
            cells.append(f"{mean(group, name) / whole:.3f}" if whole > 0 else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
