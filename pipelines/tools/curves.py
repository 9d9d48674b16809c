"""Curves of runs: read from their directories, named, and put together by setting."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from clusterenv.errors import ConfigError
from pipelines.experiment.args import FREE
from pipelines.experiment.checks import flag
from pipelines.experiment.directories import note_of

__all__ = ["Band", "Run", "band", "grouped", "read_run", "short_names"]

WINDOW = 0.05  # of a run's steps, over which its rate is averaged
OF_NO_SETTING = (*FREE, "env", "seed")
Floats = npt.NDArray[np.float64]
Points = tuple[Floats, Floats]
"""Values of a curve: x, ascending, and y."""


class Run(NamedTuple):
    """What a run has logged, and what it is a run of."""

    name: str
    env: str
    """Empty if the run does not tell."""
    learner: str
    options: Mapping[str, Any]
    """Those that tell settings apart, so without the seed."""
    rows: Sequence[Mapping[str, str]]

    def points(self, x: str, y: str) -> Points:
        """Return two columns, where both are finite, each point once; a rate over a window."""
        found = ((_number(row, x), _number(row, y)) for row in self.rows)
        if y == "steps_per_second":
            found = self._rates()
        finite = sorted({pair for pair in found if all(map(math.isfinite, pair))})
        xs, ys = np.array(finite, np.float64).reshape(-1, 2).T
        return xs, ys

    def _rates(self) -> Any:
        """Yield steps and rate, from the time between records, also across a resume.

        The column has the mean of a session: few steps after a resume, it is one of few records.
        """
        at = [(_number(row, "steps"), _number(row, "seconds")) for row in self.rows]
        before, window = 0, WINDOW * max((steps for steps, _ in at), default=0)
        at = [(0.0, 0.0), *at]
        for index, (steps, seconds) in enumerate(at[1:], 1):
            while before < index - 1 and at[before + 1][0] <= steps - window:
                before += 1
            spent = seconds - at[before][1]
            yield steps, (steps - at[before][0]) / spent if spent > 0 else math.nan


class Band(NamedTuple):
    """Several curves in one."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def band(curves: Sequence[Points]) -> Band:
    """Return mean and range of curves, interpolated where one has no point, as far as all go.

    Examples
    --------
    >>> first = np.array([0.0, 10.0]), np.array([0.0, 10.0])
    >>> second = np.array([0.0, 5.0, 20.0]), np.array([4.0, 4.0, 4.0])
    >>> found = band([first, second])
    >>> found.x.tolist(), found.mean.tolist(), found.high.tolist()
    ([0.0, 5.0, 10.0], [2.0, 4.5, 7.0], [4.0, 5.0, 10.0])
    """
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        nothing = np.empty(0)
        return Band(nothing, nothing, nothing, nothing)
    begin, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    every = np.unique(np.concatenate([x for x, _ in curves]))
    xs = every[(every >= begin) & (every <= end)]
    values = np.stack([np.interp(xs, x, y) for x, y in curves])
    return Band(xs, values.mean(0), values.min(0), values.max(0))


def grouped(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """Return runs by environment and setting: all options but the seed and those of no run.

    A setting is named by its learner, and by the options in which it differs from the others of
    this learner in this environment.
    """
    settings: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[Run]] = {}
    for run in runs:
        key = tuple(sorted((name, repr(value)) for name, value in run.options.items()))
        settings.setdefault((run.env, run.learner, key), []).append(run)
    groups = {}
    for (env, learner, _), several in settings.items():
        others = [run.options for run in runs if (run.env, run.learner) == (env, learner)]
        mine = several[0].options
        differ = [
            flag(name, value)
            for name, value in mine.items()
            if any(options.get(name) != value for options in others)
        ]
        name = " ".join([learner, *differ])
        groups[env, f"{name} ({len(several)} seed{'s' * (len(several) > 1)})"] = several
    return groups


def read_run(path: Path, name: str, needs_options: bool = False) -> Run:
    """Return the curves of a run's directory, or of a ``progress.csv``.

    Raises
    ------
    ConfigError
        If it is no run, or has no ``config.yaml`` although its options are needed.
    """
    file = path / "progress.csv" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path} is no run: it has no progress.csv; clusterenv plot runs/mine")
    with file.open(newline="") as lines:
        reader = csv.DictReader(lines)
        if "steps" not in (reader.fieldnames or ()):
            raise ConfigError(f"{file} has no column 'steps'; clusterenv plot runs/mine")
        rows = [row for row in reader if None not in row.values()]
    note = note_of(file.parent) if file.name == "progress.csv" else None
    if note is None or "args" not in note:
        if needs_options:
            raise ConfigError(
                f"--group needs the options of {path}, and there is no config.yaml beside it; name "
                "directories of runs, or leave --group out: clusterenv plot runs/a runs/b"
            )
        return Run(name, "", "", {}, rows)
    options = {name: value for name, value in note["args"].items() if name not in OF_NO_SETTING}
    options["init_from"] = options.get("init_from") is not None  # each seed may have its own
    return Run(name, str(note["args"].get("env", "")), str(note["kind"]), options, rows)


def short_names(runs: Sequence[Path]) -> list[str]:
    """Name each run by the end of its path, as much of it as tells them apart."""
    paths = [run.parent if run.name == "progress.csv" else run for run in runs]
    parts = [path.with_suffix("").parts if path.suffix == ".csv" else path.parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def _number(row: Mapping[str, str], name: str) -> float:
    return float(row.get(name) or "nan")
