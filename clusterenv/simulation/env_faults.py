"""Environments that raise or leave their space: how often one is rebuilt, and the rebuilding."""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterenv.data.checks import check_flag, check_number, check_whole
from clusterenv.data.fragment import Cut
from clusterenv.data.seeds import rebuilt_seed
from clusterenv.data.spaces import Column
from clusterenv.simulation.engines.base import EnvRaised
from clusterenv.simulation.engines.gymnasium import GymnasiumEngine

__all__ = ["EnvFaults", "Rebuilder"]

_UNSEEDED = " With a seed it can be made to happen again: Collector(..., seed=1)."


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


class Rebuilder:
    """Rebuilds environments as often as the rule allows, and records the episodes it cut.

    ``first`` is the global index of the first environment; ``seeds`` are those of the first reset.
    """

    def __init__(
        self, engine: GymnasiumEngine, rule: EnvFaults, first: int, seeds: Sequence[int | None]
    ) -> None:
        self._engine = engine
        self._rule = rule
        self._first = first
        self._origin = list(seeds)
        self._seeds = list(seeds)
        self._times: defaultdict[int, list[float]] = defaultdict(list)
        self._cuts: list[Cut] = []

    def rebuild(
        self, fault: EnvRaised, action: Any, obs: list[Column], cut_at: int
    ) -> dict[str, Any]:
        """Replace the environment that failed, reset it into ``obs`` and return the info.

        ``action`` is its last action, ``cut_at`` the time row of its episode's last step. If the
        rule allows no further rebuild, raise ``EnvRaised`` with what reproduces the fault.
        """
        row = fault.env
        while True:
            cause = fault.__cause__
            reason = "".join(traceback.format_exception_only(cause)).strip()
            times = self._times[row]
            times.append(time.monotonic())
            if not self._rule.allows(times, times[-1]):
                raise EnvRaised(
                    row,
                    fault.doing,
                    note=(
                        f"Fault {len(times)} of this environment, and {self._rule} allows no more. "
                        f"Its seed was {self._seeds[row]}, its last action {action}."
                        + ("" if self._seeds[row] is not None else _UNSEEDED)
                    ),
                ) from cause
            seed = rebuilt_seed(self._origin[row], self._first + row, len(times))
            try:
                info = self._engine.rebuild(row, seed, obs)
            except (Exception, SystemExit) as error:
                fault = EnvRaised(row, "make")
                fault.__cause__ = error
                continue
            self._seeds[row] = seed
            self._cuts.append(Cut(self._first + row, cut_at, f"in {fault.doing}: {reason}"))
            return info

    def take_cuts(self) -> list[Cut]:
        """Return the episodes cut since the last call."""
        cuts, self._cuts = self._cuts, []
        return cuts
