"""``follow``: the announcements of a run, in any process with a client of its cluster."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping
from typing import Any

from distributed import Client

from clusterenv import config
from clusterenv.data.checks import check_instance
from clusterenv.errors import ConfigError, SchedulerLost
from clusterenv.head.monitor.runs import RunEntry, is_connected, running
from clusterenv.sync.announcement import Announcement, from_message
from clusterenv.sync.topics import subscribe

__all__ = ["follow"]

_LOOK_SECONDS = 2.0  # between looks whether the run's head is connected


def follow(client: Client, run: str | int | None = None) -> Iterator[Announcement]:
    """Iterate over the announcements of a run, beginning with its newest.

    It ends with the run. Where the head publishes faster than ``clusterenv.publish.share``
    allows, some versions are not announced. Another process, on any machine with access to the
    cluster, may follow a run; it costs the run nothing but the events.

    Parameters
    ----------
    client
        A Dask client of the cluster that the run is on.
    run
        Its name (``Collector.name``) or its number (``Collector.run``); by default the only one.

    Raises
    ------
    ConfigError
        At once, if there is no such run, or none was named and there are several; the message
        lists them. Later, if an announcement was written by a newer ClusterEnv.
    SchedulerLost
        If the scheduler is gone for ``clusterenv.timeout.scheduler``.

    Examples
    --------
    >>> import clusterenv, torch
    >>> policy = clusterenv.policies.Categorical(torch.nn.Linear(4, 2))
    >>> options = {"num_envs": 2, "horizon": 8, "shards": 1, "name": "example"}
    >>> with clusterenv.connect("local", n_workers=1) as client:
    ...     with clusterenv.Collector("CartPole-v1", policy, cluster=client, **options):
    ...         newest = next(clusterenv.follow(client, "example"))
    >>> newest.version, newest.run
    (0, 'example')
    """
    check_instance("client", client, Client, "follow(clusterenv.connect('tcp://scheduler:8786'))")
    return _announcements(client, _find(running(client), run))


def _find(runs: list[RunEntry], wanted: str | int | None) -> RunEntry:
    named = [each for each in runs if each.run == str(wanted)]
    found = named or [each for each in runs if wanted is None or str(each.number) == str(wanted)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{each.run!r} ({each.title})" for each in runs) or "none"
    asked = "no run was named" if wanted is None else f"there is no run {wanted!r}"
    right = f"follow(client, {runs[-1].run!r})" if runs else "begin one first: Collector(...)"
    raise ConfigError(f"{asked}; the runs on this cluster: {there}: {right}")


def _announcements(client: Client, entry: RunEntry) -> Iterator[Announcement]:
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # First subscribe, then read: what is published meanwhile comes twice, and is not missed.
    unsubscribe = subscribe(client, entry.topic, arrived.put)
    try:
        messages = _logged(client, entry)
        ended, seen = False, -1
        while True:
            for message in messages:
                ended = ended or _kind(message) == "end"
                if _kind(message) == "version":
                    announcement = from_message(message)
                    if announcement.version > seen:
                        seen = announcement.version
                        yield announcement
            if ended:
                return
            try:
                messages = [arrived.get(timeout=_LOOK_SECONDS)]
            except queue.Empty:
                ended = not _goes_on(client, entry)
                # What was published before the scheduler knew of the subscription is in its log.
                messages = _logged(client, entry)
    finally:
        unsubscribe()


def _logged(client: Client, entry: RunEntry) -> list[Any]:
    """Return the newest version that the scheduler has kept, and the end if there is one."""
    messages = [message for _, message in client.get_events(entry.topic)]
    versions = [message for message in messages if _kind(message) == "version"]
    return versions[-1:] + [message for message in messages if _kind(message) == "end"]


def _kind(message: Any) -> Any:
    return message.get("kind") if isinstance(message, Mapping) else None


def _goes_on(client: Client, entry: RunEntry) -> bool:
    """Whether the run's head is connected; waits for a scheduler that cannot be reached."""
    timeout = config.seconds("timeout.scheduler")
    deadline = time.monotonic() + timeout
    while client.status != "running":
        if time.monotonic() > deadline or client.status in ("closed", "closing"):
            raise SchedulerLost(f"the scheduler has been gone for {timeout:g} s")
        time.sleep(0.1)
    return is_connected(client.get_events(entry.client))
