"""The page on Dask's dashboard: its numbers, and that a browser sees them change."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from distributed import Client

import clusterenv
from clusterenv.head.monitor.dashboard import Page
from clusterenv.head.monitor.runs import RUNS, RunEntry
from clusterenv.head.monitor.telemetry import curves, headline
from pipelines.experiment import run
from pipelines.ppo import PPO

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def told(seconds: float, rows: list[int], **more: Any) -> dict[str, Any]:
    return {
        "kind": "stats",
        "seconds": seconds,
        "rows": rows,
        "newest": 5,
        "versions": [5, 3, 5][: len(rows)],
        "divergences": [0.0, 0.25, None][: len(rows)],
        "announcements": 10,
        "pulls": 4,
        "queued": 1,
        "restarts": 0,
        "episodes": 20,
        "mean_return": 12.25,
        **more,
    }


def test_points_of_curves() -> None:
    points = curves(told(1.0, [10, 20]), told(3.0, [30, 20, 8]))
    assert points["seconds"] == 3.0
    assert [points[f"rate {shard}"] for shard in range(3)] == [10.0, 0.0, None]
    assert [points[f"version {shard}"] for shard in range(3)] == [5, 3, 5]
    assert [points[f"lag {shard}"] for shard in range(3)] == [0, 2, 0]
    assert [points[f"divergence {shard}"] for shard in range(3)] == [0.0, 0.25, None]
    assert (points["pulls"], points["queued"], points["mean_return"]) == (4, 1, 12.25)


def test_numbers_at_the_top() -> None:
    said = dict(headline(told(1.0, [10, 20]), told(3.0, [30, 20])))
    assert said["steps"] == "50"
    assert said["steps/s"] == "10"
    assert said["pulls"] == "4, 80% saved"
    assert said["return"] == "12.2"
    assert dict(headline(told(1.0, [1]), told(2.0, [1], pulls=90)))["pulls"] == "90, 0% saved"
    assert dict(headline(told(1.0, [1]), told(1.0, [1], mean_return=None)))["return"] == "–"


class Events:
    """What of a scheduler a page reads."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[float, dict[str, Any]]]] = {RUNS: []}

    def begin(self, number: int) -> list[tuple[float, dict[str, Any]]]:
        """Begin a run; return the events on its topic."""
        entry = RunEntry("name", number, f"Env-{number}", "Client", 0.0)
        self.told[RUNS].append((0.0, {**entry._asdict(), "state": "begun"}))
        return self.told.setdefault(entry.topic, [(0.0, {"kind": "version"})])

    def get_events(self, topic: str) -> list[tuple[float, dict[str, Any]]]:
        return self.told.get(topic, [])


def test_a_page_draws_what_is_new_and_begins_anew_for_another_collector() -> None:
    events = Events()
    page = Page(events)
    page.update()
    first = events.begin(1)
    first += [(1.0, told(1.0, [10, 20])), (2.0, told(2.0, [30, 50]))]
    page.update()
    page.update()
    data = page._source.data
    assert (data["seconds"], data["rate 0"], data["rate 1"]) == ([2.0], [20.0], [30.0])
    first.append((3.0, told(3.0, [40, 50, 8])))  # a shard more
    page.update()
    data = page._source.data
    assert data["rate 0"] == [20.0, 10.0]
    assert len(data["rate 2"]) == 2
    assert "48" not in page._headline.text
    assert ">98<" in page._headline.text
    second = events.begin(2)
    second += [(4.0, told(1.0, [5])), (5.0, told(2.0, [6]))]
    page.update()
    assert page._source.data["seconds"] == [2.0]
    assert "Env-2" in page._headline.text
    events.begin(3)  # publishes versions alone, as step(policy) does
    second.append((6.0, told(3.0, [9])))
    page.update()
    assert "Env-2" in page._headline.text
    assert page._source.data["seconds"] == [2.0, 3.0]


@pytest.fixture(scope="module")
def shown() -> Iterator[Client]:
    with clusterenv.connect("local", n_workers=2, dashboard_address="127.0.0.1:0") as client:
        yield client


def test_without_a_dashboard_no_statistics_are_published(client: Client) -> None:
    with collecting(client) as collector:
        collector.rollout()
        assert collector.dashboard_link is None
    kinds = {message["kind"] for _, message in client.get_events(collector.topic)}
    assert kinds == {"version", "end"}


def test_a_run_says_where_its_page_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.experiment.dashboard.ADDRESS", "127.0.0.1:0")
    run(PPO, PPO.preset("CartPole-v1", total_steps=512, num_envs=8, shards=1, out=tmp_path))
    assert "dashboard:" not in capsys.readouterr().out
    small = {"total_steps": 512, "num_envs": 8, "shards": 1, "dashboard": True}
    run(PPO, PPO.preset("CartPole-v1", **small, out=tmp_path / "shown"))
    assert re.search(
        r"^dashboard: http://127\.0\.0\.1:\d+/clusterenv$", capsys.readouterr().out, re.M
    )


def collecting(client: Client) -> clusterenv.Collector:
    policy = clusterenv.policies.Random(gym.spaces.Discrete(2))
    options: dict[str, Any] = {"num_envs": 4, "horizon": 16, "shards": 2, "cluster": client}
    return clusterenv.Collector("CartPole-v1", policy, **options)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_a_browser_sees_the_numbers_change_during_a_run(shown: Client, tmp_path: Path) -> None:
    api = pytest.importorskip("playwright.sync_api")
    over = threading.Event()

    def learn(collector: clusterenv.Collector) -> None:
        for batch in collector:
            # A browser, the page and the shards share the cores: it need not be fast.
            if over.wait(0.02):
                return
            if batch.shard == 0:
                collector.publish(clusterenv.policies.Random(gym.spaces.Discrete(2)))

    with collecting(shown) as collector, api.sync_playwright() as playwright:
        learner = threading.Thread(target=learn, args=(collector,))
        learner.start()
        try:
            browser = playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox"], timeout=60_000
            )
            page = browser.new_page(viewport={"width": 1280, "height": 1100})
            page.goto(f"{shown.dashboard_link!s}")
            page.get_by_role("link", name="Clusterenv").click()
            assert page.url == collector.dashboard_link
            steps, episodes = (
                page.locator(f"#clusterenv-{what}") for what in ("steps", "episodes")
            )
            for what in (steps, episodes):
                before = number(what)
                for _ in range(200):
                    if number(what) > before:
                        break
                    page.wait_for_timeout(100)
                assert number(what) > before
            assert number(page.locator("#clusterenv-shards")) == 2
            page.screenshot(path=tmp_path / "page.png")
            assert page.locator("canvas").count() >= 8
            browser.close()
        finally:
            over.set()
            learner.join()


def number(locator: Any) -> int:
    locator.wait_for(timeout=20_000)
    return int(locator.inner_text().replace(",", ""))
