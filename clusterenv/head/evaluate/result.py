"""The result of an evaluation, and the confidence interval of a mean."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Evaluation", "student_t"]


class Evaluation(NamedTuple):
    """Episodes that one version of a policy has played.

    Examples
    --------
    >>> played = Evaluation(7, np.array([9.0, 10.0, 11.0]), np.array([9, 10, 11]))
    >>> version, returns, lengths = played
    >>> played.mean, played.std, [round(bound, 2) for bound in played.interval]
    (10.0, 1.0, [7.52, 12.48])
    """

    version: int
    returns: npt.NDArray[np.float64]
    """Undiscounted, one per episode."""
    lengths: npt.NDArray[np.int64]
    """Steps of each episode."""

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Standard deviation of the returns; NaN of a single one."""
        return float(self.returns.std(ddof=1)) if len(self.returns) > 1 else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the mean return, by Student's t; NaN of a single one."""
        n = len(self.returns)
        if n < 2:
            return math.nan, math.nan
        half = student_t(n - 1) * self.std / math.sqrt(n)
        return self.mean - half, self.mean + half


def student_t(freedom: int, level: float = 0.95) -> float:
    """Return the bound that a t-distributed number stays within with this probability.

    Examples
    --------
    >>> [round(student_t(freedom), 3) for freedom in (1, 2, 19, 99, 10_000)]
    [12.706, 4.303, 2.093, 1.984, 1.96]
    """
    low, high = 0.0, math.pi / 2  # of the angle, atan(t / sqrt(freedom))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """Return the probability of ``|t| < tan(angle) sqrt(freedom)``: a finite sum, for integers."""
    if freedom == 1:
        return 2 * angle / math.pi
    square = math.cos(angle) ** 2
    term = total = math.cos(angle) if freedom % 2 else 1.0
    for k in range(2 + freedom % 2, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    if freedom % 2:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
