"""Decides which calls of a ``ClusterEnv`` are allowed now, and checks their arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium.vector.async_vector_env import AsyncState

from clusterenv.data.checks import items_of
from clusterenv.data.spaces import Column, Layout
from clusterenv.errors import (
    ActionError,
    ActionTypeError,
    ArgumentTypeError,
    ConfigError,
    NothingSent,
    ResetNeeded,
    ResultsPending,
    shown,
)
from clusterenv.head.vector.env_groups import EnvIds

__all__ = ["AsyncState", "Calls", "action_columns", "env_indices", "reset_arguments"]

Finish = Callable[[], Any]
"""Returns the result of a call, after every shard has answered."""

_IDLE = AsyncState.DEFAULT
_NEVER_RESET = "actions before reset(): call obs, info = envs.reset(seed=1) first"


class Calls:
    """The pending calls of a ``ClusterEnv``, and the state of its environments.

    As in ``AsyncVectorEnv``, one of ``reset_async``, ``step_async`` and ``call_async`` can be
    pending, until its ``…_wait`` is called. Otherwise ``send`` and ``recv`` address environments
    one by one. With ``autoreset`` environments reset themselves at the end of an episode.
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

    def check_received(self, call: str, ids: EnvIds | slice = slice(None)) -> None:
        """Raise ``ResultsPending`` if ``recv`` has still to return any of these environments."""
        self.check_idle(call)
        if self.receiving and self._sent[ids].any():
            waiting = np.flatnonzero(self._sent).tolist()
            raise ResultsPending(
                f"{call}() while environments {waiting} have results to be received: "
                "call recv() first"
            )

    def check_ready(self, call: str, ids: EnvIds | slice = slice(None)) -> None:
        """Raise ``ResultsPending`` or ``ResetNeeded`` unless these environments can be stepped."""
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

        Raises ``NothingSent`` if no call, or another one, is pending.
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

    def begin_recv(self, ids: EnvIds) -> None:
        """Record that ``recv`` has to return these environments, which :meth:`check_ready` saw."""
        self._sent[ids] = True
        self.receiving += len(ids)

    def end_recv(self, ids: EnvIds) -> None:
        """Record that ``recv`` has returned these environments."""
        self._sent[ids] = False
        self.receiving -= len(ids)

    def stepped(
        self,
        ids: EnvIds | slice,
        terminated: npt.NDArray[np.bool_],
        truncated: npt.NDArray[np.bool_],
    ) -> None:
        """Record the results of a step."""
        if not self._autoreset:
            self._over[ids] = terminated | truncated


class Reset(NamedTuple):
    """The checked arguments of a reset."""

    seeds: list[int | None]
    """One for every environment."""
    options: dict[str, Any] | None
    mask: npt.NDArray[np.bool_] | None
    """Environments to reset; ``None``: all."""


def reset_arguments(
    seed: Any, options: dict[str, Any] | None, n: int, *, maskable: bool, started: bool
) -> Reset:
    """Check the arguments of ``reset(seed=…, options=…)`` of ``n`` environments.

    ``maskable`` says whether the engine can reset only some of them, ``started`` whether all were
    reset before.

    Examples
    --------
    >>> reset_arguments(7, None, 2, maskable=True, started=False).seeds
    [7, 8]
    """
    if seed is None:
        seeds: list[int | None] = [None] * n
    elif isinstance(seed, (int, np.integer)):
        seeds = [int(seed) + index for index in range(n)]
    else:
        seeds = _seeds(seed)
    if any(item is not None and item < 0 for item in seeds):
        raise ConfigError(f"seeds must not be negative, got {seed!r}: reset(seed=1)")
    if len(seeds) != n:
        raise ConfigError(f"reset(seed=[…]) needs {n} seeds, one per environment, got {len(seeds)}")
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(
            f"options must be a dictionary, got {shown(options)}: reset(options={{'level': 3}})"
        )
    if options is None or "reset_mask" not in options:
        return Reset(seeds, options, None)
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        got = f"one of {mask.dtype}" if isinstance(mask, np.ndarray) else repr(mask)
        raise ArgumentTypeError(
            f"options['reset_mask'] must be a NumPy array of {n} booleans, got {got}"
        )
    if mask.shape != (n,):
        raise ConfigError(
            f"options['reset_mask'] must be a NumPy array of {n} booleans, got {mask!r}"
        )
    if not mask.any():
        raise ConfigError("options['reset_mask'] selects no environment")
    options = {key: options[key] for key in options if key != "reset_mask"}
    if mask.all():
        return Reset(seeds, options, None)
    if not maskable:
        raise ConfigError(
            "this engine resets all environments at once; reset_mask needs engine='gymnasium'"
        )
    if not started:
        raise ResetNeeded("the first reset() must be of all environments, without reset_mask")
    return Reset(seeds, options, mask)


def _seeds(given: Any) -> list[int | None]:
    seeds = items_of(given)
    try:
        if seeds is None:
            raise TypeError(f"{type(given).__name__} is not iterable")
        return [seed if seed is None else operator.index(seed) for seed in seeds]
    except TypeError as error:
        raise ConfigError(
            f"seed must be an integer or a list of integers, got {shown(given)}: reset(seed=1)"
        ) from error


def env_indices(given: Sequence[int] | npt.NDArray[Any] | None, n: int) -> EnvIds:
    """Check that the ``env_ids`` of ``send`` are distinct indices below ``n``; return an array.

    Examples
    --------
    >>> env_indices(None, 3).tolist(), env_indices([2, 0], 3).tolist()
    ([0, 1, 2], [2, 0])
    """
    if given is None:
        return np.arange(n)
    try:
        ids = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):  # nested lists, or a tensor of another kind
        ids = np.asarray(None)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise ActionError(
            f"env_ids must be a list of env indices, got {shown(given)}: send(actions, [0, 1])"
        )
    ids = ids.astype(np.intp)  # a copy: the caller may change its own
    if ids.min() < 0 or ids.max() >= n or len(np.unique(ids)) != len(ids):
        raise ActionError(
            f"env_ids must be different indices from 0 to {n - 1}, got {ids.tolist()}"
        )
    return ids


def action_columns(layout: Layout, actions: Any, n: int) -> list[Column]:
    """Return a batch of ``n`` actions as contiguous columns; raise ``ActionError`` if none fit."""
    try:
        return layout.columns(actions, n)
    except (TypeError, ValueError) as error:
        kind = ActionTypeError if isinstance(error, TypeError) else ActionError
        raise kind(
            f"{error}. The action space of one environment is {layout.space}; "
            "envs.action_space.sample() shows a right one"
        ) from error
