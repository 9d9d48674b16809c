"""What a fragment's frame may say of its arrays."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from clusterenv.data.codec import ColumnSpec, Parts, largest_fragment, nbytes_of
from clusterenv.data.spaces import Layout
from clusterenv.errors import ConnectionClosed


def parts(**changes: object) -> Parts:
    whole = ColumnSpec("obs", "<f4", (6, 3), 6)
    once = ColumnSpec("env", "<i4", (6,), 2)
    tail = ColumnSpec("", "<i8", (2,), 2)
    return Parts([whole._replace(**changes), once], [tail], [])


def test_the_size_is_that_of_the_arrays_that_travel() -> None:
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
