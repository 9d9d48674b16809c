"""Recurrent state of policies, as it was before the first time row of each block."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from clusterenv.data.spaces import Column
from clusterenv.store.table.slots import Block, Ints, put

__all__ = ["RecurrentStates"]


class RecurrentStates:
    """States beside the first tails of each block, and where each row finds its state.

    Parameters
    ----------
    columns
        Arrays with one state per side slot.
    at
        Array with the index of each row's state in ``columns``; -1 if it has none.
    """

    def __init__(self, columns: Mapping[str, Column], at: Ints) -> None:
        self._columns = columns
        self._at = at
        self._capacity = len(at)

    def add(self, block: Block, states: Mapping[str, Column]) -> None:
        """Store the states of a block's first time row; empty arrays if they are unknown."""
        put(self._at, block.start, np.full(block.end - block.start, -1), self._capacity)
        if all(len(column) for column in states.values()):
            at = block.tail_slots[: block.num_envs] - self._capacity
            for name, column in states.items():
                self._columns[name][at] = column
            put(self._at, block.start, at, self._capacity)

    def of(self, slots: Ints) -> tuple[dict[str, Column], npt.NDArray[np.bool_]]:
        """Return the state before the rows in these slots, and whether it is known."""
        at = self._at[slots]
        return {name: column[at] for name, column in self._columns.items()}, at >= 0
