"""Decides which calls of a ``ClusterEnv`` are allowed now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector.async_vector_env import AsyncState

from clusterenv.errors import NothingSent, ResetNeeded, ResultsPending

__all__ = ["AsyncState", "Calls", "Finish"]

Finish = Callable[[], Any]
"""Returns the result of a call, after every shard has answered."""

_IDLE = AsyncState.DEFAULT
_NEVER_RESET = "actions before reset(): call obs, info = envs.reset(seed=1) first"


class Calls:
    """The pending calls of a ``ClusterEnv``, and the state of its environments.

    As in ``AsyncVectorEnv``, one of ``reset_async``, ``step_async`` and ``call_async`` can be
    pending, until its ``…_wait`` is called. Otherwise ``send`` and ``recv`` address environments
    one by one.

    Parameters
    ----------
    num_envs
        Number of environments.
    autoreset
        Whether the environments reset themselves at the end of an episode.
    """

    def __init__(self, num_envs: int, *, autoreset: bool) -> None:
        self.num_envs = num_envs
        self.state = _IDLE
        self._finish: Finish | None = None
        self._sent = np.zeros(num_envs, np.bool_)
        self.receiving = 0
        """Environments whose results ``recv`` has still to return."""
        self._autoreset = autoreset
        self._over = np.zeros(num_envs, np.bool_)  # wait for a reset; without autoreset only
        self._reset_first: str | None = _NEVER_RESET

    @property
    def started(self) -> bool:
        """Whether all environments were reset, and no call timed out since."""
        return self._reset_first is None

    # Checks

    def check_idle(self, call: str) -> None:
        """Raise ``ResultsPending`` if a call is pending that ``…_wait`` has to finish."""
        if self.state is not _IDLE:
            pending = self.state.value
            raise ResultsPending(
                f"Calling `{call}` while waiting for a pending call to `{pending}` to complete: "
                f"call envs.{pending}_wait() first",
                pending,
            )

    def check_received(self, call: str, ids: npt.NDArray[np.intp] | slice = slice(None)) -> None:
        """Raise ``ResultsPending`` if ``recv`` has still to return any of these environments."""
        self.check_idle(call)
        if self.receiving and self._sent[ids].any():
            waiting = np.flatnonzero(self._sent).tolist()
            raise ResultsPending(
                f"{call}() while environments {waiting} have results to be received: "
                "call recv() first"
            )

    def check_ready(self, call: str, ids: npt.NDArray[np.intp] | slice = slice(None)) -> None:
        """Raise unless these environments can take actions.

        Raises
        ------
        ResultsPending
            If they have results to be received.
        ResetNeeded
            If they must be reset first.
        """
        self.check_received(call, ids)
        if self._reset_first is not None:
            raise ResetNeeded(self._reset_first)
        if not self._autoreset and self._over[ids].any():
            over = np.flatnonzero(self._over).tolist()
            raise ResetNeeded(
                f"the episodes of environments {over} are over and autoreset_mode is DISABLED: "
                "call envs.reset(options={'reset_mask': terminated | truncated}) first"
            )

    # Changes

    def begin(self, state: AsyncState, finish: Finish) -> None:
        """Record a pending call, and the function that gives its result."""
        self.state, self._finish = state, finish

    def end(self, state: AsyncState) -> Finish:
        """End the pending call, and return the function that gives its result.

        Raises
        ------
        NothingSent
            If no call, or another one, is pending.
        """
        finish = self._finish
        if self.state is not state or finish is None:
            raise NothingSent(
                f"Calling `{state.value}_wait` without any prior call to `{state.value}_async`.",
                state.value,
            )
        self.state, self._finish = _IDLE, None
        return finish

    def expired(self, state: AsyncState) -> None:
        """Record that a call timed out, and that its results are lost."""
        if state is not AsyncState.WAITING_CALL:
            self._reset_first = (
                f"{state.value}_wait() has timed out, so the state of the environments is "
                "unknown: call obs, info = envs.reset() first"
            )

    def reset(self, mask: npt.NDArray[np.bool_] | None) -> None:
        """Record that all environments, or those of a mask, are being reset."""
        self._sent[:] = False
        self.receiving = 0
        self._over[slice(None) if mask is None else mask] = False
        self._reset_first = None

    def begin_recv(self, ids: npt.NDArray[np.intp]) -> None:
        """Record that ``recv`` has to return these environments, which :meth:`check_ready` saw."""
        self._sent[ids] = True
        self.receiving += len(ids)

    def end_recv(self, ids: npt.NDArray[np.intp]) -> None:
        """Record that ``recv`` has returned these environments."""
        self._sent[ids] = False
        self.receiving -= len(ids)

    def stepped(
        self,
        ids: npt.NDArray[np.intp] | slice,
        terminated: npt.NDArray[np.bool_],
        truncated: npt.NDArray[np.bool_],
    ) -> None:
        """Record the results of a step."""
        if not self._autoreset:
            self._over[ids] = terminated | truncated
