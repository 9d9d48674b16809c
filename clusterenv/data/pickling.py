"""Pickling of what travels between processes."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle

from clusterenv.errors import (
    ConfigError,
    shown,
)

__all__ = ["dumps", "dumps_by_value", "loads", "pickled"]


def dumps(value: Any) -> bytes:
    """Pickle a value."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        return cloudpickle.dumps(value, protocol=5)  # type: ignore[no-any-return]


def dumps_by_value(value: Any) -> bytes:
    """Pickle a value whose functions and classes may be of the head's ``__main__``.

    Raises
    ------
    ConfigError
        If it cannot be pickled.
    """
    try:
        return cloudpickle.dumps(value, protocol=5)  # type: ignore[no-any-return]
    except Exception as error:
        raise ConfigError(
            f"{shown(value)} cannot be sent to another process: {error}. Pass numbers, strings, "
            "arrays, and functions that make what they need themselves"
        ) from error


def loads(blob: bytes | bytearray) -> Any:
    """Undo :func:`dumps`."""
    return pickle.loads(blob)


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
