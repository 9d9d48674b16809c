"""Action masks: understood in whatever form they come, or refused, and never passed over."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from clusterenv.data.infos import pack
from clusterenv.policies import Categorical, Random
from clusterenv.simulation.decisions import ActionCheck, Location, PolicyFault
from clusterenv.simulation.engines import build
from clusterenv.simulation.engines.base import Recipe
from clusterenv.simulation.env_faults import EnvFaults
from clusterenv.simulation.loop import EnvLoop
from clusterenv.simulation.masks import InfoMask
from clusterenv.simulation.policy_runner import Acting

FORMS = {
    "list": [1, 0, 0],
    "tuple": (True, False, False),
    "float": np.array([1.0, 0.0, 0.0]),
    "int8": np.array([1, 0, 0], np.int8),
}


WHERE = Location(range(2))


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_may_be_a_list_a_tuple_or_an_array_of_any_numbers(form: str) -> None:
    mask = InfoMask(3)
    mask.update(pack([(0, {"action_mask": FORMS[form]}), (2, {"action_mask": FORMS[form]})]))
    assert mask.value is not None
    assert mask.value.tolist() == [[True, False, False], [True] * 3, [True, False, False]]


def test_masks_of_mixed_dtypes_are_understood() -> None:
    mask = InfoMask(2)
    forms = [np.array([1, 0], np.int8), np.array([False, True])]
    mask.update(pack([(row, {"action_mask": form}) for row, form in enumerate(forms)]))
    assert mask.value is not None
    assert mask.value.tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize("given", ["left", [[1, 0], [1, 0, 0]], [1, 0], 3.0])
def test_what_is_no_mask_is_refused(given: Any) -> None:
    values = given if isinstance(given, list) else [given, given]
    mask = InfoMask(2)
    mask.update(pack([(row, {"action_mask": value}) for row, value in enumerate(values)]))
    with pytest.raises(PolicyFault, match=r"info\['action_mask'\] cannot be read as a mask"):
        _ = mask.value


@pytest.mark.parametrize(("action", "allowed"), [((0, 1), True), ((0, 0), False), ((2, 1), False)])
def test_a_mask_of_several_choices_allows_each_by_itself(
    action: tuple[int, int], allowed: bool
) -> None:
    check = ActionCheck(spaces.MultiDiscrete([3, 2]), 2)
    mask = torch.tensor([[1, 0, 0, 0, 1]] * 2, dtype=torch.bool)
    check.check_mask(mask, WHERE)
    chosen = torch.tensor([[0, 1], action])
    if allowed:
        assert check(chosen, mask, WHERE).tolist() == chosen.tolist()
    else:
        with pytest.raises(PolicyFault, match=r"for environment 1 at .*, which its mask forbids"):
            check(chosen, mask, WHERE)


def test_choices_that_begin_elsewhere_have_masks_that_begin_at_the_first() -> None:
    check = ActionCheck(spaces.Discrete(3, start=5), 1)
    mask = torch.tensor([[False, True, False]])
    assert check(torch.tensor([6]), mask, WHERE).tolist() == [6]
    with pytest.raises(PolicyFault, match="which its mask forbids"):
        check(torch.tensor([5]), mask, WHERE)


@pytest.mark.parametrize(
    ("space", "mask", "message"),
    [
        (spaces.Discrete(3), [[1, 0]], r"shape \(2,\).*Discrete\(3\) needs 3 entries"),
        (spaces.Discrete(2), [[0, 0]], "allows no action to environment 0"),
        (spaces.MultiDiscrete([2, 2]), [[1, 0, 0, 0]], "allows no action to environment 0"),
        (spaces.Box(0, 1, (2,)), [[1, 0]], "needs no mask"),
    ],
)
def test_a_mask_that_does_not_fit_is_named(
    space: gym.Space[Any], mask: list[list[int]], message: str
) -> None:
    with pytest.raises(PolicyFault, match=message):
        ActionCheck(space, 1).check_mask(torch.tensor(mask, dtype=torch.bool), WHERE)


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3, start=5), spaces.MultiDiscrete([3, 2], start=[1, 4])]
)
def test_random_keeps_to_masks_of_any_choices(space: Any) -> None:
    class Choosy(gym.Env[Any, Any]):
        observation_space = spaces.Box(0, 1, (1,))
        action_space = space

        def info(self) -> dict[str, Any]:
            forms = [1, 0, 0] if isinstance(space, spaces.Discrete) else [0, 0, 1, 1, 0]
            return {"action_mask": forms}

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(1, np.float32), self.info()

        def step(self, action: Any) -> Any:
            return np.zeros(1, np.float32), 0.0, False, False, self.info()

    loop = EnvLoop(build(Recipe(Choosy), 0, 3), Random(space), 0, 8, [None] * 3)
    actions = loop.fragment(Acting(0, {})).columns["action"]
    only = 5 if isinstance(space, spaces.Discrete) else [3, 4]
    assert (actions == only).all()


def test_masks_that_begin_with_a_step_are_refused() -> None:
    """Some batches would have a column that others have not."""

    class Late(gym.Env[Any, Any]):
        observation_space = spaces.Box(0, 1, (1,))
        action_space = spaces.Discrete(3)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.t = 0
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            info = {"action_mask": [0, 1, 0]} if self.t >= 3 else {}
            return np.zeros(1, np.float32), 0.0, False, False, info

    policy = Categorical(torch.nn.Linear(1, 3))
    loop = EnvLoop(build(Recipe(Late), 0, 2), policy, 0, 6, [None] * 2)
    with pytest.raises(PolicyFault, match=r"came with a step.* the first mask with reset\(\)"):
        loop.fragment(Acting(0, {}))


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_a_mask_does_not_outlive_its_episode(mode: AutoresetMode) -> None:
    """Who gives none with a later reset forbids nothing."""

    class Sometimes(gym.Env[Any, Any]):
        observation_space = spaces.Box(0, 1, (1,))
        action_space = spaces.Discrete(3)
        episodes = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.t, self.episodes = 0, self.episodes + 1
            return np.zeros(1, np.float32), {"action_mask": [0, 1, 0]} if self.episodes == 1 else {}

        def step(self, action: Any) -> Any:
            self.t += 1
            info = {"action_mask": [0, 1, 0]} if self.t >= 2 else {}
            return np.zeros(1, np.float32), 0.0, self.t == 4, False, info

    recipe = Recipe(Sometimes, autoreset_mode=mode)
    loop = EnvLoop(build(recipe, 0, 2), Categorical(torch.nn.Linear(1, 3)), 0, 12, [None] * 2)
    columns = loop.fragment(Acting(0, {})).columns
    forbids = (columns["episode"] == 0) | (columns["step"] >= 2)
    assert columns["action_mask"][~forbids].all()
    assert (columns["action_mask"][forbids] == [False, True, False]).all()
    assert forbids.mean() == 4 / 6


def test_a_mask_does_not_outlive_an_environment_that_is_rebuilt() -> None:
    class Fragile(gym.Env[Any, Any]):
        observation_space = spaces.Box(0, 1, (1,))
        action_space = spaces.Discrete(3)
        made = 0

        def __init__(self) -> None:
            Fragile.made += 1
            self.number, self.t = Fragile.made, 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(1, np.float32), {"action_mask": [0, 1, 0]} if self.number <= 2 else {}

        def step(self, action: Any) -> Any:
            self.t += 1
            if self.number == 1 and self.t == 4:
                raise ValueError("diverged")
            return np.zeros(1, np.float32), 0.0, False, False, {}

    policy = Categorical(torch.nn.Linear(1, 3))
    engine = build(Recipe(Fragile, autoreset_mode=AutoresetMode.SAME_STEP), 0, 2)
    loop = EnvLoop(engine, policy, 0, 8, [None] * 2, EnvFaults())
    mask = loop.fragment(Acting(0, {})).columns["action_mask"].reshape(8, 2, 3)
    assert (mask[:3, 0] == [False, True, False]).all()
    assert mask[4:, 0].all()  # the step that failed is chosen again by the rebuilt one
    assert (mask[:, 1] == [False, True, False]).all()
