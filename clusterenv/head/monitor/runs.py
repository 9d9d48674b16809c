"""The runs of a cluster: a topic on which each collector says that it begins and ends."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from distributed import Client

from clusterenv.errors import ConfigError, shown
from clusterenv.sync.announcement import topic_of

__all__ = ["RUNS", "RunEntry", "check_name", "fold", "is_connected", "register", "running"]

RUNS = "clusterenv.runs"
"""The topic of all runs; the scheduler keeps its last events."""
_LONGEST_NAME = 200


class RunEntry(NamedTuple):
    """One run, as its head has announced it."""

    run: str
    """Its name."""
    number: int
    """As in the rows' column ``run``."""
    title: str
    """Of its environment."""
    client: str
    """Id of the head's Dask client."""
    time: float
    """When it began, in seconds since 1970."""

    @property
    def topic(self) -> str:
        """The topic of its versions."""
        return topic_of(self.number)


def fold(events: Iterable[Mapping[str, Any]]) -> list[RunEntry]:
    """Return the runs that have begun and not ended, oldest first.

    >>> begun = RunEntry("a", 1, "CartPole-v1", "Client-1", 0.0)._asdict()
    >>> [entry.run for entry in fold([{**begun, "state": "begun"}])]
    ['a']
    >>> fold([{**begun, "state": "begun"}, {"number": 1, "state": "ended"}])
    []
    """
    entries: dict[int, RunEntry] = {}
    for event in events:
        if event["state"] == "begun":
            entry = RunEntry(*(event[name] for name in RunEntry._fields))
            entries[entry.number] = entry
        else:
            entries.pop(event["number"], None)
    return list(entries.values())


def running(client: Client) -> list[RunEntry]:
    """Return the runs whose heads are connected to the cluster, oldest first.

    A head that was killed says nothing; the scheduler notices that its client is gone.
    """
    begun = fold(message for _, message in client.get_events(RUNS))
    return [entry for entry in begun if is_connected(client.get_events(entry.client))]


def is_connected(events: Iterable[tuple[float, Mapping[str, Any]]]) -> bool:
    """Whether a client is connected, by the scheduler's events about it.

    The scheduler keeps the last ones, so that the first, that it was added, may be missing. It
    forgets all of them a while after the client was removed.

    >>> is_connected([(0.0, {"action": "update-graph"})]), is_connected([])
    (True, False)
    """
    actions = [message.get("action") for _, message in events if isinstance(message, Mapping)]
    seen = [action for action in actions if action in ("add-client", "remove-client")]
    return bool(actions) and seen[-1:] != ["remove-client"]


def check_name(name: str | None) -> None:
    """Raise ``ConfigError`` unless this can name a run; ``None`` is for a name of its own."""
    if name is None:
        return
    fits = isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= _LONGEST_NAME
    if not fits:
        raise ConfigError(
            f"name={shown(name)} must be printable text of 1 to {_LONGEST_NAME} bytes, which "
            "names the run for those who follow it: Collector(..., name='lander-1')"
        )


def register(client: Client, name: str | None, number: int, title: str) -> RunEntry:
    """Announce that a run begins; raise ``ConfigError`` if another one has its name.

    Names that were not given are unique by the run's number.
    """
    entry = RunEntry(name or f"{title}-{number}", number, title, client.id, time.time())
    if name is not None:
        _check_free(client, entry)
    client.log_event(RUNS, {**entry._asdict(), "state": "begun"})
    if name is not None:  # of two that begin at once, the scheduler's order decides
        try:
            _check_free(client, entry)
        except ConfigError:
            client.log_event(RUNS, {"number": number, "state": "ended"})
            raise
    return entry


def _check_free(client: Client, entry: RunEntry) -> None:
    first = next((each for each in running(client) if each.run == entry.run), entry)
    if first.number != entry.number:
        began = time.strftime("%H:%M:%S", time.localtime(first.time))
        raise ConfigError(
            f"name={entry.run!r} is that of a run on {first.title} which began at {began} on this "
            f"cluster and goes on; choose another: Collector(..., name={entry.run + '-2'!r})"
        )
