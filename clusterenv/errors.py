"""Every error that ClusterEnv raises on purpose.

Each also derives from the exception that Gymnasium or Python raises in the
same situation, so ``except`` clauses written for ``SyncVectorEnv`` still work.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from gymnasium import error as gym_error

__all__ = [
    "ActionError",
    "ActionTypeError",
    "ArgumentTypeError",
    "ClosedError",
    "ClusterEnvError",
    "ConfigError",
    "ConnectionClosed",
    "Diverged",
    "EmptyStore",
    "EnvError",
    "EnvGivenUp",
    "NoWorkers",
    "NothingSent",
    "PolicyError",
    "RatioError",
    "ResetNeeded",
    "ResultsPending",
    "SchedulerLost",
    "SchemaMismatch",
    "SpaceMismatch",
    "StaleBatch",
    "StoreDamaged",
    "StoreInUse",
    "StoreNotWritten",
    "StoreTooLarge",
    "StoreUnreadable",
    "UnknownEnv",
    "WaitTimeout",
    "WorkerLost",
    "WrongProcess",
    "shown",
]


class ClusterEnvError(Exception):
    """Base of all errors raised by ClusterEnv."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)  # some of Gymnasium's want more arguments


class ConfigError(ClusterEnvError, ValueError):
    """An argument or setting that cannot work."""


class ArgumentTypeError(ConfigError, TypeError):
    """An argument of the wrong type."""


class SpaceMismatch(ConfigError, RuntimeError):
    """Environments have spaces that cannot be batched together."""


class Diverged(ConfigError):
    """A policy or learner has become NaN; what would go on from it is spared."""


class UnknownEnv(ClusterEnvError, gym_error.UnregisteredEnv):
    """No environment is registered under this id."""


class NoWorkers(ClusterEnvError, TimeoutError):
    """The cluster did not offer enough workers in time."""


class WorkerLost(ClusterEnvError, ConnectionError):
    """A worker that held a shard is gone."""


class SchedulerLost(ClusterEnvError, ConnectionError):
    """The cluster's scheduler is gone, so nothing can be placed on a worker any more."""


class WrongProcess(ClusterEnvError, RuntimeError):
    """An object was used in a fork of the process that made it."""


class EnvError(ClusterEnvError, RuntimeError):
    """An environment or its factory raised on a worker.

    It also derives from what was raised there, if Python allows it: ``except ValueError`` catches
    the error of an environment that raised ``ValueError``. ``__cause__`` is the environment's own.
    """


class EnvGivenUp(EnvError):
    """An environment failed more often than it may be rebuilt."""


class PolicyError(ClusterEnvError, RuntimeError):
    """A policy raised on a worker, or returned something that cannot be used."""


class ActionError(ClusterEnvError, ValueError):
    """Actions of the wrong number, shape or dtype."""


class ActionTypeError(ActionError, TypeError):
    """Actions that are no batch, or of the wrong dtype."""


class StaleBatch(ClusterEnvError, ValueError):
    """A batch was acted by a policy version older than the store accepts."""


class EmptyStore(ClusterEnvError, LookupError):
    """Rows were asked of a store that holds none."""


class SchemaMismatch(ClusterEnvError, TypeError):
    """A batch has other columns than the store."""


class RatioError(ClusterEnvError, RuntimeError):
    """The store's ratio of samples to rows forbids this now."""


class StoreTooLarge(ClusterEnvError, MemoryError):
    """A store would need more memory, or more of a disk, than there is."""


class StoreInUse(ClusterEnvError, BlockingIOError):
    """Another process has this store's directory open."""


class StoreDamaged(ClusterEnvError, OSError):
    """A file of a store is missing, truncated or altered."""


class StoreNotWritten(ClusterEnvError, OSError):
    """A store could not be written; what was there before still is."""


class StoreUnreadable(ClusterEnvError, OSError):
    """A directory holds no store, or one of another version's format."""


class ResetNeeded(ClusterEnvError, gym_error.ResetNeeded):
    """An environment was stepped before it was reset."""


class NothingSent(ClusterEnvError, gym_error.NoAsyncCallError):
    """Results were asked for, by ``recv`` or ``…_wait``, and nothing had been sent for them."""

    def __init__(self, message: str, name: str = "recv") -> None:
        super().__init__(message)
        self.name = name


class ResultsPending(ClusterEnvError, gym_error.AlreadyPendingCallError):
    """A call was made while another one is under way, or has results to be received."""

    def __init__(self, message: str, name: str = "send") -> None:
        super().__init__(message)
        self.name = name


class WaitTimeout(ClusterEnvError, multiprocessing.TimeoutError, TimeoutError):
    """``reset_wait``, ``step_wait`` or ``call_wait`` had not all results in time."""


class ClosedError(ClusterEnvError, gym_error.ClosedEnvironmentError):
    """The environment was used after it was closed."""


class ConnectionClosed(ClusterEnvError, ConnectionError):
    """The other end of a connection is gone."""


_SHOWN = 200  # characters of a value in a message


def shown(value: Any) -> str:
    """Return a value as an error shows it, not too long.

    Examples
    --------
    >>> shown("x"), len(shown("x" * 5000))
    ("'x'", 201)
    """
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, or an object of the user's
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
