"""Action masks: understood in whatever form they come, or refused, and never passed over."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from clusterenv.env_loop import Acting, EnvLoop
from clusterenv.env_loop.actions import ActionCheck
from clusterenv.env_loop.faults import PolicyFault
from clusterenv.env_loop.masks import InfoMask
from clusterenv.envs import build
from clusterenv.envs.base import Recipe
from clusterenv.infos import pack
from clusterenv.policies import Categorical, Random

FORMS = {
    "list": [1, 0, 0],
    "tuple": (True, False, False),
    "float": np.array([1.0, 0.0, 0.0]),
    "int8": np.array([1, 0, 0], np.int8),
}


def name(row: int) -> str:
    return f"environment {row}"


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_may_be_a_list_a_tuple_or_an_array_of_any_numbers(form: str) -> None:
    mask = InfoMask(3)
    mask.note(pack([(0, {"action_mask": FORMS[form]}), (2, {"action_mask": FORMS[form]})]))
    assert mask.value is not None
    assert mask.value.tolist() == [[True, False, False], [True] * 3, [True, False, False]]


def test_masks_of_mixed_dtypes_are_understood() -> None:
    mask = InfoMask(2)
    forms = [np.array([1, 0], np.int8), np.array([False, True])]
    mask.note(pack([(row, {"action_mask": form}) for row, form in enumerate(forms)]))
    assert mask.value is not None
    assert mask.value.tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize("given", ["left", [[1, 0], [1, 0, 0]], [1, 0], 3.0])
def test_what_is_no_mask_is_refused_by_whoever_asks_for_it(given: Any) -> None:
    values = given if isinstance(given, list) else [given, given]
    mask = InfoMask(2)
    mask.note(pack([(row, {"action_mask": value}) for row, value in enumerate(values)]))
    with pytest.raises(PolicyFault, match=r"info\['action_mask'\] cannot be read as a mask"):
        _ = mask.value


@pytest.mark.parametrize(("action", "allowed"), [((0, 1), True), ((0, 0), False), ((2, 1), False)])
def test_a_mask_of_several_choices_allows_each_by_itself(
    action: tuple[int, int], allowed: bool
) -> None:
    check = ActionCheck(spaces.MultiDiscrete([3, 2]), 2)
    mask = torch.tensor([[1, 0, 0, 0, 1]] * 2, dtype=torch.bool)
    check.check_mask(mask, name)
    chosen = torch.tensor([[0, 1], action])
    if allowed:
        assert check(chosen, mask, name).tolist() == chosen.tolist()
    else:
        with pytest.raises(PolicyFault, match="for environment 1, which its mask forbids"):
            check(chosen, mask, name)


def test_choices_that_begin_elsewhere_have_masks_that_begin_at_the_first() -> None:
    check = ActionCheck(spaces.Discrete(3, start=5), 1)
    mask = torch.tensor([[False, True, False]])
    assert check(torch.tensor([6]), mask, name).tolist() == [6]
    with pytest.raises(PolicyFault, match="which its mask forbids"):
        check(torch.tensor([5]), mask, name)


@pytest.mark.parametrize(
    ("space", "mask", "message"),
    [
        (spaces.Discrete(3), [[1, 0]], r"shape \(2,\).*Discrete\(3\) needs 3 entries"),
        (spaces.Discrete(2), [[0, 0]], "allows nothing to environment 0"),
        (spaces.MultiDiscrete([2, 2]), [[1, 0, 0, 0]], "allows nothing to environment 0"),
        (spaces.Box(0, 1, (2,)), [[1, 0]], "needs no mask"),
    ],
)
def test_a_mask_that_does_not_fit_is_named(
    space: gym.Space[Any], mask: list[list[int]], message: str
) -> None:
    with pytest.raises(PolicyFault, match=message):
        ActionCheck(space, 1).check_mask(torch.tensor(mask, dtype=torch.bool), name)


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


def test_rows_before_the_first_mask_say_that_all_was_allowed() -> None:
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
    mask = loop.fragment(Acting(0, {})).columns["action_mask"].reshape(6, 2, 3)
    assert mask[:3].all()
    assert mask[3:].tolist() == [[[False, True, False]] * 2] * 3
