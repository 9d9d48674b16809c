"""Which calls of a ``ClusterEnv`` may be made when: one after the other, and in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector.async_vector_env import AsyncState

from clusterenv.errors import NothingSent, ResetNeeded, ResultsPending

__all__ = ["AsyncState", "Calls", "Finish"]

Finish = Callable[[], Any]
"""Returns the result of a call, once every shard has answered."""

_IDLE = AsyncState.DEFAULT
_NEVER_RESET = "actions before reset(): call obs, info = envs.reset(seed=1) first"


class Calls:
    """The calls under way, and what the environments were last asked for.

    As in ``AsyncVectorEnv``, one of ``reset_async``, ``step_async`` and ``call_async`` can be under
    way, until its ``…_wait`` is called. Otherwise ``send`` and ``recv`` address environments one by
    one.

    Parameters
    ----------
    num_envs
        Environments.
    autoreset
        Whether episodes that are over begin again by themselves.
    """

    def __init__(self, num_envs: int, *, autoreset: bool) -> None:
        self.state = _IDLE
        self._finish: Finish | None = None
        self.sent = np.zeros(num_envs, np.bool_)
        """Environments whose results :meth:`ClusterEnv.recv` has still to return."""
        self._autoreset = autoreset
        self._over = np.zeros(num_envs, np.bool_)  # wait for a reset; without autoreset only
        self._reset_first: str | None = _NEVER_RESET

    @property
    def started(self) -> bool:
        """Whether all environments were reset, and nothing was lost since."""
        return self._reset_first is None

    # What may be called now

    def check_idle(self, call: str) -> None:
        """Raise ``ResultsPending`` if a call is under way that ``…_wait`` has to finish."""
        if self.state is not _IDLE:
            pending = self.state.value
            raise ResultsPending(
                f"Calling `{call}` while waiting for a pending call to `{pending}` to complete: "
                f"call envs.{pending}_wait() first",
                pending,
            )

    def check_received(self, call: str, ids: npt.NDArray[np.intp] | slice = slice(None)) -> None:
        """Raise ``ResultsPending`` if any result of these environments is to be received."""
        self.check_idle(call)
        if self.sent[ids].any():
            waiting = np.flatnonzero(self.sent).tolist()
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
        if self.state is not _IDLE or self.sent[ids].any():
            self.check_received(call, ids)
        if self._reset_first is not None:
            raise ResetNeeded(self._reset_first)
        if not self._autoreset and self._over[ids].any():
            over = np.flatnonzero(self._over).tolist()
            raise ResetNeeded(
                f"the episodes of environments {over} are over and autoreset_mode is DISABLED: "
                "call envs.reset(options={'reset_mask': terminated | truncated}) first"
            )

    # What has been called

    def begin(self, state: AsyncState, finish: Finish) -> None:
        """Note a call that its ``…_wait`` will finish."""
        self.state, self._finish = state, finish

    def end(self, state: AsyncState) -> Finish:
        """Return what finishes the call under way.

        Raises
        ------
        NothingSent
            If there is none, or another one.
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
        """Note that the results of a call were not waited for, and are lost."""
        if state is not AsyncState.WAITING_CALL:
            self._reset_first = (
                f"{state.value}_wait() has timed out, and nobody saw what became of the "
                "environments: call obs, info = envs.reset() first"
            )

    def reset(self, mask: npt.NDArray[np.bool_] | None) -> None:
        """Note that all environments, or those of a mask, are being reset."""
        self.sent[:] = False
        self._over[slice(None) if mask is None else mask] = False
        self._reset_first = None

    def stepped(
        self,
        ids: npt.NDArray[np.intp] | slice,
        terminated: npt.NDArray[np.bool_],
        truncated: npt.NDArray[np.bool_],
    ) -> None:
        """Note the results of a step."""
        if not self._autoreset:
            self._over[ids] = terminated | truncated
