"""What ``ClusterEnv`` does about a lost shard: its environments come back truncated."""

from __future__ import annotations

import logging
import time
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
from clusterenv.head.fleet.restarts import RestartHistory, Restarts

__all__ = ["Recovery"]

logger = logging.getLogger("clusterenv")

_NOTHING, _TRUNCATION, _RESET = range(3)

Ids = npt.NDArray[np.intp]


class Recovery:
    """Places lost shards again, and knows what is still due to their environments.

    An environment that was lost owes its user a truncation. It is given with the observation
    of a reset, when a result of the environment is next asked for. Under ``NEXT_STEP`` the
    step after it only resets, as after any end of an episode.

    Parameters
    ----------
    fleet
        The shards.
    rule
        How often a shard is placed again, and how soon.
    num_envs
        Environments of all shards.
    """

    def __init__(self, fleet: Fleet, rule: Restarts, num_envs: int) -> None:
        about = fleet.description
        self._fleet = fleet
        self._losses = RestartHistory(rule)
        self._due = np.zeros(num_envs, np.int8)
        self._reasons: dict[int, str] = {}
        self._seeds: list[int | None] = [None] * num_envs
        self._incarnations = np.zeros(num_envs, np.int64)
        self._layout = Layout(about.observation_space)
        self._next_step = about.autoreset_mode is AutoresetMode.NEXT_STEP
        same_step = about.autoreset_mode is AutoresetMode.SAME_STEP and rule.count > 0
        self._last = self._layout.empty(num_envs) if same_step else None
        self.count = 0
        """Shards placed again so far."""

    def recover(
        self, handle: ShardHandle, error: ClusterEnvError, end_process: bool
    ) -> ShardHandle:
        """Place a lost shard again and return it.

        Raises
        ------
        ClusterEnvError
            If the rule allows no more, with all that was seen, or the fleet is closed.
        """
        reason: Exception = error
        while True:
            handle.lost = True
            handle.disconnect()
            wait = self._losses.note(handle.index, reason)
            if wait is None:
                raise self._losses.verdict(handle.index) from reason
            logger.warning("%s Placing it again%s.", reason, f" in {wait:g} s" if wait else "")
            time.sleep(wait)
            if end_process:
                self._fleet.end_process(handle)
                end_process = False
            incarnation = self._losses.next_incarnation(handle.index)
            try:
                back = self._fleet.place_again(handle, incarnation)
                break
            except ClosedError:
                raise
            except Exception as problem:
                reason = problem
        self._fleet.replace(back)
        self.count += 1
        self._due[back.span] = _TRUNCATION
        self._incarnations[back.span] = incarnation
        self._reasons[back.index] = str(error)
        logger.warning("%s is there again; its environments come back truncated.", back)
        return back

    # What is due

    def pending(self, ids: Ids | slice) -> bool:
        """Whether anything is due to some of these environments."""
        return bool(self._due[ids].any())

    def due(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return to which of these environments a reset is due, instead of a step."""
        return np.not_equal(self._due[ids], _NOTHING)

    def seeds(self, ids: Ids) -> list[int | None]:
        """Return the seeds for a reset that is due: new streams after a loss, none otherwise."""
        return [
            env_seeds(self._seeds[env], int(self._incarnations[env]), env, 1)[0]
            if self._due[env] == _TRUNCATION
            else None
            for env in ids.tolist()
        ]

    def settle(self, ids: Ids, shard: int) -> tuple[npt.NDArray[np.bool_], Packed | None]:
        """Note that the resets due were done.

        Returns
        -------
        truncated
            Which of the environments come back truncated.
        infos
            The reason, by position in ``ids``; under ``SAME_STEP`` with the last observation
            that was given out, as nobody knows the one after it.
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

    def began(self, ids: Ids, seeds: list[int | None], mask: npt.NDArray[np.bool_] | None) -> None:
        """Note that of these environments all, or those of a mask, are reset by their user.

        Nothing is due to them any more. ``seeds`` and ``mask`` are of all environments.
        """
        for env in ids.tolist():
            if mask is None or mask[env]:
                self._due[env] = _NOTHING
                if seeds[env] is not None:
                    self._seeds[env] = seeds[env]

    def saw(self, ids: Ids, obs: list[Column]) -> None:
        """Remember the newest observations, where they may be needed as last ones."""
        if self._last is not None:
            for column, now in zip(self._last, obs, strict=True):
                column[ids] = now
