"""What is said of a run: its progress as a line, as facts by label, and its summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pipelines.experiment.metrics import Metrics
from pipelines.experiment.wording import count

__all__ = ["Fact", "duration", "facts", "line", "scale", "size", "sparkline", "summary"]

BARS = "▁▂▃▄▅▆▇█"
LEAST_SPAN = 0.2  # of the largest value: smaller changes do not fill a history's height

Fact = tuple[str, str]
"""A label, and what is to be said under it."""


def line(metrics: Metrics, total: int, ended: str = "") -> str:
    """Return the progress of a run as one line; ``ended`` says why there is no more to come.

    Examples
    --------
    >>> line(Metrics(steps=500, steps_per_second=100, mean_return=20.5, version=3), 1000)
    '        500 steps  50%      100/s  return     20.5  version 3  lag 0.00  pulls 0  5 s left'
    """
    policy = ""
    if metrics.version:
        policy = f"  version {metrics.version}  lag {metrics.lag_mean:.2f}  pulls {metrics.pulls}"
    return (
        f"{metrics.steps:>11,} steps {_percent(metrics, total, ended):>3}%  "
        f"{metrics.steps_per_second:>7,.0f}/s  return {_score(metrics.mean_return):>8}"
        f"{_judged(metrics)}{_brief(metrics)}{policy}{_trouble(metrics, '  ')}  "
        f"{ended or _left(metrics, total)}"
    )


def facts(metrics: Metrics, total: int, ended: str = "") -> list[Fact]:
    """Return the progress of a run, by label; ``ended`` as for :func:`line`."""
    score = f"{_score(metrics.mean_return)}{_judged(metrics)}"
    said = [
        ("steps", f"{metrics.steps:,} of {total:,}, {ended or _left(metrics, total)}"),
        ("steps/s", f"{metrics.steps_per_second:,.0f} on average"),
        ("return", f"{score}, {count(metrics.episodes, 'episode')}"),
        *_evaluation(metrics),
    ]
    if metrics.version:
        lag = f"{metrics.lag_mean:.2f} behind on average"
        said.append(("policy", f"version {metrics.version:,}, shards {lag}, {_pulls(metrics)}"))
    if metrics.store_rows is not None:
        said.append(("store", _store(metrics)))
    said.append(("trouble", _trouble(metrics) or "none"))
    return said


def summary(metrics: Metrics, best: float, files: Iterable[str], go_on: str) -> list[Fact]:
    """Return how a run ended, by label.

    Parameters
    ----------
    metrics
        The last.
    best
        The best mean return there was.
    files
        What was written.
    go_on
        The command that continues from here.
    """
    # One clock: of a run in several sessions, metrics.steps_per_second is that of the last.
    rate = metrics.steps / metrics.seconds if metrics.seconds else 0.0
    took = f"{metrics.steps:,} in {duration(metrics.seconds)}, {rate:,.0f}/s"
    said = [
        ("steps", took),
        ("return", f"{_score(metrics.mean_return)}{_judged(metrics)}, best {_score(best)}"),
        *_evaluation(metrics),
        ("policy", f"{count(metrics.version, 'version')}, {_pulls(metrics)}; {_weights(metrics)}"),
    ]
    if metrics.store_rows is not None:
        said.append(("store", _store(metrics)))
    said.append(("trouble", _trouble(metrics) or "none"))
    said += [("wrote" if not index else "", file) for index, file in enumerate(files)]
    said.append(("go on", go_on))
    return said


def sparkline(values: Sequence[float]) -> str:
    """Return bars as high as the values, from the least to the greatest.

    Values that differ by less than a fifth of the largest are drawn as what they are: almost flat.

    Examples
    --------
    >>> sparkline([0, 1, 2, 7])
    '▁▂▃█'
    >>> sparkline([500, 497, 500]), sparkline([3, 3])
    ('▅▄▅', '▄▄')
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    least, most = min(finite), max(finite)
    span = max(most - least, LEAST_SPAN * max(map(abs, finite))) or 1.0
    bottom = (least + most - span) / 2
    top = len(BARS) - 1
    return "".join(BARS[math.floor(top * (value - bottom) / span + 0.5)] for value in finite)


def scale(values: Sequence[float]) -> str:
    """Return what the lowest and the highest bar of a history stand for.

    Examples
    --------
    >>> scale([20.5, 480.0, math.nan]), scale([3.0, 3.0])
    ('20 to 480', '')
    """
    finite = [value for value in values if math.isfinite(value)]
    ends = [f"{end:,.0f}" for end in (min(finite), max(finite))] if finite else ["", ""]
    return "" if ends[0] == ends[1] else " to ".join(ends)


def duration(seconds: float) -> str:
    """Format a duration for people.

    Examples
    --------
    >>> duration(9.4), duration(125), duration(7_500), duration(200_000)
    ('9 s', '2 min 05 s', '2 h 05 min', '2 d 07 h')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02d} h"
    if hours:
        return f"{hours} h {minute:02d} min"
    return f"{minutes} min {second:02d} s" if minutes else f"{second} s"


def size(nbytes: float) -> str:
    """Format a number of bytes for people.

    Examples
    --------
    >>> size(999), size(1_234_567)
    ('999 B', '1.2 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def _percent(metrics: Metrics, total: int, ended: str) -> int:
    """Return the progress, rounded down: 100 means the end."""
    return 100 if ended or metrics.steps >= total else 100 * metrics.steps // total


def _left(metrics: Metrics, total: int) -> str:
    if metrics.steps >= total:
        return "done"
    if not metrics.steps_per_second:
        return "beginning"
    return f"{duration(max(0, total - metrics.steps) / metrics.steps_per_second)} left"


def _score(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f}"  # no episode has ended


def _judged(metrics: Metrics) -> str:
    apart = metrics.judged_return
    alike = apart is None or math.isnan(apart) or apart == metrics.mean_return
    return "" if alike else f" (judged {apart:.1f})"


def _brief(metrics: Metrics) -> str:
    evaluated = metrics.eval_return
    return "" if evaluated is None else f"  eval {_score(evaluated):>7}"


def _evaluation(metrics: Metrics) -> list[Fact]:
    """Return the newest evaluation, if the run is evaluated."""
    mean, at = metrics.eval_return, metrics.eval_steps
    low, high = metrics.eval_return_low, metrics.eval_return_high
    if mean is None or at is None or low is None or high is None:
        return []
    if math.isnan(mean):
        return [("eval", "none yet")]
    interval = "" if math.isnan(low) else f" (95 %: {_score(low)} to {_score(high)})"
    return [("eval", f"{_score(mean)}{interval} at {int(at):,} steps")]


def _pulls(metrics: Metrics) -> str:
    possible = metrics.pulls + metrics.pulls_saved
    saved = f", {metrics.pulls_saved / possible:.0%} saved" if possible else ""
    return f"{count(metrics.pulls, 'pull')}{saved}"


def _weights(metrics: Metrics) -> str:
    """Return the weight bytes sent, and saved: as many pulls of their mean size."""
    sent = f"{size(metrics.weight_bytes)} of weights sent"
    if not (metrics.pulls and metrics.pulls_saved):
        return sent
    return f"{sent}, {size(metrics.weight_bytes / metrics.pulls * metrics.pulls_saved)} saved"


def _store(metrics: Metrics) -> str:
    rows, capacity = metrics.store_rows or 0, metrics.store_capacity or 1
    return (
        f"{count(rows, 'row')}, {rows / capacity:.0%} full, {size(metrics.store_bytes or 0)}, "
        f"over {count(metrics.store_age or 0, 'version')}"
    )


def _trouble(metrics: Metrics, before: str = "") -> str:
    """Return the losses and faults so far; empty if there were none."""
    counts = (
        (metrics.restarts, "restart", ""),
        (metrics.rebuilt, "environment", " rebuilt"),
        (metrics.lost_rows, "row", " lost"),
    )
    said = ", ".join(f"{count(number, noun)}{what}" for number, noun, what in counts if number)
    return f"{before}{said}" if said else ""
