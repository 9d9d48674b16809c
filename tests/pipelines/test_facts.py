"""What is said of a run: as a line, as facts, as its summary."""

from __future__ import annotations

import dataclasses
import math
import re

from pipelines.experiment.facts import BARS, facts, line, sparkline, summary
from pipelines.experiment.metrics import Metrics

HALF = Metrics(
    steps=500,
    seconds=5,
    steps_per_second=100,
    episodes=12,
    mean_return=20.5,
    version=4,
    pulls=2,
    pulls_saved=6,
    lag_mean=1.5,
)


def test_a_panel_shows_all_that_a_line_does_and_more() -> None:
    shown = dict(facts(HALF, 1_000))
    assert shown == {
        "steps": "500 of 1,000, 5 s left",
        "steps/s": "100 on average",
        "return": "20.5, 12 episodes",
        "policy": "version 4, shards 1.50 behind on average, 2 pulls, 75% saved",
        "trouble": "none",
    }


def test_one_of_a_thing_is_in_the_singular() -> None:
    one = Metrics(
        steps=2, episodes=1, version=1, pulls=1, restarts=1, lost_rows=1, rebuilt=1, store_rows=1
    )
    said = " ".join(text for _, text in (*facts(one, 10), *summary(one, 1.0, [], "")))
    for noun in ("episode", "version", "pull", "restart", "row", "environment"):
        assert not re.search(rf"\b1 {noun}s", said), said
    assert "1 pull," in said
    assert "1 environment rebuilt" in said


def test_progress_never_shows_100_percent_before_the_end_and_no_more_after_it() -> None:
    assert "  99%" in line(Metrics(steps=998), 1_000)
    assert " 100%" in line(Metrics(steps=1_024), 1_000)
    assert dict(facts(Metrics(steps=1_024, steps_per_second=9), 1_000))["steps"].endswith(", done")
    reached = line(Metrics(steps=400, steps_per_second=9), 1_000, "goal reached")
    assert " 100%" in reached
    assert reached.endswith("goal reached")


def test_the_summary_has_one_clock() -> None:
    """Of a run in two sessions, the rate is that of all steps in all of the time."""
    resumed = Metrics(steps=1_000, seconds=10, steps_per_second=777)
    assert ("steps", "1,000 in 10 s, 100/s") in summary(resumed, 1.0, [], "")


def test_a_flat_curve_is_drawn_flat() -> None:
    heights = [BARS.index(bar) for bar in sparkline([500, 499, 500, 498, 500])]
    assert max(heights) - min(heights) <= 1
    assert min(heights) >= 2  # and not on the ground
    assert sparkline([0, 0]) == sparkline([7, 7])
    assert sparkline([-10, 500])[0] == "▁"


def test_the_store_and_troubles_are_shown_where_there_are_some() -> None:
    metrics = Metrics(
        steps=1,
        restarts=2,
        lost_rows=1_000,
        store_rows=50,
        store_capacity=200,
        store_bytes=10_000,
        store_age=7,
    )
    shown = dict(facts(metrics, 10))
    assert shown["store"] == "50 rows, 25% full, 10.0 kB, over 7 versions"
    assert shown["trouble"] == "2 restarts, 1,000 rows lost"
    assert "2 restarts, 1,000 rows lost" in line(metrics, 10)
    assert shown["steps"] == "1 of 10, beginning"


def test_returns_that_decide_on_the_goal_are_shown_if_others() -> None:
    assert "(judged 7.0)" in line(Metrics(mean_return=3.0, judged_return=7.0), 10)
    assert "judged" not in line(Metrics(mean_return=3.0, judged_return=3.0), 10)
    assert "judged" not in line(Metrics(mean_return=3.0, judged_return=math.nan), 10)


def test_the_summary_ends_with_the_command_that_goes_on() -> None:
    said = summary(HALF, 30.0, ["runs/a: files", "runs/a/curve.png"], "clusterenv train ppo")
    assert ("return", "20.5, best 30.0") in said
    assert said[-3:] == [
        ("wrote", "runs/a: files"),
        ("", "runs/a/curve.png"),
        ("go on", "clusterenv train ppo"),
    ]


def test_the_summary_tells_what_was_saved_in_pulls_and_in_bytes() -> None:
    def policy(**sent: int) -> str:
        return dict(summary(dataclasses.replace(HALF, **sent), 30.0, [], "…"))["policy"]

    saved = "4 versions, 2 pulls, 75% saved; 8.0 kB of weights sent, 24.0 kB saved"
    assert policy(weight_bytes=8_000) == saved
    assert policy(weight_bytes=8_000, pulls_saved=0).endswith("0% saved; 8.0 kB of weights sent")
    assert policy(pulls=0).endswith("0 pulls, 100% saved; 0 B of weights sent")


def test_before_the_first_episode_ends_there_is_no_return() -> None:
    assert "return        –" in line(Metrics(steps=5, mean_return=math.nan), 10)
    assert ("return", "–, best –") in summary(Metrics(mean_return=math.nan), math.nan, [], "")
