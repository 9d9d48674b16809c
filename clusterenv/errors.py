"""The errors that ClusterEnv raises.

Each also derives from the exception that Gymnasium or Python raises in the same situation, so that
``except`` clauses written for ``SyncVectorEnv`` still work.
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
    """Base of all errors that ClusterEnv raises."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)  # some of Gymnasium's errors take more arguments


class ConfigError(ClusterEnvError, ValueError):
    """An argument or a setting is invalid."""


class ArgumentTypeError(ConfigError, TypeError):
    """An argument has the wrong type."""


class SpaceMismatch(ConfigError, RuntimeError):
    """The spaces of the environments cannot be batched together."""


class Diverged(ConfigError):
    """A policy or learner has NaN or infinite weights, which are neither published nor saved."""


class UnknownEnv(ClusterEnvError, gym_error.UnregisteredEnv):
    """No environment is registered under this id."""


class NoWorkers(ClusterEnvError, TimeoutError):
    """Too few workers connected within the timeout."""


class WorkerLost(ClusterEnvError, ConnectionError):
    """The worker of a shard was lost."""


class SchedulerLost(ClusterEnvError, ConnectionError):
    """The cluster's scheduler was lost, so no shard can be placed."""


class WrongProcess(ClusterEnvError, RuntimeError):
    """An object was used in a fork of the process that created it."""


class EnvError(ClusterEnvError, RuntimeError):
    """An environment, or the function that makes it, raised an exception.

    The error also derives from the type of that exception, if Python allows it: ``except
    ValueError`` catches the error of an environment that raised ``ValueError``. ``__cause__`` is
    the exception itself.
    """


class EnvGivenUp(EnvError):
    """An environment failed more often than ``EnvFaults`` allows."""


class PolicyError(ClusterEnvError, RuntimeError):
    """A policy raised on a worker, or returned an invalid decision."""


class ActionError(ClusterEnvError, ValueError):
    """Actions have the wrong number, shape or dtype."""


class ActionTypeError(ActionError, TypeError):
    """Actions are not a batch, or have the wrong dtype."""


class StaleBatch(ClusterEnvError, ValueError):
    """A batch is from an older policy version than the store accepts."""


class EmptyStore(ClusterEnvError, LookupError):
    """A store without rows was sampled."""


class SchemaMismatch(ClusterEnvError, TypeError):
    """The columns of a batch differ from those of the store."""


class RatioError(ClusterEnvError, RuntimeError):
    """The store's ratio of samples to rows does not allow this call now."""


class StoreTooLarge(ClusterEnvError, MemoryError):
    """A store needs more memory or disk space than is available."""


class StoreInUse(ClusterEnvError, BlockingIOError):
    """Another process has this store's directory open."""


class StoreDamaged(ClusterEnvError, OSError):
    """A file of a store is missing, truncated or modified."""


class StoreNotWritten(ClusterEnvError, OSError):
    """A store could not be written; what was saved before is unchanged."""


class StoreUnreadable(ClusterEnvError, OSError):
    """A directory holds no store, or one in an unknown format."""


class ResetNeeded(ClusterEnvError, gym_error.ResetNeeded):
    """An environment was stepped before it was reset."""


class NothingSent(ClusterEnvError, gym_error.NoAsyncCallError):
    """``recv`` or ``…_wait`` was called, but nothing had been sent."""

    def __init__(self, message: str, name: str = "recv") -> None:
        super().__init__(message)
        self.name = name


class ResultsPending(ClusterEnvError, gym_error.AlreadyPendingCallError):
    """A call was made while another one is pending, or has results to receive."""

    def __init__(self, message: str, name: str = "send") -> None:
        super().__init__(message)
        self.name = name


class WaitTimeout(ClusterEnvError, multiprocessing.TimeoutError, TimeoutError):
    """A ``…_wait`` of an environment, or ``Evaluator.wait``, timed out."""


class ClosedError(ClusterEnvError, gym_error.ClosedEnvironmentError):
    """The environment was used after it was closed."""


class ConnectionClosed(ClusterEnvError, ConnectionError):
    """The other end closed a connection."""


_SHOWN = 200  # characters of a value in a message


def shown(value: Any) -> str:
    """Return the ``repr`` of a value, shortened for an error message.

    Examples
    --------
    >>> shown("x"), len(shown("x" * 5000))
    ("'x'", 201)
    """
    try:
        text = repr(value)
    except Exception:  # an integer with too many digits, or an object of the user
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
