"""Restarts lost shards of a ``ClusterEnv``; their environments come back truncated."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from clusterenv.data.infos import Packed, Rows, pack
from clusterenv.data.seeds import env_seeds
from clusterenv.data.spaces import Column, Layout
from clusterenv.errors import ClosedError, ClusterEnvError
from clusterenv.head.fleet.fleet import Fleet
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.head.fleet.restarts import Restarter, Restarts
from clusterenv.head.vector.env_groups import EnvIds

__all__ = ["Recovery"]

logger = logging.getLogger("clusterenv")

_NOTHING, _TRUNCATION, _RESET = range(3)


class Recovery:
    """Restarts lost shards, and keeps what is still due to their environments.

    An environment that was lost owes its user a truncation. The next result of the environment
    has it, with the observation of a reset. Under ``NEXT_STEP`` the step after it only resets,
    as after any end of an episode.
    """

    def __init__(self, fleet: Fleet, rule: Restarts, num_envs: int) -> None:
        about = fleet.description
        self._fleet = fleet
        self._restarter = Restarter(rule, fleet)
        self._due = np.zeros(num_envs, np.int8)
        self._reasons: dict[int, str] = {}
        self._seeds: list[int | None] = [None] * num_envs
        self._layout = Layout(about.observation_space)
        self._next_step = about.autoreset_mode is AutoresetMode.NEXT_STEP
        same_step = about.autoreset_mode is AutoresetMode.SAME_STEP and rule.count > 0
        self._last = self._layout.empty(num_envs) if same_step else None
        self.count = 0
        """Restarts so far."""

    def recover(
        self, handle: ShardHandle, error: ClusterEnvError, end_process: bool
    ) -> ShardHandle:
        """Restart a lost shard and return its new handle; as ``Restarter.restart``."""
        roster = self._fleet.roster
        roster.lost(handle.index)
        handle.disconnect()
        back = self._restarter.restart(handle.index, error, end_process)
        try:
            roster.admit(back.index)
        except ClosedError:
            self._fleet.stop([back])
            raise
        self.count += 1
        self._due[back.span] = _TRUNCATION
        self._reasons[back.index] = str(error)
        logger.warning("%s is open; its environments come back truncated.", back)
        return back

    # What is due

    def due(self, ids: EnvIds | slice) -> npt.NDArray[np.bool_]:
        """Return to which of these environments a reset is due, instead of a step."""
        return np.not_equal(self._due[ids], _NOTHING)

    def seeds(self, ids: EnvIds, shard: int) -> list[int | None]:
        """Return the seeds for a reset that is due: new streams after a loss, none otherwise."""
        incarnation = self._fleet.roster[shard].incarnation
        return [
            env_seeds(self._seeds[env], incarnation, env, 1)[0]
            if self._due[env] == _TRUNCATION
            else None
            for env in ids.tolist()
        ]

    def settle(self, ids: EnvIds, shard: int) -> tuple[npt.NDArray[np.bool_], Packed | None]:
        """Record that the resets due were done; return which come back truncated, and their infos.

        An info has the reason; under ``SAME_STEP`` also the last observation that was returned,
        as the one after it was lost.
        """
        truncated = self._due[ids] == _TRUNCATION
        self._due[ids] = np.where(truncated & self._next_step, _RESET, _NOTHING)
        infos: Rows = []
        for position in np.flatnonzero(truncated).tolist():
            info: dict[str, Any] = {"lost": self._reasons[shard]}
            if self._last is not None:
                row = [np.copy(column[ids[position]]) for column in self._last]
                info |= {"final_obs": self._layout.nest(row), "final_info": {}}
            infos.append((position, info))
        return truncated, pack(infos) if infos else None

    # What must be remembered

    def began(
        self, ids: EnvIds, seeds: list[int | None], mask: npt.NDArray[np.bool_] | None
    ) -> None:
        """Record that the user resets all of these environments, or those of a mask.

        Nothing is due to them any more. ``seeds`` and ``mask`` are of all environments.
        """
        for env in ids.tolist():
            if mask is None or mask[env]:
                self._due[env] = _NOTHING
                if seeds[env] is not None:
                    self._seeds[env] = seeds[env]

    def saw(self, ids: EnvIds, obs: list[Column], rows: EnvIds | slice) -> None:
        """Remember the newest observations, in ``rows`` of ``obs``, if they may be last ones."""
        if self._last is not None:
            for column, now in zip(self._last, obs, strict=True):
                column[ids] = now[rows]
