"""Learners of the peers and of ClusterEnv while they train, in one run on this machine.

Two measurements: the environment steps per second that reach an update, with the same network, 16
environments and as much learning per step for all; and the seconds and environment steps until the
mean return of the last 100 finished training episodes first reaches a goal, each with the settings
that its library publishes. All take turns, seed by seed, each in a process of its own and each
peer in a virtual environment of its own, made on first use under ``.venv-peers``. The programs and
their settings are ``benchmarks/peers/train_*.py``.

    python -m benchmarks.learners                                    # everything: takes hours
    python -m benchmarks.learners ours-ppo sb3-ppo --envs CartPole-v1
    python -m benchmarks.learners --measure throughput --seconds 10 --seeds 1
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.common import WARM_UP
from benchmarks.peers.venvs import Skipped, python_of, report_of

GOALS = {"CartPole-v1": 475.0, "LunarLander-v3": 200.0}
MEASURES = ("throughput", "goal")
STARTING = 120.0  # seconds that a program may take to start and to end
FIELDS = (
    *("measure", "env", "candidate", "version", "seed", "steps_per_second"),
    *("reached", "seconds", "steps", "mean_return", "skipped"),
)


@dataclass(frozen=True)
class Candidate:
    """A learner that is measured.

    Attributes
    ----------
    name
        On the command line.
    title
        In the tables.
    ours
        The candidate that it is compared with; its own name, if it is one of ours.
    program
        Of ``benchmarks.peers``.
    venv
        Its virtual environment; ``None`` for this one.
    algorithm
        What the program calls it.
    """

    name: str
    title: str
    ours: str
    program: str
    venv: str | None
    algorithm: str


CANDIDATES = tuple(
    Candidate(*values)
    for values in (
        ("ours-ppo", "ClusterEnv PPO", "ours-ppo", "train_clusterenv", None, "ppo"),
        ("sb3-ppo", "Stable-Baselines3 PPO", "ours-ppo", "train_sb3", "sb3", "ppo"),
        (
            *("cleanrl-ppo", "PPO with CleanRL's settings, our program", "ours-ppo"),
            *("train_cleanrl", "gymnasium_async", "ppo"),
        ),
        ("rllib-ppo", "RLlib PPO", "ours-ppo", "train_rllib", "rllib", "ppo"),
        ("ours-dqn", "ClusterEnv DQN", "ours-dqn", "train_clusterenv", None, "dqn"),
        ("sb3-dqn", "Stable-Baselines3 DQN", "ours-dqn", "train_sb3", "sb3", "dqn"),
        ("ours-impala", "ClusterEnv IMPALA", "ours-impala", "train_clusterenv", None, "impala"),
        ("rllib-impala", "RLlib IMPALA", "ours-impala", "train_rllib", "rllib", "impala"),
        ("rllib-appo", "RLlib APPO", "ours-impala", "train_rllib", "rllib", "appo"),
        (
            *("sf-appo", "Sample Factory APPO", "ours-impala"),
            *("train_sample_factory", "sample_factory", "appo"),
        ),
    )
)


@dataclass
class Results:
    """What was measured: a record for each run, and why some are missing."""

    file: Path | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record, and write it down at once."""
        self.records.append(record)
        if self.file is not None:
            fresh = not self.file.exists()
            with self.file.open("a", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, extrasaction="ignore")
                if fresh:
                    writer.writeheader()
                writer.writerow(record)

    def skip(self, candidate: Candidate, where: str, reason: str) -> None:
        """Note why a candidate is missing somewhere."""
        self.skipped.setdefault((candidate.name, where), reason)
        say(f"{candidate.title}, {where}: skipped, {reason}")

    def of(self, measure: str, env: str) -> dict[str, list[dict[str, Any]]]:
        """Return the runs of a table by candidate, seed after seed."""
        found: dict[str, list[dict[str, Any]]] = {}
        for record in self.records:
            if (record["measure"], record["env"]) == (measure, env) and not record.get("skipped"):
                found.setdefault(record["candidate"], []).append(record)
        return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds_to_goal(runs: Iterable[dict[str, Any]]) -> float:
    """Return the median of the seconds to the goal; infinity if most runs have not reached it.

    Examples
    --------
    >>> reached = [{"reached": True, "seconds": 12.0}, {"reached": True, "seconds": 20.0}]
    >>> seconds_to_goal([*reached, {"reached": False, "seconds": 300.0}])
    20.0
    """
    return statistics.median(run["seconds"] if run["reached"] else math.inf for run in runs)


def steps_to_goal(runs: Iterable[dict[str, Any]]) -> float:
    """Return the median of the steps to the goal; infinity if most runs have not reached it."""
    return statistics.median(run["steps"] if run["reached"] else math.inf for run in runs)


def throughput_table(env: str, runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the table of steps per second; ratios are medians over the seeds that both ran."""
    lines = [
        f"| {env}, 16 environments, while training | version | steps/s | ours ÷ it |",
        "|---|---|---:|---:|",
    ]
    for candidate in shown(runs):
        rates = {run["seed"]: run["steps_per_second"] for run in runs[candidate.name]}
        ours = {run["seed"]: run["steps_per_second"] for run in runs.get(candidate.ours, ())}
        ratios = [ours[seed] / rates[seed] for seed in rates if seed in ours and rates[seed]]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else "–"
        middle = statistics.median(rates.values())
        version = runs[candidate.name][0]["version"]
        lines.append(f"| {candidate.title} | {version} | {middle:,.0f} | {ratio} |")
    return lines


def goal_table(env: str, runs: dict[str, list[dict[str, Any]]], timeout: float) -> list[str]:
    """Return the table of times to the goal: medians over the seeds, and how many reached it."""
    lines = [
        f"| {env}, mean return {GOALS[env]:.0f} | reached | seconds | steps | it ÷ ours, seconds |",
        "|---|---:|---:|---:|---:|",
    ]
    for candidate in shown(runs):
        own = runs[candidate.name]
        reached = f"{sum(run['reached'] for run in own)} of {len(own)}"
        seconds, steps = seconds_to_goal(own), steps_to_goal(own)
        ours = seconds_to_goal(runs[candidate.ours]) if candidate.ours in runs else math.inf
        ratio = f"{seconds / ours:.2f}" if math.isfinite(seconds) and math.isfinite(ours) else "–"
        if math.isfinite(seconds):
            values = f"{seconds:,.1f} | {steps:,.0f}"
        elif all(run["seconds"] >= timeout for run in own if not run["reached"]):
            values = f"not in {timeout:.0f} | –"
        else:  # its settings end before
            most = max(run["steps"] for run in own if not run["reached"])
            values = f"not reached | not in {most:,}"
        lines.append(f"| {candidate.title} | {reached} | {values} | {ratio} |")
    return lines


def shown(runs: dict[str, list[dict[str, Any]]]) -> list[Candidate]:
    """Return the candidates of a table, each family together."""
    return [candidate for candidate in CANDIDATES if candidate.name in runs]


def pythons_of(chosen: Sequence[Candidate], results: Results) -> dict[str, Path]:
    """Return the interpreter of each candidate that can be measured."""
    pythons: dict[str, Path] = {}
    for candidate in chosen:
        module = f"pipelines.{candidate.algorithm}"
        try:
            if candidate.venv is not None:
                pythons[candidate.name] = python_of(candidate.venv)
            elif importlib.util.find_spec(module) is None:
                raise Skipped(f"there is no {module}")
            else:
                pythons[candidate.name] = Path(sys.executable)
        except Skipped as reason:
            results.skip(candidate, "everywhere", f"cannot be installed: {reason}")
    return pythons


def measure(
    args: argparse.Namespace, which: str, chosen: Sequence[Candidate], results: Results
) -> None:
    """Measure all candidates in turn, seed by seed; one that fails is not tried again."""
    pythons = pythons_of(chosen, results)
    limit = WARM_UP + args.seconds if which == "throughput" else args.timeout
    for env in args.envs:
        for seed in args.seeds:
            for candidate in chosen:
                where = f"{which} on {env}"
                if candidate.name not in pythons or (candidate.name, where) in results.skipped:
                    continue
                options: list[object] = ["--algorithm", candidate.algorithm, "--env", env]
                options += ["--seed", seed, "--seconds", args.seconds, "--timeout", args.timeout]
                if which == "goal":
                    options += ["--goal", GOALS[env]]
                record = {"measure": which, "env": env, "candidate": candidate.name, "seed": seed}
                python = pythons[candidate.name]
                try:
                    report = report_of(
                        python, candidate.program, *options, timeout=STARTING + 1.5 * limit
                    )
                except Skipped as reason:
                    results.skip(candidate, where, str(reason))
                    results.add({**record, "skipped": str(reason)})
                else:
                    results.add({**record, **report})
                    say(f"{where}, seed {seed}, {candidate.title}: {told(report)}")


def told(report: dict[str, Any]) -> str:
    """Return a run's result in words."""
    if report["reached"] is None:
        return f"{report['steps_per_second']:,.0f} steps/s"
    after = f"{report['seconds']:.1f} s and {report['steps']:,} steps"
    mean = "no episodes" if report["mean_return"] is None else f"{report['mean_return']:.1f}"
    return f"reached after {after}" if report["reached"] else f"not reached in {after} ({mean})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [candidate.name for candidate in CANDIDATES]
    parser.add_argument("candidates", nargs="*", metavar="candidate", help=f"of {', '.join(names)}")
    parser.add_argument("--envs", nargs="+", choices=GOALS, default=list(GOALS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run's throughput")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of a run to a goal")
    parser.add_argument("--csv", type=Path, help="write each run to this file; it is appended to")
    args = parser.parse_args()
    unknown = set(args.candidates) - set(names)
    if unknown:
        parser.error(f"unknown candidate {sorted(unknown)}; there are {', '.join(names)}")
    chosen = [each for each in CANDIDATES if not args.candidates or each.name in args.candidates]
    results = Results(args.csv)
    tables: dict[str, Callable[[str, dict[str, list[dict[str, Any]]]], list[str]]] = {
        "throughput": throughput_table,
        "goal": lambda env, runs: goal_table(env, runs, args.timeout),
    }
    for which in args.measure:
        measure(args, which, chosen, results)
    for which in args.measure:
        for env in args.envs:
            if runs := results.of(which, env):
                print("\n".join(tables[which](env, runs)), end="\n\n")
    for (name, where), reason in results.skipped.items():
        print(f"{name}, {where}: {reason}")


if __name__ == "__main__":
    main()
