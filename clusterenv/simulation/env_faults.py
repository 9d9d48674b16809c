"""The rule for environments that raise or return something outside their space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterenv.data.checks import check_flag, check_number, check_whole

__all__ = ["EnvFaults"]


@dataclass(frozen=True)
class EnvFaults:
    """How often an environment that raises or leaves its own space is rebuilt.

    Parameters
    ----------
    count
        How often one environment is rebuilt within ``seconds``; one fault more ends the run.
        With 0 the first fault does.
    seconds
        The time that faults are counted over.
    bounds
        Whether an observation outside the bounds of its ``Box`` is a fault too. Numbers that
        are not finite, wrong shapes and wrong dtypes always are.

    Examples
    --------
    >>> EnvFaults(count=2, seconds=60).allows([0, 50, 70], now=70)
    True
    """

    count: int = 5
    seconds: float = 600.0
    bounds: bool = False

    def __post_init__(self) -> None:
        right = "EnvFaults(5, seconds=600), or EnvFaults(0) to end the run at the first fault"
        check_whole("count", self.count, right)
        check_number("seconds", self.seconds, right, above=0)
        check_flag("bounds", self.bounds, "EnvFaults(5, bounds=True)")

    def allows(self, faults: Sequence[float], now: float) -> bool:
        """Whether an environment with faults at these times, the last included, is rebuilt."""
        return sum(now - fault <= self.seconds for fault in faults) <= self.count
