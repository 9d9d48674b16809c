"""Sparing environments a second look at actions that were looked at before."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import gymnasium as gym

__all__ = ["Trust", "trust"]


class Trust:
    """Answers in place of an action space whether it contains something.

    Most environments ask that of every action, and for CartPole the answer takes a tenth of
    the time of a step. Here it is yes for the very object in :attr:`checked`, and for anything
    else what the space says.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self._space = space
        self.checked: Any = None
        """The action that was looked at and comes next."""

    def __call__(self, x: Any) -> bool:
        """Return whether the space contains ``x``."""
        return x is self.checked or self._space.contains(x)


def trust(env: Any) -> Trust:
    """Give an environment a copy of its action space that answers by a :class:`Trust`.

    If a wrapper has another space, what is in that one was checked, and the environment within
    looks for itself; so does one whose space cannot be replaced.
    """
    answer = Trust(env.action_space)
    inner = env.unwrapped
    if getattr(inner, "action_space", None) == env.action_space:
        trusting = copy.copy(inner.action_space)
        trusting.contains = answer
        with contextlib.suppress(AttributeError):  # a property
            inner.action_space = trusting
    return answer
