"""Divergence of two versions of a policy on the same observations."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from torch.distributions import Distribution, kl_divergence

from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError

__all__ = ["Probe", "mean_divergence"]


def mean_divergence(local: Distribution, head: Distribution) -> float:
    """Return the mean over observations of ``KL(local ‖ head)``.

    The dimensions of an action are summed, observations are averaged. The divergence of versions
    that cannot be compared, which is NaN, counts as infinite. Raises ``ConfigError`` if torch has
    no divergence for such distributions.
    """
    try:
        divergence = kl_divergence(local, head)
    except NotImplementedError as error:
        raise ConfigError(
            f"torch has no divergence between {type(local).__name__} distributions; return "
            "another one from distribution(obs, context), register one with "
            "torch.distributions.register_kl, or count versions: sync=clusterenv.Every(4)"
        ) from error
    if divergence.ndim > 1:
        divergence = divergence.flatten(1).sum(1)
    mean = float(divergence.mean())
    return math.inf if math.isnan(mean) else mean


class Probe:
    """The newest of the rows sampled from what policies acted on, in a ring.

    Its size bounds the cost of a publish: the new version and every version in use are evaluated
    on so many observations.
    """

    def __init__(self, size: int = 128) -> None:
        self.size = size
        self._rng = np.random.default_rng(0)
        self._columns: dict[str, Column] = {}
        self._filled = 0
        self._next = 0
        self.added = 0
        """Rows added so far, those overwritten included."""

    def __len__(self) -> int:
        return self._filled

    def add(self, columns: Mapping[str, Column], take: int | None = None) -> None:
        """Sample some rows of these columns, which are equally long.

        By default a quarter of the probe is replaced. If the names of the columns have changed,
        earlier rows are dropped.
        """
        length = min(len(column) for column in columns.values())
        take = self.size // 4 if take is None else take
        rows = self._rng.integers(0, length, min(take, length, self.size))
        if columns.keys() != self._columns.keys():
            self._columns = {
                name: np.zeros((self.size, *column.shape[1:]), column.dtype)
                for name, column in columns.items()
            }
            self._filled = self._next = 0
        at = (self._next + np.arange(len(rows))) % self.size
        for name, column in columns.items():
            self._columns[name][at] = column[rows]
        self._next = int((at[-1] + 1) % self.size)
        self._filled = min(self.size, self._filled + len(rows))
        self.added += len(rows)

    def rows(self) -> dict[str, Column]:
        """Return a copy of the rows, column by column."""
        return {name: column[: self._filled].copy() for name, column in self._columns.items()}
