"""Checks the arguments of the calls of a ``ClusterEnv`` before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from clusterenv.data.checks import items_of
from clusterenv.data.spaces import Column, Layout
from clusterenv.errors import (
    ActionError,
    ActionTypeError,
    ArgumentTypeError,
    ConfigError,
    ResetNeeded,
    shown,
)

__all__ = ["Reset", "action_columns", "env_indices", "reset_arguments"]


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
    """Check the arguments of ``reset(seed=…, options=…)``.

    Parameters
    ----------
    seed, options
        As they were given.
    n
        Number of environments.
    maskable
        Whether the engine can reset only some of them.
    started
        Whether all were reset before.

    Raises
    ------
    ConfigError
        If the arguments are wrong; the message shows a call that is right.
    ResetNeeded
        If some are to be reset before all were.

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


def env_indices(given: Sequence[int] | npt.NDArray[Any] | None, n: int) -> npt.NDArray[np.intp]:
    """Check the ``env_ids`` of ``send(actions, env_ids)``, and return them as an array.

    Raises
    ------
    ActionError
        Unless they are distinct indices below ``n``.

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
    """Return a batch of ``n`` actions as contiguous columns.

    Raises
    ------
    ActionError
        If the actions do not fit the action space.
    """
    try:
        return layout.columns(actions, n)
    except (TypeError, ValueError) as error:
        kind = ActionTypeError if isinstance(error, TypeError) else ActionError
        raise kind(
            f"{error}. The action space of one environment is {layout.space}; "
            "envs.action_space.sample() shows a right one"
        ) from error
