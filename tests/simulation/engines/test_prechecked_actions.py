"""Only the very action that was checked before skips the check of the action space."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Discrete

from clusterenv.simulation.engines.base import skip_action_checks


class Requests(gym.Env[int, int]):
    observation_space = Discrete(2)
    action_space = Discrete(2)

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        allowed = [self.action_space.contains(x) for x in (action, np.int64(7), np.int64(1))]
        return 0, 0.0, False, False, {"allowed": allowed, "in": action in self.action_space}


class Property(Requests):
    @property
    def action_space(self) -> Discrete:  # type: ignore[override]
        return Discrete(2)


def test_the_checked_action_alone_is_not_asked_about() -> None:
    env = Requests()
    wrapped = gym.wrappers.TimeLimit(env, 5)
    outside = np.int64(9)
    prechecked = skip_action_checks(wrapped)
    prechecked.checked = outside
    assert env.step(outside)[-1] == {"allowed": [True, False, True], "in": True}
    assert env.step(np.int64(9))[-1]["allowed"] == [False, False, True]  # equal, but not it


def test_other_environments_of_the_class_and_the_first_space_are_as_before() -> None:
    env = Requests()
    prechecked = skip_action_checks(env)
    prechecked.checked = outside = np.int64(9)
    assert not Requests().step(outside)[-1]["allowed"][0]
    assert not Requests.action_space.contains(outside)
    assert env.action_space == Requests.action_space


def test_an_environment_with_prechecked_actions_can_be_copied_and_pickled() -> None:
    env = Requests()
    skip_action_checks(env).checked = np.int64(9)
    for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert other.step(np.int64(9))[-1]["allowed"] == [False, False, True]


class Wider(gym.ActionWrapper[int, int, int]):
    """Has a space of its own, and passes on what is in it."""

    action_space = Discrete(12)

    def action(self, action: int) -> int:
        return action


class Spaceless(Requests):
    """Has no space of its own."""

    def __getattribute__(self, name: str) -> Any:
        if name == "action_space":
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_what_a_wrappers_space_contains_is_not_in_the_environments() -> None:
    env = Wider(Requests())
    skip_action_checks(env).checked = outside = np.int64(9)
    assert env.step(outside)[-1]["allowed"] == [False, False, True]
    skip_action_checks(Wider(Spaceless()))  # that it does not raise is all


@pytest.mark.parametrize("action", [1, 9])
def test_a_space_that_cannot_be_replaced_looks_for_itself(action: int) -> None:
    env = Property()
    skip_action_checks(env).checked = given = np.int64(action)
    assert env.step(given)[-1]["allowed"] == [action == 1, False, True]
