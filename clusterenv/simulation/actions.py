"""Checks that a policy's actions are in the action space and allowed by the masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from clusterenv.data.spaces import Column, Layout
from clusterenv.simulation.policy_faults import Location, PolicyFault, as_array

__all__ = ["ActionCheck"]

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class ActionCheck:
    """Converts a policy's actions for the engine, or raises :class:`PolicyFault`."""

    def __init__(self, space: spaces.Space[Any], n: int) -> None:
        self._space = space
        (leaf,) = Layout(space).leaves
        self._dtype = leaf.dtype
        self._shape = (n, *leaf.shape)
        self._takes = "biuf" if self._dtype.kind == "f" else "biu"  # kinds of dtype
        self._start: Any = 0
        self._low: Any = None
        self._high: Any = None
        self._choices = 0
        self._parts: list[int] = []  # entries of a mask that belong to each number of an action
        if isinstance(space, spaces.Discrete):
            self._start, self._choices = int(space.start), int(space.n)
            self._low, self._high = self._start, self._start + self._choices - 1
            self._parts = [self._choices]
        elif isinstance(space, spaces.Box):
            self._low, self._high = space.low, space.high
        elif isinstance(space, spaces.MultiDiscrete):
            self._start = space.start
            self._low, self._high = space.start, space.start + space.nvec - 1
            self._parts = space.nvec.reshape(-1).tolist()
        elif isinstance(space, spaces.MultiBinary):
            self._low, self._high = 0, 1

    @property
    def is_complete(self) -> bool:
        """Whether every action that passes is in the space."""
        return self._low is not None

    def check_mask(self, mask: Tensor, location: Location) -> None:
        """Raise unless a mask fits the space and allows every environment at least one action.

        Parameters
        ----------
        mask
            ``[envs, choices]``; for ``MultiDiscrete`` the choices of one number after the other.
        """
        if not self._parts or mask.shape[1:] != (sum(self._parts),):
            fits = f"{sum(self._parts)} entries" if self._parts else "no mask"
            raise PolicyFault(
                f"the action mask has shape {tuple(mask.shape[1:])} for each environment; "
                f"{self._space} needs {fits}"
            )
        for part in torch.split(mask, self._parts, dim=1):
            some = part.any(1)
            if not some.all():
                row = int(some.to(torch.uint8).argmin())
                raise PolicyFault(f"the action mask allows no action to {location.env(row)}")

    def __call__(self, action: Any, mask: Tensor | None, location: Location) -> Column:
        """Return the actions as an array."""
        if not isinstance(action, Tensor):
            raise PolicyFault(
                "act() must return a tensor of actions, got a "
                f"{type(action).__name__} on {location}"
            )
        array = as_array(action, "action", location)
        if array.shape != self._shape:
            raise PolicyFault(
                f"the policy's actions on {location} have shape {array.shape}, expected "
                f"{self._shape}: one of {self._space} for each environment"
            )
        if array.dtype.kind not in self._takes:
            needs = "real numbers" if self._dtype.kind == "f" else "integers"
            raise PolicyFault(
                f"the policy's actions on {location} are of dtype {array.dtype}, "
                f"but {self._space} needs {needs}"
            )
        if self._dtype.kind == "f" and array.dtype != self._dtype:
            array = array.astype(self._dtype)
        if self._low is not None and not self._within(array):
            right = (array >= self._low) & (array <= self._high)
            row = int(np.argwhere(~right)[0][0])
            raise PolicyFault(
                f"the policy chose {array[row]} for {location.env(row)}, outside {self._space}"
            )
        if array.dtype != self._dtype:  # after the check: casting may wrap a large integer
            array = array.astype(self._dtype)
        if mask is not None:
            allowed = self._allowed(array, mask)
            if not allowed.all():
                row = int(np.flatnonzero(~allowed)[0])
                raise PolicyFault(
                    f"the policy chose action {array[row]} for {location.env(row)}, which its mask "
                    "forbids"
                )
        return array

    def _allowed(self, array: Column, mask: Tensor) -> Column:
        """Return for each environment whether its mask allows its whole action."""
        firsts = np.cumsum([0, *self._parts[:-1]])
        chosen = (array - self._start).reshape(len(array), -1) + firsts
        allowed: Column = mask.gather(1, torch.from_numpy(chosen.astype(np.int64))).all(1).numpy()
        return allowed

    def _within(self, array: Column) -> bool:
        size = array.dtype.itemsize
        if self._choices and size >= self._dtype.itemsize:
            # As unsigned numbers, those below the start are far above the end.
            shifted = array - self._start if self._start else array
            unsigned = shifted.view(_UNSIGNED[size])
            return bool(unsigned.item(unsigned.argmax()) < self._choices)  # faster than max()
        return bool(((array >= self._low) & (array <= self._high)).all())  # NaN is outside
