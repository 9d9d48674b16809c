"""What ``ClusterEnv`` and ``Collector`` are called with, checked before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import numpy.typing as npt

from clusterenv.checks import check_choice, check_whole, items_of, shown
from clusterenv.env_loop import TEXT
from clusterenv.errors import ActionError, ArgumentTypeError, ConfigError, ResetNeeded
from clusterenv.policies.base import Policy
from clusterenv.stream import SWITCHES
from clusterenv.supervision import EnvFaults, Restarts

__all__ = [
    "Reset",
    "check_collector",
    "check_counts",
    "check_restarts",
    "check_rule",
    "check_shards",
    "check_survival",
    "env_indices",
    "pickled",
    "reset_arguments",
]

_MOST_ENVS = 2**20
_MOST_SHARDS = 2**16
_MOST_TIME_ROWS = 2**20
_MOST_CREDITS = 1024
_MOST_VERSION = 2**30


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
    try:
        ids = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):  # nested lists, or a tensor of another kind
        ids = np.asarray(None)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise ActionError(
            f"env_ids must be a list of env indices, got {shown(given)}: send(actions, [0, 1])"
        )
    ids = ids.astype(np.intp)  # a copy: the caller may go on to use its own
    if ids.min() < 0 or ids.max() >= n or len(np.unique(ids)) != len(ids):
        raise ActionError(
            f"env_ids must be different indices from 0 to {n - 1}, got {ids.tolist()}"
        )
    return ids


def check_collector(
    policy: Any,
    horizon: Any,
    credit: Any,
    rule: Any,
    seed: Any,
    switch: Any,
    version: Any,
    text: Any,
) -> None:
    """Raise ``ConfigError`` unless a collector can be made of these."""
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"policy is a {type(policy).__name__}; wrap it: "
            "clusterenv.policies.Categorical(module), Gaussian(module, action_space), "
            "EpsilonGreedy(q_module) or CleanRL(agent)"
        )
    check_whole("horizon", horizon, "horizon=128", least=1, most=_MOST_TIME_ROWS)
    why = "with one a shard waits for the head; each is a fragment in the head's memory"
    check_whole("credits", credit, "credits=2", least=2, most=_MOST_CREDITS, why=why)
    if seed is not None:
        check_whole("seed", seed, "seed=1")
    check_rule(rule, policy)
    why = "rows keep it in 32 bits, and it counts on from there"
    check_whole("version", version, "version=0", most=_MOST_VERSION, why=why)
    right = "switch='fragment' changes the policy between fragments, switch='step' between steps"
    check_choice("switch", switch, SWITCHES, right)
    right = "text='keep' makes it a column of strings, text='drop' leaves it out"
    check_choice("text", text, TEXT, right)


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


def check_counts(num_envs: Any, shards: Any) -> None:
    """Raise ``ConfigError`` unless so many environments can be split into so many shards."""
    check_whole("num_envs", num_envs, "make_vec(env, num_envs=8)", least=1, most=_MOST_ENVS)
    if shards is None:
        return
    check_shards("shards", shards, "make_vec(env, 8, shards=2)")
    if num_envs < shards:
        raise ConfigError(
            f"num_envs={num_envs} is less than shards={shards}: every shard needs an environment; "
            f"make_vec(…, num_envs={shards}, shards={shards}) or shards={num_envs}"
        )


def check_shards(name: str, shards: Any, right: str) -> None:
    """Raise ``ConfigError`` unless this is a number of shards."""
    check_whole(name, shards, right, least=1, most=_MOST_SHARDS)


def check_survival(restarts: Any, env_faults: Any, shards: int | None, max_shards: Any) -> None:
    """Raise ``ConfigError`` unless these say what to do about losses and faults."""
    check_restarts(restarts)
    if not isinstance(env_faults, EnvFaults):
        raise ConfigError(
            f"env_faults={env_faults!r} is no rule: env_faults=clusterenv.EnvFaults(5)"
        )
    if max_shards is None:
        return
    least = shards or 1
    check_shards("max_shards", max_shards, f"max_shards={2 * least}")
    if max_shards < least:
        raise ConfigError(
            f"max_shards must be at least shards={least}, got {max_shards}: max_shards={2 * least}"
        )
