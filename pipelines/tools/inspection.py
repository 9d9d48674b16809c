"""Summarise a run or a store: rows, episodes, returns, versions, size, and damaged files.

``clusterenv inspect runs/mine``
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import stat
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from clusterenv.errors import ClusterEnvError, ConfigError
from pipelines.experiment import options
from pipelines.experiment.checks import Options
from pipelines.experiment.config_file import CONFIG, read_config
from pipelines.experiment.directories import JOURNAL, note_of
from pipelines.experiment.sinks import read_csv
from pipelines.experiment.wording import count

__all__ = ["Args", "describe"]

INDENT = 15  # columns for the names


@dataclass(frozen=True)
class Args(Options):
    """What to look at."""

    run: tyro.conf.Positional[Path]  # directory of a run, of a collection or of a saved store


def describe(run: Path) -> list[tuple[str, str]]:
    """Summarise a run or a store, as names and values.

    Raises
    ------
    ConfigError
        If the directory holds neither.
    """
    store = next((d for d in (run, run / JOURNAL) if (d / "manifest.json").is_file()), None)
    progress = run / "progress.csv"
    if store is None and not progress.is_file():
        raise ConfigError(
            f"{run} holds no run and no store; a run has a progress.csv, a store a manifest.json: "
            "clusterenv inspect runs/dqn-CartPole-v1-seed1"
        )
    lines = [*_begun(note_of(run) or {})]
    lines += _progress(progress) if progress.is_file() else []
    if store is not None:
        lines += _store(store)
    found = list(_files(run))
    size = sum(file.st_size for file in found)
    newest = max((file.st_mtime for file in found), default=time.time())
    lines.append(("size", f"{size / 1e6:,.1f} MB in {count(len(found), 'file')}"))
    lines.append(("last written", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest))))
    return [*lines, *_config(run)]


def _files(run: Path) -> Iterator[os.stat_result]:
    """Yield the stat result of every file below a directory; files may vanish meanwhile."""
    for directory, _, names in os.walk(run):
        for name in names:
            with contextlib.suppress(OSError):
                found = Path(directory, name).lstat()
                if stat.S_ISREG(found.st_mode):
                    yield found


def _begun(note: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a run or a dataset says of itself."""
    args = note.get("args") or note.get("dataset")
    if isinstance(args, Mapping):
        yield "environment", str(args.get("env"))
    if "kind" in note:
        yield "learner", str(note["kind"])
        yield "finished", "yes" if note.get("finished") else "no: the same command goes on"


def _config(run: Path) -> Iterator[tuple[str, str]]:
    """Yield command, options, versions and commits of a run."""
    if not (run / CONFIG).is_file():
        return
    config = read_config(run, "leave it out: clusterenv plot shows the rest")
    given = {name: value for name, value in config["options"].items() if value is not None}
    width = max(40, shutil.get_terminal_size((111, 24)).columns - INDENT)
    facts = {
        "command": config.get("command"),
        "options": _listed(given),
        "not set": ", ".join(name for name in config["options"] if name not in given),
        "versions": _listed(config.get("versions")),
        "commits": _listed(config.get("commits")),
    }
    for label, text in facts.items():
        lines = textwrap.wrap(
            str(text or ""), width, break_long_words=False, break_on_hyphens=False
        )
        yield from zip([label, *[""] * len(lines)], lines, strict=False)


def _listed(values: Any) -> str:
    pairs = values.items() if isinstance(values, Mapping) else ()
    return ", ".join(f"{name} {_shown(value)}" for name, value in pairs)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _progress(path: Path) -> list[tuple[str, str]]:
    rows = read_csv(path)
    if not rows:
        return [("progress", "nothing logged yet")]
    last = rows[-1]
    returns = [float(row["mean_return"]) for row in rows]
    finite = [value for value in returns if math.isfinite(value)]
    pulls = count(int(last["pulls"]), "pull")
    return [
        ("steps", f"{int(float(last['steps'])):,} in {float(last['seconds']):,.0f} s"),
        ("return", f"{returns[-1]:.1f}, best {max(finite, default=math.nan):.1f} (mean of 100)"),
        *_evaluation(rows),
        (
            "policy",
            f"version {last['version']}, {pulls}, lag {last['lag_mean']}",
        ),
    ]


def _evaluation(rows: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return the last and the best evaluation, if the run was evaluated."""
    found = [row for row in rows if row.get("eval_return")]
    if not found:
        return []
    last, best = found[-1], max(found, key=lambda row: float(row["eval_return"]))
    said = [
        f"{float(r['eval_return']):.1f} at {float(r['eval_steps']):,.0f} steps"
        for r in (last, best)
    ]
    return [("evaluation", f"{said[0]}, best {said[1]}")]


def _store(directory: Path) -> list[tuple[str, str]]:
    # Imported here because --help does not need them.
    import numpy as np

    from clusterenv.store import open_snapshot

    snapshot = open_snapshot(directory)
    damaged = snapshot.damaged
    lines: list[tuple[str, str]] = []
    if damaged:
        lines.append(("health", f"damaged: {', '.join(damaged)}; the rest is readable"))
        return lines
    if not snapshot.end:
        return [*lines, ("rows", "0: nothing has been committed yet")]
    try:
        names = ["run", "shard", "incarnation", "env", "reward", "version"]
        names += ["terminated", "truncated"]
        table = snapshot.read(names)
    except ClusterEnvError as error:
        return [*lines, ("health", str(error))]
    lines.append(("health", "every file is whole"))
    if not table.num_rows:
        return [*lines, ("rows", "0")]
    columns = {name: table[name].to_numpy() for name in names}
    ended = int((columns["terminated"] | columns["truncated"]).sum())
    shards = len(np.unique(columns["shard"]))
    runs, run = np.unique(columns["run"], return_inverse=True)
    begun = run * (int(columns["shard"].max()) + 1) + columns["shard"]  # shards of each run
    placed = np.unique(begun << 32 | columns["incarnation"])
    again = len(placed) - len(np.unique(placed >> 32))
    versions = columns["version"]
    envs = len(np.unique(columns["env"]))
    return [
        *lines,
        ("rows", f"{table.num_rows:,} of {count(envs, 'environment')} in {count(shards, 'shard')}"),
        ("collectors", f"{len(runs)}: one for each time that it was begun or resumed"),
        ("restarts", f"{again}: after losses and moves"),
        ("episodes", f"{ended:,} ended, {int(columns['truncated'].sum()):,} of them truncated"),
        ("versions", f"{versions.min()} to {versions.max()}"),
        ("reward", f"{columns['reward'].mean():.4g} a step"),
    ]


def main(words: Sequence[str]) -> None:
    """Read the command line and print the summary."""
    args = options.read(Args, words, description=__doc__, prog="clusterenv inspect")
    for name, value in describe(args.run):
        print(f"{name:>{INDENT - 2}}  {value}")
