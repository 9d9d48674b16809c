"""A fragment: the rows that a shard sends at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clusterenv.data.spaces import Column

__all__ = ["Cut", "Fragment"]


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
