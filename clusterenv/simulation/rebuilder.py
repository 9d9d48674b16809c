"""Rebuilds one environment that failed while the others of its shard go on."""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from clusterenv.data.fragment import Cut
from clusterenv.data.seeds import rebuilt_seed
from clusterenv.data.spaces import Column
from clusterenv.simulation.engines.base import EnvRaised
from clusterenv.simulation.env_faults import EnvFaults

__all__ = ["Rebuildable", "Rebuilder"]

_UNSEEDED = " With a seed it can be made to happen again: Collector(..., seed=1)."


class Rebuildable(Protocol):
    """An engine that can replace one of its environments."""

    def rebuild(self, row: int, seed: int | None, obs: list[Column]) -> dict[str, Any]:
        """Replace an environment, reset it into its row of ``obs`` and return the info."""


class Rebuilder:
    """Rebuilds environments as often as the rule allows, and records the episodes it cut.

    Parameters
    ----------
    engine
        The environments.
    rule
        How often one may be rebuilt.
    first
        Global index of the first environment.
    seeds
        First seed of each environment.
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
        """Replace the environment that failed; return the info of its reset.

        Parameters
        ----------
        fault
            The failure; its cause is the exception.
        action
            The environment's last action.
        obs
            Columns that receive the new environment's observation.
        cut_at
            Time row of the last step of the episode that was cut.

        Raises
        ------
        EnvRaised
            If the rule does not allow another rebuild, with what is needed to reproduce the
            fault.
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
