"""One level of the sum tree: nodes, and what is done with many of them at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["FAN", "SHIFT", "Floats", "Ints", "Level", "running_sums"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
FAN = 16  # children of a node: two cache lines
SHIFT = 4


class Level:
    """Nodes that each have sixteen numbers of the level below."""

    def __init__(self, below: Floats) -> None:
        self.children = below.reshape(-1, FAN)
        self.sums: Floats = np.zeros(len(self.children))
        self.before: Floats = np.zeros(self.children.shape)
        """What the children before each child sum up to."""

    def descend(self, at: Ints, rest: Floats) -> None:
        """Replace each node by its child in which ``rest`` lies, and ``rest`` by what is left."""
        before = self.before.take(at, axis=0)
        # One less than the first child that begins beyond the rest. If none does, argmin is 0,
        # and the last child is meant.
        child = (before <= rest[:, None]).argmin(1)
        child -= 1
        child &= FAN - 1
        at <<= SHIFT
        at += child
        child += np.arange(0, before.size, FAN)
        rest -= before.reshape(-1).take(child)

    def add_up(self, at: Ints) -> None:
        """Add up the children of some nodes."""
        children = self.children.take(at, axis=0)
        before = np.zeros(children.shape)
        running_sums(children[:, :-1], before[:, 1:])
        self.sums[at] = before[:, -1] + children[:, -1]
        self.before[at] = before

    def add_up_range(self, start: int, end: int) -> None:
        """Add up the children of neighbouring nodes."""
        children, before = self.children[start:end], self.before[start:end]
        running_sums(children[:, :-1], before[:, 1:])
        np.add(before[:, -1], children[:, -1], out=self.sums[start:end])


def running_sums(numbers: Floats, out: Floats) -> None:
    """Write the running sums of the last axis; torch takes a fifth of NumPy's time."""
    torch.cumsum(torch.from_numpy(numbers), -1, out=torch.from_numpy(out))
