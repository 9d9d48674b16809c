"""What ``ClusterEnv`` and ``Collector`` are called with, checked before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import numpy.typing as npt

from clusterenv.errors import ActionError, ArgumentTypeError, ConfigError, ResetNeeded
from clusterenv.numeric import is_whole
from clusterenv.policies.base import Policy
from clusterenv.stream import SWITCHES
from clusterenv.supervision import EnvFaults, Restarts

__all__ = [
    "Reset",
    "check_collector",
    "check_restarts",
    "check_rule",
    "check_survival",
    "env_indices",
    "pickled",
    "reset_arguments",
]


class Reset(NamedTuple):
    """A reset as the shards take it."""

    seeds: list[int | None]
    """Of every environment."""
    options: dict[str, Any] | None
    mask: npt.NDArray[np.bool_] | None
    """Environments to reset; ``None``: all."""


def reset_arguments(
    seed: Any, options: dict[str, Any] | None, n: int, *, maskable: bool, started: bool
) -> Reset:
    """Return what ``reset(seed=…, options=…)`` of ``n`` environments asks for.

    Parameters
    ----------
    seed, options
        As they were given.
    n
        Environments.
    maskable
        Whether the engine can reset some of them.
    started
        Whether all were reset before.

    Raises
    ------
    ConfigError
        If it cannot be done, with a call that can.
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
    try:
        return [seed if seed is None else operator.index(seed) for seed in given]
    except TypeError as error:
        raise ConfigError(
            f"seed must be an integer or a list of integers, got {given!r}: reset(seed=1)"
        ) from error


def env_indices(given: Sequence[int] | npt.NDArray[Any] | None, n: int) -> npt.NDArray[np.intp]:
    """Return the indices of environments, of ``n``, that ``send(actions, env_ids)`` names.

    Raises
    ------
    ActionError
        If they are no different indices of environments.

    Examples
    --------
    >>> env_indices(None, 3).tolist(), env_indices([2, 0], 3).tolist()
    ([0, 1, 2], [2, 0])
    """
    if given is None:
        return np.arange(n)
    ids = np.asarray(given)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise ActionError(f"env_ids must be a list of env indices, got {given!r}")
    ids = ids.astype(np.intp)  # a copy: the caller may go on to use its own
    if ids.min() < 0 or ids.max() >= n or len(np.unique(ids)) != len(ids):
        raise ActionError(
            f"env_ids must be different indices from 0 to {n - 1}, got {ids.tolist()}"
        )
    return ids


def check_collector(
    policy: Any, horizon: Any, credit: Any, rule: Any, seed: Any, switch: Any, version: Any
) -> None:
    """Raise ``ConfigError`` unless a collector can be made of these."""
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"policy is a {type(policy).__name__}; wrap it: "
            "clusterenv.policies.Categorical(module), Gaussian(module, action_space), "
            "EpsilonGreedy(q_module) or CleanRL(agent)"
        )
    if not is_whole(horizon) or horizon < 1:
        raise ConfigError(f"horizon must be a positive integer, got {horizon!r}: horizon=128")
    if not is_whole(credit) or credit < 2:
        raise ConfigError(
            f"credits must be an integer, at least 2, or shards wait for the head, got {credit!r}: "
            "credits=2"
        )
    if seed is not None and (not is_whole(seed) or seed < 0):
        raise ConfigError(f"seed must be an integer, at least 0, got {seed!r}: seed=1")
    check_rule(rule, policy)
    if not is_whole(version) or version < 0:
        raise ConfigError(f"version must be an integer, at least 0, got {version!r}: version=0")
    if switch not in SWITCHES:
        raise ConfigError(
            f"switch={switch!r} is unknown; a shard changes its policy between fragments, "
            "switch='fragment', or between steps, switch='step'"
        )


def check_rule(rule: Any, policy: Policy) -> None:
    """Raise ``ConfigError`` unless this says when shards pull, and can be asked of the policy."""
    if (
        isinstance(rule, type)
        or not callable(getattr(rule, "should_pull", None))
        or not hasattr(rule, "needs_divergence")
    ):
        raise ConfigError(
            f"sync={rule!r} is no rule, which has should_pull(lag, divergence) and "
            "needs_divergence: sync=clusterenv.Divergence(0.05)"
        )
    if rule.needs_divergence and type(policy).distribution is Policy.distribution:
        raise ConfigError(
            f"sync={rule} compares distributions, and {type(policy).__name__} has none: define "
            "distribution(obs, context), or count versions: sync=clusterenv.Every(4)"
        )


def pickled(policy: Any) -> bytes:
    """Return what holds a policy as a worker gets it.

    Raises
    ------
    ConfigError
        If it cannot be pickled.
    """
    try:
        return cloudpickle.dumps(policy, protocol=5)  # type: ignore[no-any-return]
    except Exception as error:
        raise ConfigError(
            f"the policy cannot be sent to a worker: {error}. Keep locks, files and "
            "environments out of it"
        ) from error


def check_restarts(restarts: Any) -> None:
    """Raise ``ConfigError`` unless this says what to do about lost shards."""
    if not isinstance(restarts, Restarts):
        raise ConfigError(f"restarts={restarts!r} is no rule: restarts=clusterenv.Restarts(5)")


def check_survival(restarts: Any, env_faults: Any, shards: Any, max_shards: Any) -> None:
    """Raise ``ConfigError`` unless these say what to do about losses and faults."""
    check_restarts(restarts)
    if not isinstance(env_faults, EnvFaults):
        raise ConfigError(
            f"env_faults={env_faults!r} is no rule: env_faults=clusterenv.EnvFaults(5)"
        )
    if max_shards is None:
        return
    if not isinstance(max_shards, int) or max_shards < (shards or 1):
        raise ConfigError(
            f"max_shards must be an integer, at least shards={shards}, got {max_shards!r}: "
            f"max_shards={2 * (shards or 1)}"
        )
