"""How far two versions of a policy have diverged, on the same observations."""

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

    Several action dimensions are summed, as they are one action; observations are averaged.
    Versions that cannot be compared, which gives NaN, have diverged without limit.

    Raises
    ------
    ConfigError
        If torch knows no divergence of such distributions.
    """
    try:
        divergence = kl_divergence(local, head)
    except NotImplementedError as error:
        raise ConfigError(
            f"torch knows no divergence between {type(local).__name__} distributions; return "
            "another from distribution(obs, context), teach torch with "
            "torch.distributions.register_kl, or count versions: sync=clusterenv.Every(4)"
        ) from error
    if divergence.ndim > 1:
        divergence = divergence.flatten(1).sum(1)
    mean = float(divergence.mean())
    return math.inf if math.isnan(mean) else mean


class Probe:
    """Rows sampled from what policies have acted on: a ring that keeps the newest.

    It knows nothing of policies; the publisher evaluates them on it.

    Parameters
    ----------
    size
        Rows kept. It bounds what a publish costs: one evaluation of this many
        observations for the new version and for every version in use.
    """

    def __init__(self, size: int = 128) -> None:
        self.size = size
        self._rng = np.random.default_rng(0)
        self._columns: dict[str, Column] = {}
        self._filled = 0
        self._next = 0
        self.added = 0
        """Rows ever added; tells whether the probe has changed."""

    def __len__(self) -> int:
        return self._filled

    def add(self, columns: Mapping[str, Column], take: int | None = None) -> None:
        """Sample some rows of these columns, which are equally long.

        By default a quarter of the probe is replaced. With other columns than before it begins
        anew.
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
