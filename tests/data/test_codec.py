"""Fragments as bytes: nothing is lost, and a description that is invalid is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compare import assert_same
from gymnasium import spaces

from clusterenv.data.codec import ArraySpec, Parts, decode, encode, largest_fragment, nbytes_of
from clusterenv.data.fragment import Fragment
from clusterenv.data.spaces import Layout
from clusterenv.errors import ConnectionClosed


def fragment() -> Fragment:
    """Two environments, three time rows."""
    columns = {
        "obs": np.arange(18, dtype=np.float32).reshape(6, 3),
        "frame": np.arange(24, dtype=np.uint8).reshape(6, 2, 2),
        "text": np.array(["go", "", "links", "über", "go", "x"], object),
        "terminated": np.array([0, 1, 0, 0, 0, 0], np.bool_),
        "env": np.array([4, 5] * 3, np.int32),
        "version": np.full(6, 7, np.int64),
    }
    tail = {name: columns[name][:3] for name in ("obs", "text")}
    state = {"hidden": np.ones((2, 4), np.float32)}
    return Fragment(columns, 2, np.array([1, 4, 5]), tail, state)


@pytest.mark.parametrize("version", [np.full(6, 7), np.array([7, 7, 7, 7, 8, 8])])
def test_a_fragment_is_decoded_as_it_was_encoded(version: np.ndarray) -> None:
    sent = fragment()
    sent = replace(sent, columns={**sent.columns, "version": version})
    parts, arrays = encode(sent)
    body = np.frombuffer(b"".join(bytes(memoryview(a).cast("B")) for a in arrays), np.uint8)
    assert len(body) == nbytes_of(parts)
    columns, tail, state = decode(body, parts)
    assert_same(columns, sent.columns)
    assert_same(tail, {"": sent.tail_rows, **sent.tail})
    assert_same(state, sent.state)


def test_values_that_repeat_are_sent_once() -> None:
    rows = {spec.name: spec.rows for spec in encode(fragment())[0].columns}
    assert (rows["obs"], rows["env"], rows["version"]) == (6, 2, 1)


def parts(**changes: object) -> Parts:
    whole = ArraySpec("obs", "<f4", (6, 3), 6)
    once = ArraySpec("env", "<i4", (6,), 2)
    tail = ArraySpec("", "<i8", (2,), 2)
    return Parts([whole._replace(**changes), once], [tail], [])


def test_the_size_is_that_of_the_arrays_that_are_sent() -> None:
    assert nbytes_of(parts()) == 6 * 3 * 4 + 2 * 4 + 2 * 8


@pytest.mark.parametrize(
    "changes",
    [{"rows": -1}, {"rows": 7}, {"rows": 4}, {"shape": (6, -3)}, {"shape": (-6, 3)}],
)
def test_arrays_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConnectionClosed, match="column 'obs' cannot have"):
        nbytes_of(parts(**changes))


def test_a_fragment_is_bounded_by_its_rows_and_spaces() -> None:
    obs = Layout(spaces.Box(0, 255, (84, 84, 4), np.uint8))
    action = Layout(spaces.Discrete(4))
    frame = 84 * 84 * 4
    assert 2 * frame < largest_fragment(1, obs, action, extras=0) < 2 * frame + 200
    assert largest_fragment(10, obs, action, extras=7) == 10 * (
        largest_fragment(1, obs, action, extras=0) + 7
    )
