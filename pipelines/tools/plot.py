"""Plot several runs in one figure: return, pulls, lag and throughput.

``clusterenv plot runs/* --group --out all.png`` shows seeds of one setting as mean and range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from clusterenv.errors import ConfigError
from pipelines.experiment import options
from pipelines.experiment.checks import Options
from pipelines.experiment.directories import check_writable
from pipelines.tools.curves import Run, band, grouped, read_run, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()  # directories of runs, or progress.csv files
    out: Path = Path("plot.png")  # the picture: .png, .svg or .pdf
    group: bool = False  # draw the seeds of each setting as their mean and range


def draw(runs: Sequence[Path], out: Path, group: bool = False) -> Path:
    """Draw four panels for each environment; return the picture's path.

    Parameters
    ----------
    runs
        Directories of runs, or ``progress.csv`` files.
    out
        The picture.
    group
        Draw a line with a band for each setting, instead of a line for each run.

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
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    names = short_names(runs)
    read = [read_run(path, name, group) for path, name in zip(runs, names, strict=True)]
    lines = grouped(read) if group else {(run.env, run.name): [run] for run in read}
    envs = list(dict.fromkeys(env for env, _ in lines))
    colours = _colours(list(dict.fromkeys(name for _, name in lines)))
    if len(envs) == 1:
        figure = Figure(figsize=(11, 7), dpi=120, layout="constrained")
        columns = [figure.subplots(2, 2).flatten()]
    else:
        figure = Figure(figsize=(5.5 * len(envs), 12), dpi=120, layout="constrained")
        columns = list(figure.subplots(len(PANELS), len(envs)).T)
    for env, column in zip(envs, columns, strict=True):
        mine = {name: several for (of, name), several in lines.items() if of == env}
        for axes, (metric, title) in zip(column, PANELS.items(), strict=True):
            for name, several in mine.items():
                _line(axes, several, "steps", metric, colours[name], label=name)
            if metric == "mean_return":
                for name, several in mine.items():
                    evaluated, label = ("eval_steps", "eval_return"), f"{name}, evaluated"
                    _line(axes, several, *evaluated, colours[name], label=label, style=".--")
            axes.set(xlabel="environment steps", title=f"{env}: {title}" if env else title)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            if metric != "mean_return":
                axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
        column[0].legend(frameon=False, fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def _line(
    axes: Axes, runs: Sequence[Run], x: str, y: str, colour: Any, label: str, style: str = "-"
) -> None:
    """Draw the mean of runs, and their range if there are several."""
    curves = band([run.points(x, y) for run in runs])
    if not len(curves.x):
        return
    # Over the axis too: a lag of 0 throughout is a line.
    (line,) = axes.plot(curves.x, curves.mean, style, color=colour, label=label, clip_on=False)
    line.set_zorder(3)
    if len(runs) > 1:
        axes.fill_between(curves.x, curves.low, curves.high, color=colour, alpha=0.2, linewidth=0)


def _colours(names: Sequence[str]) -> dict[str, Any]:
    import matplotlib as mpl

    few = len(names) <= mpl.colormaps["tab10"].N
    spread = mpl.colormaps["viridis"]
    return {
        name: mpl.colormaps["tab10"](index) if few else spread(index / len(names))
        for index, name in enumerate(names)
    }


def main(words: Sequence[str]) -> None:
    """Read the command line and draw."""
    args = options.read(Args, words, description=__doc__, prog="clusterenv plot")
    print(draw(args.runs, args.out, args.group))
