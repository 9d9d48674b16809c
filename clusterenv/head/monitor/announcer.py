"""Publishes a run's versions and statistics on its Dask topic."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from distributed import Client
from distributed.protocol import dumps

from clusterenv import config
from clusterenv.head.monitor.runs import RUNS, RunEntry
from clusterenv.sync.announcement import Announcement, event_seconds, to_message

__all__ = ["Announcer"]

logger = logging.getLogger("clusterenv")

_CLOSE_SECONDS = 2.0


class Announcer:
    """Sends events from the client's event loop, so that no caller waits for the scheduler.

    ``subscribers`` returns how many worker processes get each event. Events are so far apart
    that the scheduler spends at most ``clusterenv.publish.share`` of a core on them. An event
    that could not be sent yet is replaced by a newer one of its kind.
    """

    def __init__(self, client: Client, entry: RunEntry, subscribers: Callable[[], int]) -> None:
        self._client = client
        self.entry = entry
        self._subscribers = subscribers
        self._share = config.get("publish.share")
        self._lock = threading.Lock()
        self._pending: dict[str, dict[str, Any]] = {}  # by kind
        self._sending = False
        self._closed = False
        self.sent_bytes = 0
        """Of announcements, to all worker processes together."""

    def announce(self, announcement: Announcement) -> None:
        """Publish a version soon, unless a newer one replaces it; does not wait."""
        if self._share:
            self.send(to_message(announcement._replace(run=self.entry.run)))

    def send(self, message: dict[str, Any]) -> None:
        """Publish a message soon, unless a newer one of its kind replaces it; does not wait."""
        with self._lock:
            self._pending[message["kind"]] = message
        # Also while messages are sent: the event loop may just have found no other.
        self._client.loop.add_callback(self._send_pending)

    @property
    def seconds(self) -> float:
        """The least time between two events."""
        return event_seconds(self._subscribers(), self._share or 1.0)

    def _next(self) -> dict[str, Any] | None:
        """Return the message to send next: a version first."""
        with self._lock:
            kind = "version" if "version" in self._pending else next(iter(self._pending), None)
            return None if kind is None or self._closed else self._pending.pop(kind)

    async def _send_pending(self) -> None:
        if self._sending:
            return
        self._sending = True
        try:
            while (message := self._next()) is not None:
                await self._client.scheduler.log_event(topic=self.entry.topic, msg=message)
                if message["kind"] == "version":
                    nbytes = sum(len(frame) for frame in dumps(message))
                    self.sent_bytes += nbytes * self._subscribers()
                await asyncio.sleep(self.seconds)
        except Exception as error:  # credits tell of versions too; others notice a lost scheduler
            logger.debug("an event of run %s was not published: %s", self.entry.run, error)
        finally:
            self._sending = False

    def close(self) -> None:
        """Tell those who follow that the run has ended, if the scheduler is there."""
        self._closed = True
        if self._client.status != "running":
            return
        try:
            self._client.sync(self._end, callback_timeout=_CLOSE_SECONDS)
        except Exception as error:  # followers notice that the client is gone
            logger.debug("the end of run %s was not published: %s", self.entry.run, error)

    async def _end(self) -> None:
        log_event = self._client.scheduler.log_event
        with self._lock:
            last = self._pending.pop("version", None)
        if last is not None:
            await log_event(topic=self.entry.topic, msg=last)
        await log_event(topic=self.entry.topic, msg={"kind": "end"})
        await log_event(topic=RUNS, msg={"number": self.entry.number, "state": "ended"})
