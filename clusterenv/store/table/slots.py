"""Row numbers, blocks of rows and the slots that they occupy.

A row number never repeats. Row ``r`` occupies slot ``r % capacity``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clusterenv.data.spaces import Column

__all__ = ["Block", "Ints", "Pieces", "pieces", "put"]

Ints = npt.NDArray[np.int64]
Pieces = list[tuple[slice, slice]]


@dataclass(slots=True)
class Block:
    """The rows of one batch: ``start`` to ``end``, ``num_envs`` in each time row."""

    start: int
    end: int
    num_envs: int
    run: int
    shard: int
    incarnation: int
    policy_version: int
    tail_rows: Ints
    """Numbers of the rows whose next observation came with the batch, ascending."""
    tail_slots: Ints
    rejoined: tuple[Ints, Ints] | None = None
    """Last rows of tracks that continue with an earlier row of the block, and these rows."""


def pieces(row: int, count: int, capacity: int) -> Pieces:
    """Return the slots of ``count`` rows from ``row`` on, and which rows: one pair, or two.

    Examples
    --------
    >>> pieces(8, 3, 10)
    [(slice(8, 10, None), slice(None, 2, None)), (slice(None, 1, None), slice(2, 3, None))]
    """
    at = row % capacity
    beyond = at + count - capacity
    if beyond <= 0:
        return [(slice(at, at + count), slice(None))]
    return [
        (slice(at, capacity), slice(count - beyond)),
        (slice(beyond), slice(count - beyond, count)),
    ]


def put(column: Column, row: int, values: Column, capacity: int) -> None:
    """Write one value per row, from ``row`` on."""
    for to, of in pieces(row, len(values), capacity):
        column[to] = values[of]
