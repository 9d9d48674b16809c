"""Turns a failure on a worker into an exception at the head, which is also of its own type."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Mapping
from typing import Any

from clusterenv.data.pickling import loads
from clusterenv.errors import ConfigError, EnvError, EnvGivenUp, PolicyError
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.simulation.decisions import PolicyFault
from clusterenv.transport.messages import Failure

__all__ = ["env_error", "raised_by_env"]

# Python itself acts on these: a loop ends, a process exits.
_CONTROL_FLOW = (StopIteration, StopAsyncIteration)


def raised_by_env(kind: type[EnvError], message: str, cause: BaseException | None) -> EnvError:
    """Return an error of a kind that is also of its cause's type and has its attributes.

    Examples
    --------
    >>> error = raised_by_env(EnvError, "environment 3 raised in step.", KeyError("level"))
    >>> isinstance(error, EnvError), isinstance(error, KeyError), str(error)
    (True, True, 'environment 3 raised in step.')
    """
    if cause is None:
        return kind(message)
    error = _make(kind, type(cause), message, _attributes(cause))
    error.__cause__ = cause
    return error


def _make(
    kind: type[EnvError],
    raised: type[BaseException],
    message: str,
    attributes: Mapping[str, Any],
) -> EnvError:
    error = _derived(kind, raised)(message)  # type: ignore[arg-type]  # classes are hashable
    for name, value in attributes.items():
        with contextlib.suppress(Exception):  # a read-only one
            setattr(error, name, value)
    return error


def _attributes(error: BaseException) -> dict[str, Any]:
    """Return the attributes that its class adds to those of every exception."""
    found: dict[str, Any] = {}
    for base in type(error).__mro__:
        if base in (Exception, BaseException):
            break
        for name, member in vars(base).items():
            kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)  # errno, __slots__
            if isinstance(member, kinds) and not name.startswith("__"):
                with contextlib.suppress(AttributeError):  # it was never set
                    found[name] = getattr(error, name)
    return found | vars(error)


@functools.cache
def _derived(kind: type[EnvError], raised: type[BaseException]) -> type[EnvError]:
    """Return a class that derives from ``kind`` and from ``raised``, or its nearest possible base.

    Nothing of ``raised`` runs: its ``__init__`` may want other arguments.
    """

    def reduce(self: EnvError) -> tuple[Any, ...]:
        return _make, (kind, raised, str(self), _attributes(self))

    for base in raised.__mro__:
        if issubclass(kind, base) or not issubclass(base, Exception):
            break
        if issubclass(base, _CONTROL_FLOW):
            continue
        members = {
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
            "__str__": BaseException.__str__,
            "__repr__": BaseException.__repr__,
            "__setattr__": BaseException.__setattr__,
            "__reduce__": reduce,
        }
        try:
            derived = type(f"{kind.__name__}[{base.__name__}]", (kind, base), members)
            derived("a message")
            return derived
        except Exception:  # their instances have different layouts, or it forbids subclasses
            continue
    return kind


def env_error(handle: ShardHandle | str, failure: Failure) -> Exception:
    """Return the exception that a failure on a worker becomes at the head.

    ``handle`` names the environments: those of a shard, or others.
    """
    cause: BaseException | None = None
    if failure.error is not None:
        with contextlib.suppress(Exception):  # its class may not exist here
            cause = loads(failure.error)
    if isinstance(cause, ConfigError):
        return cause
    if failure.doing == "act":
        what = str(cause) if isinstance(cause, PolicyFault) else failure.traceback.splitlines()[-1]
        fault = PolicyError(f"{what} ({handle})\n\nOn the worker:\n{failure.traceback.rstrip()}")
        fault.__cause__ = cause
        return fault
    which = "an environment" if failure.env is None else f"environment {failure.env}"
    missing = isinstance(cause, ImportError)
    hint = "\nIs the package installed on the workers?" if missing else ""
    note = f"\n{failure.note}" if failure.note else ""
    return raised_by_env(
        EnvGivenUp if failure.note else EnvError,
        f"{which} of {handle} raised in {failure.doing}.{hint}{note}\n\n"
        f"On the worker:\n{failure.traceback.rstrip()}",
        cause,
    )
