"""Rebuilding one environment while the others of its shard go on."""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from clusterenv.data.fragment import Cut
from clusterenv.data.seeds import rebuilt_seed
from clusterenv.data.spaces import Column
from clusterenv.simulation.engines import EnvRaised
from clusterenv.simulation.env_faults import EnvFaults

__all__ = ["Rebuildable", "Rebuilder"]

_UNSEEDED = " With a seed it can be made to happen again: Collector(..., seed=1)."


class Rebuildable(Protocol):
    """An engine that can make one of its environments anew."""

    def rebuild(self, row: int, seed: int | None, obs: list[Column]) -> dict[str, Any]:
        """Make an environment again, reset it into its row of ``obs``, return the info."""


class Rebuilder:
    """Rebuilds environments as long as the rule allows, and keeps account of it.

    Parameters
    ----------
    engine
        Has the environments.
    rule
        How often one may be rebuilt.
    first
        Global index of the first environment.
    seeds
        That the environments began with.
    """

    def __init__(
        self, engine: Rebuildable, rule: EnvFaults, first: int, seeds: Sequence[int | None]
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
        """Make the environment that failed anew; return the info of its reset.

        Parameters
        ----------
        fault
            What happened; its cause is what was raised.
        action
            The last one that the environment got.
        obs
            Columns to whose row the new environment's observation goes.
        cut_at
            Time row of the last step of the episode that was cut.

        Raises
        ------
        EnvRaised
            If the rule allows no more, with all that is needed to see it happen again.
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
        """Return what was cut since the last call."""
        cuts, self._cuts = self._cuts, []
        return cuts
