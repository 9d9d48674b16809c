"""The message of an announcement: its size, its format, and what cannot be read."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest

from clusterenv.errors import ConfigError
from clusterenv.sync.announcement import (
    FORMAT,
    MESSAGE_LIMIT,
    Announcement,
    check_scalars,
    event_seconds,
    finite_scalars,
    from_message,
    to_message,
)

ANNOUNCED = Announcement(
    version=7,
    divergences={3: 0.25, 5: math.inf},
    scalars={"epsilon": 0.1},
    same_since=6,
    digest=2**32 - 1,
    run="lander-1",
    time=1.5,
    rows=2048,
    pulls=3,
    lag=0.5,
    mean_return=None,
)


def travelled(announcement: Announcement) -> Any:
    """What arrives of a message: msgpack has no tuples."""
    return msgpack.unpackb(msgpack.packb(to_message(announcement)))


def test_a_message_arrives_as_it_was_sent() -> None:
    assert from_message(travelled(ANNOUNCED)) == ANNOUNCED


def test_a_message_has_at_most_4_kb_whatever_the_number_of_shards() -> None:
    names = [f"{number:02d}" + 22 * "x" for number in range(46)]
    scalars = dict.fromkeys(names, 0.1)
    check_scalars(scalars)
    many = {version: version / 1000 for version in range(2**30, 2**30 + 10_000)}
    large = ANNOUNCED._replace(
        version=2**30 + 10_000, divergences=many, scalars=scalars, run=200 * "r", rows=2**50
    )
    packed = msgpack.packb(to_message(large))
    assert 3000 < len(packed) <= MESSAGE_LIMIT
    kept = from_message(msgpack.unpackb(packed)).divergences
    assert min(kept) == 2**30 + 9_900  # those that diverged most
    with pytest.raises(ConfigError, match=r"47 scalars take 1,5.. bytes .*register_buffer"):
        check_scalars({**scalars, 24 * "y": 0.1})


@pytest.mark.parametrize("value", ["high", None, True, math.nan, -math.inf, 10**400])
def test_a_scalar_that_is_no_finite_number_is_named(value: Any) -> None:
    right = r"scalars are finite numbers, publish\(policy, version, epsilon=0\.1\)"
    with pytest.raises(ConfigError, match=rf"publish\(epsilon=.*\): {right}"):
        finite_scalars({"decay": 0.5, "epsilon": value}, "publish(policy, version")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": FORMAT + 1}, f"format {FORMAT + 1}, and this ClusterEnv reads up to {FORMAT}"),
        ({"divergences": 3}, "is no announcement"),
        ({"divergences": [[1]]}, "is no announcement"),
        ({"format": "new"}, "is no announcement"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_message({**to_message(ANNOUNCED), **change})


def test_a_message_that_lacks_a_field_is_refused() -> None:
    message = to_message(ANNOUNCED)
    del message["digest"]
    with pytest.raises(ConfigError, match="is no announcement"):
        from_message(message)


def test_more_subscribers_get_fewer_events() -> None:
    assert event_seconds(64, 0.05) == pytest.approx(32 * event_seconds(2, 0.05))
    assert event_seconds(2, 0.1) == pytest.approx(event_seconds(2, 0.05) / 2)
    assert event_seconds(0, 0.05) > 0
