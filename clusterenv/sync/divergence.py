"""How far two versions of a policy have diverged, on the same observations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributions import Distribution, kl_divergence

from clusterenv.schema import Column

__all__ = ["Probe", "mean_divergence"]


def mean_divergence(local: Distribution, head: Distribution) -> float:
    """Return the mean over observations of ``KL(local ‖ head)``.

    Several action dimensions are summed, as they are one action; observations are averaged.
    Versions that cannot be compared, which gives NaN, have diverged without limit.
    """
    divergence = kl_divergence(local, head)
    if divergence.ndim > 1:
        divergence = divergence.flatten(1).sum(1)
    mean = float(divergence.mean())
    return math.inf if math.isnan(mean) else mean


class Probe:
    """Observations sampled from recent batches: a ring that keeps the newest.

    It knows nothing of policies; the publisher evaluates them on it.

    Parameters
    ----------
    size
        Observations kept. It bounds what a publish costs: one evaluation of this many
        observations for the new version and for every version in use.
    """

    def __init__(self, size: int = 128) -> None:
        self.size = size
        self._rng = np.random.default_rng(0)
        self._columns: list[Column] | None = None
        self._envs = np.zeros(size, np.int64)
        self._masks: Column | None = None
        self._filled = 0
        self._next = 0
        self.added = 0
        """Rows ever added; tells whether the probe has changed."""

    def __len__(self) -> int:
        return self._filled

    def add(
        self,
        obs: Sequence[Column],
        envs: npt.NDArray[Any],
        mask: Column | None = None,
        take: int | None = None,
    ) -> None:
        """Sample some rows of a batch; columns are flat, a row per observation.

        By default a quarter of the probe is replaced.
        """
        take = self.size // 4 if take is None else take
        rows = self._rng.integers(0, len(envs), min(take, len(envs), self.size))
        at = (self._next + np.arange(len(rows))) % self.size
        if self._columns is None:
            self._columns = [np.zeros((self.size, *c.shape[1:]), c.dtype) for c in obs]
        if self._masks is None and mask is not None:
            self._masks = np.ones((self.size, *mask.shape[1:]), mask.dtype)
        for column, given in zip(self._columns, obs, strict=True):
            column[at] = given[rows]
        if self._masks is not None and mask is not None:
            self._masks[at] = mask[rows]
        self._envs[at] = envs[rows]
        self._next = int((at[-1] + 1) % self.size)
        self._filled = min(self.size, self._filled + len(rows))
        self.added += len(rows)

    def observations(self) -> tuple[list[Column], npt.NDArray[np.int64], Column | None]:
        """Return the observations, their env indices and their masks."""
        assert self._columns is not None
        kept = slice(0, self._filled)
        masks = None if self._masks is None else self._masks[kept].copy()
        return [column[kept].copy() for column in self._columns], self._envs[kept].copy(), masks
