"""What the head announces about a policy version, and its message on the run's Dask topic."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from clusterenv.data.checks import is_number
from clusterenv.errors import ConfigError, shown

__all__ = [
    "FORMAT",
    "MESSAGE_LIMIT",
    "Announcement",
    "check_scalars",
    "event_seconds",
    "finite_scalars",
    "from_message",
    "to_message",
    "topic_of",
]

FORMAT = 1
"""Of the messages on a run's topic; a reader refuses newer ones."""
MESSAGE_LIMIT = 4096
"""Most bytes of an announcement, whatever the number of shards."""
_MOST_DIVERGENCES = 100  # 15 bytes each
_SCALAR_BYTES = 1536  # of the names, and 9 for each value
_SUBSCRIBER_SECONDS = 0.00045  # of scheduler CPU to send an event to one subscriber


class Announcement(NamedTuple):
    """What the head publishes about a version: everything but the weights.

    :func:`clusterenv.follow` yields them.
    """

    version: int
    divergences: Mapping[int, float]
    """From each version in use to this one; from the 100 that diverged most, if there are more."""
    scalars: Mapping[str, float]
    """Published with the version, or with one before."""
    same_since: int
    """The first version with the same weights; a worker that has it need not pull."""
    digest: int = 0
    """CRC-32 of the weights."""
    run: str = ""
    """Name of the run."""
    time: float = 0.0
    """When it was published, in seconds since 1970."""
    rows: int = 0
    """Received by the head until then, as are the following."""
    pulls: int = 0
    """Of weights, by all shards together."""
    lag: float = 0.0
    """Versions behind the newest, mean over all fragments."""
    mean_return: float | None = None
    """Of the last 100 finished episodes; ``None`` before the first ends."""

    def told_to(self, version: int | None) -> tuple[Any, ...]:
        """Return what a shard with this version must know, as the first fields.

        >>> Announcement(7, {3: 0.1, 5: 0.2}, {}, 7, digest=9).told_to(5)
        (7, {5: 0.2}, {}, 7)
        """
        divergence = None if version is None else self.divergences.get(version)
        known = {} if divergence is None else {version: divergence}
        return self.version, known, self.scalars, self.same_since


def topic_of(number: int | str) -> str:
    """Return the topic of a run, by the number that rows have in the column ``run``.

    >>> topic_of(42)
    'clusterenv.run.42'
    """
    return f"clusterenv.run.{number}"


def event_seconds(subscribers: int, share: float) -> float:
    """Return the least time between two events, so that the scheduler spends a share of a core.

    >>> round(1 / event_seconds(2, 0.05)), round(1 / event_seconds(64, 0.05), 1)
    (56, 1.7)
    """
    return _SUBSCRIBER_SECONDS * max(1, subscribers) / share


def to_message(announcement: Announcement) -> dict[str, Any]:
    """Return an announcement as an event: the fields by name, ``kind`` and ``format``."""
    worst = heapq.nlargest(
        _MOST_DIVERGENCES, announcement.divergences.items(), key=lambda pair: pair[1]
    )
    return {
        "kind": "version",
        "format": FORMAT,
        **announcement._asdict(),
        "divergences": worst,
        "scalars": dict(announcement.scalars),
    }


def from_message(message: Mapping[str, Any]) -> Announcement:
    """Return the announcement of an event; raise ``ConfigError`` if it cannot be read."""
    try:
        if int(message["format"]) <= FORMAT:
            fields = {name: message[name] for name in Announcement._fields}
            divergences = {int(version): float(value) for version, value in fields["divergences"]}
            return Announcement(**{**fields, "divergences": divergences})
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{shown(message)} is no announcement of ClusterEnv") from error
    raise ConfigError(
        f"an announcement has format {message['format']}, and this ClusterEnv reads up to "
        f"{FORMAT}: the run's head has a newer one. Install the same version here: "
        "pip install --upgrade clusterenv"
    )


def finite_scalars(scalars: Mapping[str, Any], right: str) -> dict[str, float]:
    """Return the scalars of ``publish()`` as floats; raise ``ConfigError`` if one is not finite.

    ``right`` is what comes before the scalars in a right call.

    Examples
    --------
    >>> finite_scalars({"epsilon": 1}, "publish(policy")
    {'epsilon': 1.0}
    """
    for name, value in scalars.items():
        if not is_number(value) or not math.isfinite(value):
            raise ConfigError(
                f"publish({name}={shown(value)}): scalars are finite numbers, {right}, {name}=0.1)"
            )
    return {name: float(value) for name, value in scalars.items()}


def check_scalars(scalars: Mapping[str, float]) -> None:
    """Raise ``ConfigError`` if scalars are too large for an announcement."""
    nbytes = sum(len(name.encode()) + 9 for name in scalars)
    if nbytes > _SCALAR_BYTES:
        raise ConfigError(
            f"{len(scalars)} scalars take {nbytes:,} bytes of an announcement, of {_SCALAR_BYTES:,}"
            " allowed; publish arrays as buffers of the policy: "
            "policy.register_buffer('schedule', values)"
        )
