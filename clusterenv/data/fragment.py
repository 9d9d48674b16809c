"""A fragment: the rows that a shard sends at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clusterenv.data.spaces import Column

__all__ = ["Cut", "Fragment", "side_by_side"]


class Cut(NamedTuple):
    """An episode that was cut because its environment failed and was rebuilt."""

    env: int
    """Global index."""
    time: int
    """Time row of the last step of the episode, which is ``truncated``; -1 if that step is in
    an earlier batch, or if the episode had none."""
    reason: str


@dataclass
class Fragment:
    """``horizon × num_envs`` rows of one shard."""

    columns: dict[str, Column]
    """Flat and time-major: row ``t * num_envs + e``."""
    num_envs: int
    tail_rows: npt.NDArray[np.int64]
    """Rows whose next observation is not that of the row ``num_envs`` further on."""
    tail: dict[str, Column]
    """The true next observations of these rows, by observation column."""
    state: dict[str, Column]
    """Recurrent state at the first row of each track."""
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    dropped: int = 0
    """Rows that were discarded because recording started over."""
    cuts: list[Cut] = field(default_factory=list)
    block: dict[str, Column] | None = None
    """Buffers of the columns, which the env loop reuses."""


def side_by_side(parts: Sequence[Fragment], block: dict[str, Column]) -> Fragment:
    """Return one fragment of the tracks of several, which have as many time rows.

    Its columns are copies, in the buffers of ``block`` where there are some.

    Examples
    --------
    >>> rows = np.arange(4, dtype=np.float32)  # of two environments, two time rows
    >>> one, two = (
    ...     Fragment({"reward": rows + add}, 2, np.array([2, 3]), {"obs": rows[2:] + add}, {})
    ...     for add in (0, 10)
    ... )
    >>> both = side_by_side([one, two], {})
    >>> both.columns["reward"].tolist(), both.tail_rows.tolist(), both.tail["obs"].tolist()
    ([0.0, 1.0, 10.0, 11.0, 2.0, 3.0, 12.0, 13.0], [4, 5, 6, 7], [2.0, 3.0, 12.0, 13.0])
    """
    first = parts[0]
    width = sum(part.num_envs for part in parts)
    horizon = len(first.columns["reward"]) // first.num_envs
    begins = np.cumsum([0, *(part.num_envs for part in parts)]).tolist()
    columns = {}
    for name, like in first.columns.items():
        shape = (horizon * width, *like.shape[1:])
        out = block.get(name)
        if out is None or out.shape != shape or out.dtype != like.dtype:
            out = block[name] = np.empty(shape, like.dtype)
        whole = out.reshape(horizon, width, *like.shape[1:])
        for part, begin in zip(parts, begins, strict=False):
            column = part.columns[name].reshape(horizon, part.num_envs, *like.shape[1:])
            whole[:, begin : begin + part.num_envs] = column
        columns[name] = out
    rows = [
        part.tail_rows // part.num_envs * width + part.tail_rows % part.num_envs + begin
        for part, begin in zip(parts, begins, strict=False)
    ]
    return Fragment(
        columns,
        width,
        np.concatenate(rows),
        {name: np.concatenate([part.tail[name] for part in parts]) for name in first.tail},
        {name: np.concatenate([part.state[name] for part in parts]) for name in first.state},
        [value for part in parts for value in part.returns],
        [length for part in parts for length in part.lengths],
        sum(part.dropped for part in parts),
        [cut for part in parts for cut in part.cuts],
        block,
    )
