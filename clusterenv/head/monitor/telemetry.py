"""A collector's statistics for the page on Dask's dashboard, and the curves made of them."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from typing import Any

from distributed import Client

from clusterenv.head.monitor.announcer import Announcer
from clusterenv.head.monitor.stats import Stats

__all__ = ["Telemetry", "curves", "headline", "record"]

logger = logging.getLogger("clusterenv")

SECONDS = 1.0

Record = Mapping[str, Any]


def record(stats: Stats) -> dict[str, Any]:
    """Return the message for the dashboard: numbers, and lists by shard."""
    return {
        "kind": "stats",
        "seconds": stats.seconds,
        "rows": [round(rate * stats.seconds) for rate in stats.steps_per_second],
        "newest": stats.version,
        "versions": stats.versions,
        "divergences": stats.divergences,
        "announcements": stats.announcements,
        "pulls": stats.pulls,
        "queued": stats.queued,
        "restarts": stats.restarts,
        "episodes": stats.episodes,
        "mean_return": statistics.fmean(stats.returns) if stats.returns else None,
    }


def curves(before: Record, after: Record) -> dict[str, float | None]:
    """Return the points that a record adds to the curves, by curve.

    Curves of a shard are named with its number: ``rate 0``, ``version 0``, ``lag 0``,
    ``divergence 0``. A shard that began since has no rate yet.
    """
    seconds = after["seconds"] - before["seconds"]
    points: dict[str, float | None] = {"seconds": after["seconds"]}
    for shard, rows in enumerate(after["rows"]):
        known = shard < len(before["rows"]) and seconds > 0
        points[f"rate {shard}"] = (rows - before["rows"][shard]) / seconds if known else None
        points[f"version {shard}"] = after["versions"][shard]
        points[f"lag {shard}"] = after["newest"] - after["versions"][shard]
        points[f"divergence {shard}"] = after["divergences"][shard]
    for name in ("pulls", "queued", "restarts", "mean_return"):
        points[name] = after[name]
    return points


def headline(before: Record, after: Record) -> list[tuple[str, str]]:
    """Return the numbers at the top of the page, by label."""
    seconds = after["seconds"] - before["seconds"]
    rate = (sum(after["rows"]) - sum(before["rows"])) / seconds if seconds > 0 else 0.0
    possible = after["announcements"] * len(after["rows"])
    # A restarted shard gets the newest version, which counts as a pull.
    saved = f", {max(0, 1 - after['pulls'] / possible):.0%} saved" if possible else ""
    mean = after["mean_return"]
    return [
        ("steps", f"{sum(after['rows']):,}"),
        ("steps/s", f"{rate:,.0f}"),
        ("return", "–" if mean is None else f"{mean:.1f}"),
        ("episodes", f"{after['episodes']:,}"),
        ("version", f"{after['newest']:,}"),
        ("pulls", f"{after['pulls']:,}{saved}"),
        ("shards", f"{len(after['rows'])}"),
        ("restarts", f"{after['restarts']:,}"),
    ]


class Telemetry:
    """Publishes statistics on the run's topic, which the page on Dask's dashboard reads."""

    def __init__(self, client: Client, announcer: Announcer) -> None:
        self._client, self._announcer = client, announcer
        self._sent = 0.0
        self.link: str | None = None
        """Where the page is; ``None`` before :meth:`begin`, and if there is none."""

    @property
    def announced_bytes(self) -> int:
        """Bytes of announcements that were sent to worker processes."""
        return self._announcer.sent_bytes

    def begin(self) -> None:
        """Add the page to the dashboard, if there is one and the page is not there.

        The scheduler may have to import what draws it first, which takes a moment.
        """
        try:
            shown = self._client.run_on_scheduler(_add_page)
        except Exception as error:  # its machine may lack something
            logger.info("no page on the dashboard: the scheduler answered %r", error)
        else:
            if shown:
                status = str(self._client.dashboard_link)
                self.link = f"{status.removesuffix('/status')}/clusterenv"

    def due(self, now: float) -> bool:
        """Whether it is time to send statistics, which may be one of five events."""
        period = max(SECONDS, 5 * self._announcer.seconds)
        return self.link is not None and now - self._sent >= period

    def send(self, now: float, stats: Stats) -> None:
        """Publish the statistics, without waiting."""
        self._sent = now
        self._announcer.send(record(stats))


def _add_page(dask_scheduler: Any) -> bool:
    """Add the page to a scheduler's dashboard, if it has one; return whether it is there."""
    applications = dask_scheduler.http_application.applications
    paths = [path for each in applications for path in getattr(each, "app_paths", ())]
    prefix = next((path[: -len("/status")] for path in paths if path.endswith("/status")), None)
    if prefix is None:
        return False
    if f"{prefix}/clusterenv" not in paths:
        # Needs Bokeh, which the head may not have.
        from clusterenv.head.monitor.dashboard import add_page

        add_page(dask_scheduler, prefix)
    return True
