"""Plot several runs in one figure: return, pulls, lag and throughput."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from clusterenv.errors import ConfigError
from pipelines.experiment import options
from pipelines.experiment.checks import Options
from pipelines.experiment.directories import check_writable

__all__ = ["Args", "draw"]

PANELS = {
    "mean_return": "mean return of 100 episodes",
    "pulls": "pulls",
    "lag_mean": "versions behind, mean",
    "steps_per_second": "steps per second",
}


@dataclass(frozen=True)
class Args(Options):
    """What to draw, and where."""

    runs: tyro.conf.Positional[tuple[Path, ...]]  # directories of runs, or progress.csv files
    out: Path = Path("plot.png")  # the picture: .png, .svg or .pdf


def draw(runs: Sequence[Path], out: Path) -> Path:
    """Draw four panels with a line per run; return the picture's path.

    Raises
    ------
    ConfigError
        If something is no run, or the picture's ending is unknown.
    """
    if not runs:
        raise ConfigError("name at least one run: clusterenv plot runs/a runs/b --out both.png")
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--out {out}: the picture must end in .png, .svg or .pdf")
    check_writable(out, example="plot.png")
    # Here, as --help needs none of it.
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    curves = dict(zip(_names(runs), map(_read, runs), strict=True))
    figure = Figure(figsize=(11, 7), dpi=120, layout="constrained")
    for axes, (column, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for index, (name, rows) in enumerate(curves.items()):
            colour = mpl.colormaps["viridis"](index / max(1, len(curves) - 1) * 0.85)
            if points := _points(rows, "steps", column):
                axes.plot(*zip(*points, strict=True), color=colour, label=name)
            if column == "mean_return" and (points := _points(rows, "eval_steps", "eval_return")):
                label = f"{name}, evaluated"
                axes.plot(*zip(*points, strict=True), ".--", color=colour, label=label)
        axes.set(xlabel="environment steps", title=title)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def _points(rows: Sequence[dict[str, str]], x: str, y: str) -> list[tuple[float, float]]:
    """Return two columns, where both are finite; each point once."""
    found = ((float(row[x]), float(row[y])) for row in rows if row.get(x) and row.get(y))
    return sorted({point for point in found if all(map(math.isfinite, point))})


def _names(runs: Sequence[Path]) -> list[str]:
    """Name each run by the end of its path, as much of it as tells them apart."""
    paths = [run.parent if run.name == "progress.csv" else run for run in runs]
    parts = [path.with_suffix("").parts if path.suffix == ".csv" else path.parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def _read(run: Path) -> list[dict[str, str]]:
    path = run / "progress.csv" if run.is_dir() else run
    if not path.is_file():
        raise ConfigError(f"{run} is no run: it has no progress.csv; clusterenv plot runs/mine")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if "steps" not in (reader.fieldnames or ()):
            raise ConfigError(f"{path} has no column 'steps'; clusterenv plot runs/mine")
        return [row for row in reader if None not in row.values()]


def main(words: Sequence[str]) -> None:
    """Read the command line and draw."""
    args = options.read(Args, words, description=__doc__, prog="clusterenv plot")
    print(draw(args.runs, args.out))
