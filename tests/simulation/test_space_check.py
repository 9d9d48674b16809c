from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from clusterenv.data.spaces import Layout
from clusterenv.simulation.engines.base import Slot
from clusterenv.simulation.space_check import SpaceBroken, SpaceCheck

SPACE = gym.spaces.Dict(
    speed=gym.spaces.Box(-1, 1, (2,), np.float32), camera=gym.spaces.Box(0, 9, (2, 2), np.uint8)
)


def slot(n: int = 3) -> Slot:
    made = Slot.empty(Layout(SPACE), n)
    for column in made.obs:
        column[:] = 0
    return made


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_found_where_they_are(value: float) -> None:
    check, given = SpaceCheck(SPACE, bounds=False), slot()
    assert check.passes(given)
    names = [leaf.name("obs") for leaf in Layout(SPACE).leaves]
    given.obs[names.index("obs.speed")][2, 1] = value
    assert not check.passes(given)
    (row, fault), *rest = check.faults(given).items()
    assert (row, rest) == (2, [])
    assert "obs.speed is not finite" in str(fault)
    given = slot()
    given.reward[1] = value
    assert not check.passes(given)
    assert "the reward is" in str(check.faults(given)[1])


def test_a_large_sum_of_good_numbers_is_no_fault() -> None:
    space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    given = Slot.empty(Layout(space), 2)
    given.obs[0][:] = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        assert SpaceCheck(space, bounds=True).passes(given)


def test_bounds_are_a_choice() -> None:
    given = slot()
    names = [leaf.name("obs") for leaf in Layout(SPACE).leaves]
    given.obs[names.index("obs.camera")][0, 0, 0] = 10
    given.obs[names.index("obs.speed")][1, 0] = 1.5
    assert SpaceCheck(SPACE, bounds=False).passes(given)
    strict = SpaceCheck(SPACE, bounds=True)
    assert not strict.passes(given)
    assert {0, 1} == set(strict.faults(given))
    with pytest.raises(SpaceBroken, match="out of bounds"):
        strict.check_value([column[1:2] for column in given.obs])
    strict.check_value([column[2:3] for column in given.obs])
