"""Whether what environments return lies in their own spaces."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from clusterenv.data.spaces import Column, Layout
from clusterenv.simulation.engines import EnvRaised, Slot

__all__ = ["SpaceBroken", "SpaceCheck"]


class SpaceBroken(ValueError):
    """An environment returned something that is not in its own space."""


class _Bounds(NamedTuple):
    low: Column
    high: Column


class SpaceCheck:
    """Looks at what a step wrote: are all numbers finite, and within bounds if that is asked.

    Text that is kept must be strings that can be encoded as UTF-8.

    Shapes and dtypes are looked at where observations are written.

    Parameters
    ----------
    space
        Of the observations.
    bounds
        Whether an observation outside the bounds of its ``Box`` is a fault. Many environments
        leave their bounds now and then, so this is a choice.
    text
        Whether text is looked at.
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
        self._bounds: dict[int, _Bounds] = {}
        if bounds:
            for k, leaf in enumerate(layout.leaves):
                within: Any = space
                for key in leaf.path:
                    within = within[key]
                if isinstance(within, spaces.Box):
                    self._bounds[k] = _Bounds(within.low, within.high)

    @property
    def bounded(self) -> bool:
        """Whether it looks at bounds, for which it takes as much memory as it looks at."""
        return bool(self._bounds)

    def passes(self, slot: Slot) -> bool:
        """Whether all is well.

        A sum of squares, the fastest look at all numbers at once, is finite if they are, unless
        they are huge; then they are looked at one by one.
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
        """Return the environments that are at fault, by row, and why."""
        found: dict[int, SpaceBroken] = {}
        for row in np.flatnonzero(~np.isfinite(slot.reward)).tolist():
            found[row] = SpaceBroken(f"the reward is {slot.reward[row]}")
        for k in self._floats:
            for row in _rows(~np.isfinite(slot.obs[k])):
                self._note(found, row, k, slot.obs[k][row], "is not finite")
        for k in self._texts:
            for row, value in enumerate(slot.obs[k]):
                if not _is_text([value]):
                    self._note(found, row, k, value, "is not text")
        for k, (low, high) in self._bounds.items():
            for row in _rows((slot.obs[k] < low) | (slot.obs[k] > high)):
                self._note(found, row, k, slot.obs[k][row], "is out of bounds")
        return found

    def fault(self, slot: Slot, num_envs: int) -> EnvRaised:
        """Return the first fault as an error; ``slot`` may hold several time rows."""
        found = self.faults(slot)
        first = min(found)
        fault = EnvRaised(first % num_envs, "step")
        fault.__cause__ = found[first]
        return fault

    def check_value(self, columns: list[Column]) -> None:
        """Raise unless one observation, a column of one row per leaf, is as it should be."""
        slot = Slot(columns, np.zeros(1), np.zeros(1, np.bool_), np.zeros(1, np.bool_))
        for fault in self.faults(slot).values():
            raise fault

    def _note(self, found: dict[int, SpaceBroken], row: int, k: int, value: Any, what: str) -> None:
        shown = np.array2string(np.asarray(value), threshold=16, precision=6)
        found.setdefault(row, SpaceBroken(f"the observation {self._names[k]} {what}: {shown}"))


def _is_text(values: Iterable[Any]) -> bool:
    """Whether all values are strings that can be encoded; two calls for all of them."""
    try:
        "".join(values).encode()
    except (TypeError, UnicodeEncodeError):
        return False
    return True


def _rows(bad: npt.NDArray[np.bool_]) -> list[int]:
    rows: list[int] = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1)).tolist()
    return rows
