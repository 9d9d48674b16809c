"""The page "ClusterEnv" on Dask's dashboard; it runs in the scheduler's process."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from bokeh.layouts import column, gridplot
from bokeh.models import ColumnDataSource
from bokeh.models.widgets import Div
from bokeh.palettes import Category10_10
from bokeh.plotting import figure
from distributed.dashboard.components import add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from tornado.ioloop import IOLoop

from clusterenv.head.monitor.runs import RUNS
from clusterenv.head.monitor.telemetry import curves, headline
from clusterenv.sync.announcement import topic_of

__all__ = ["Page", "add_page"]

ROUTE = "clusterenv"
MILLISECONDS = 500
POINTS = 1_000
LEGEND_SHARDS = 10
RUNS_SEEN = 50  # events of the newest runs that are searched for statistics

BY_SHARD = {
    "rate": "steps per second, by shard",
    "version": "version that acts, by shard",
    "lag": "versions behind the newest, by shard",
    "divergence": "divergence from the newest, by shard",
}
OF_ALL = {
    "mean_return": "mean return of the last 100 episodes",
    "pulls": "pulls of weights so far",
    "queued": "batches that wait for the learner",
    "restarts": "restarts of shards so far",
}


def add_page(scheduler: Any, prefix: str) -> None:
    """Add the page to a scheduler's dashboard, whose pages' paths begin with ``prefix``."""
    variables = template_variables(scheduler)
    page = BokehApplication({f"/{ROUTE}": _document}, scheduler, prefix, variables)
    scheduler.http_application.add_application(page)
    page.initialize(IOLoop.current())
    page.start()
    variables["pages"].append(ROUTE)  # every page's bar reads the same list


def _document(scheduler: Any, extra: dict[str, Any], doc: Any) -> None:
    doc.title = "Dask: ClusterEnv"
    page = Page(scheduler)
    page.update()
    add_periodic_callback(doc, page, MILLISECONDS)
    doc.add_root(page.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME


class Page:
    """Numbers and curves of the newest run, from the statistics on its topic."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._run: dict[str, Any] = {"number": None}
        self._seen = 0.0  # time of the last event that was drawn
        self._last: dict[str, Any] | None = None
        self._shards = 0
        self._source = ColumnDataSource({name: [] for name in ("seconds", *OF_ALL)})
        self._figures = {name: _figure(title) for name, title in (BY_SHARD | OF_ALL).items()}
        for name in OF_ALL:
            self._figures[name].line("seconds", name, source=self._source, line_width=2)
        self._headline = Div(text=_html("waiting for a collector"), sizing_mode="stretch_width")
        plots = gridplot(
            [*self._figures.values()], ncols=2, sizing_mode="stretch_width", toolbar_location=None
        )
        self.root = column(self._headline, plots, sizing_mode="stretch_width")

    def update(self) -> None:
        """Draw the statistics that have arrived since the last call."""
        points: list[dict[str, float | None]] = []
        for message in self._news():
            if self._last is not None:
                points.append(curves(self._last, message))
                self._headline.text = _html(self._run["title"], headline(self._last, message))
            self._last = message
        if points:
            self._draw_shards(sum(name.startswith("rate ") for name in points[-1]))
            columns: dict[str, Any] = {}
            for name in self._source.data:
                values = [point.get(name) for point in points]
                columns[name] = [float("nan") if value is None else value for value in values]
            self._source.stream(columns, POINTS)

    def _news(self) -> Iterator[dict[str, Any]]:
        for _, run in self._scheduler.get_events(RUNS)[: -RUNS_SEEN - 1 : -1]:
            if run["state"] == "begun" and (told := self._stats(run["number"])):
                break
        else:
            return
        if run["number"] != self._run["number"]:
            self._run, self._last = run, None
            self._source.data = {name: [] for name in self._source.data}
            self._headline.text = _html(run["title"])
        for when, message in told:
            if when > self._seen:
                self._seen = when
                yield message

    def _stats(self, run: int) -> list[tuple[float, dict[str, Any]]]:
        """Return the statistics on a run's topic; ``ClusterEnv.step(policy)`` publishes none."""
        events = self._scheduler.get_events(topic_of(run))
        return [(when, message) for when, message in events if message["kind"] == "stats"]

    def _draw_shards(self, shards: int) -> None:
        """Add curves until there are enough for so many shards."""
        length = len(self._source.data["seconds"])
        for shard in range(self._shards, shards):
            for name in BY_SHARD:
                self._source.data[f"{name} {shard}"] = [float("nan")] * length
                labelled = {"legend_label": str(shard)} if shard < LEGEND_SHARDS else {}
                self._figures[name].line(
                    "seconds",
                    f"{name} {shard}",
                    source=self._source,
                    color=Category10_10[shard % 10],
                    line_width=2,
                    **labelled,
                )
                legend = self._figures[name].legend
                legend.location, legend.orientation = "top_left", "horizontal"
                legend.background_fill_alpha = 0.4
        self._shards = max(self._shards, shards)


def _figure(title: str) -> Any:
    return figure(
        title=title, height=200, tools="", sizing_mode="stretch_width", x_axis_label="seconds"
    )


def _html(title: str, numbers: list[tuple[str, str]] | None = None) -> str:
    cells = "".join(
        f'<span style="margin-right:2em"><small style="color:#777">{html.escape(label)}</small> '
        f'<b id="clusterenv-{label.replace("/", "-")}">{html.escape(value)}</b></span>'
        for label, value in numbers or ()
    )
    return f'<div style="font-size:16px"><h2>{html.escape(title)}</h2>{cells}</div>'
