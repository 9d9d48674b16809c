"""Checks that what environments return lies in their own spaces."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from clusterenv.data.spaces import Column, Layout
from clusterenv.simulation.engines.base import EnvRaised, Slot

__all__ = ["SpaceBroken", "SpaceCheck"]


class SpaceBroken(ValueError):
    """An environment returned something that is not in its own space."""


class SpaceCheck:
    """Checks the result of a step: finite numbers, and text that can be encoded as UTF-8.

    ``bounds`` adds the bounds of ``Box`` spaces, which many environments leave now and then.
    Shapes and dtypes are checked where observations are written.
    """

    def __init__(self, space: spaces.Space[Any], bounds: bool, text: bool = True) -> None:
        layout = Layout(space)
        self._names = [leaf.name("obs") for leaf in layout.leaves]
        self._floats = [
            k
            for k, leaf in enumerate(layout.leaves)
            if leaf.is_array and np.issubdtype(leaf.dtype, np.floating)
        ]
        self._texts = [k for k, leaf in enumerate(layout.leaves) if leaf.is_text and text]
        self._bounds: dict[int, tuple[Column, Column]] = {}
        if bounds:
            for k, leaf in enumerate(layout.leaves):
                within: Any = space
                for key in leaf.path:
                    within = within[key]
                if isinstance(within, spaces.Box):
                    self._bounds[k] = within.low, within.high
        self.bounded = bool(self._bounds)
        """Whether bounds are checked, which needs as much memory as the observations."""

    def passes(self, slot: Slot) -> bool:
        """Whether no environment is at fault.

        The sum of squares is the fastest check: if it is finite, so are the numbers. If it is
        not, they may just be huge, and each is checked.
        """
        reward = slot.reward
        if self._bounds or not math.isfinite(np.vdot(reward, reward)):
            return not self.faults(slot)
        for k in self._floats:
            column = slot.obs[k]
            if not math.isfinite(np.vdot(column, column)):
                return not self.faults(slot)
        return not self._texts or all(_is_text(slot.obs[k]) for k in self._texts)

    def faults(self, slot: Slot) -> dict[int, SpaceBroken]:
        """Return what is wrong, by the row of each environment at fault."""
        found: dict[int, SpaceBroken] = {}
        for row in np.flatnonzero(~np.isfinite(slot.reward)).tolist():
            found[row] = SpaceBroken(f"the reward is {slot.reward[row]}")
        for k in self._floats:
            for row in _rows(~np.isfinite(slot.obs[k])):
                self._add(found, row, k, slot.obs[k][row], "is not finite")
        for k in self._texts:
            for row, value in enumerate(slot.obs[k]):
                if not _is_text([value]):
                    self._add(found, row, k, value, "is not text")
        for k, (low, high) in self._bounds.items():
            for row in _rows((slot.obs[k] < low) | (slot.obs[k] > high)):
                self._add(found, row, k, slot.obs[k][row], "is out of bounds")
        return found

    def fault(self, slot: Slot, num_envs: int) -> EnvRaised:
        """Return the first fault as an error; ``slot`` may hold several time rows."""
        found = self.faults(slot)
        first = min(found)
        fault = EnvRaised(first % num_envs, "step")
        fault.__cause__ = found[first]
        return fault

    def check_value(self, columns: list[Column]) -> None:
        """Raise unless one observation, given as columns of one row, is in the space."""
        slot = Slot(columns, np.zeros(1), np.zeros(1, np.bool_), np.zeros(1, np.bool_))
        if not self.passes(slot):
            raise self.faults(slot)[0]

    def _add(self, found: dict[int, SpaceBroken], row: int, k: int, value: Any, what: str) -> None:
        shown = np.array2string(np.asarray(value), threshold=16, precision=6)
        found.setdefault(row, SpaceBroken(f"the observation {self._names[k]} {what}: {shown}"))


def _is_text(values: Iterable[Any]) -> bool:
    """Whether all values are strings that can be encoded as UTF-8."""
    try:
        "".join(values).encode()
    except (TypeError, UnicodeEncodeError):
        return False
    return True


def _rows(bad: npt.NDArray[np.bool_]) -> list[int]:
    rows: list[int] = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1)).tolist()
    return rows
