"""Pickling of what travels between processes."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle

from clusterenv.errors import ConfigError, shown

__all__ = ["dumps", "dumps_by_value", "loads"]

loads = pickle.loads


def dumps(value: Any) -> bytes:
    """Pickle a value, with cloudpickle only if pickle cannot."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        return cloudpickle.dumps(value, protocol=5)  # type: ignore[no-any-return]


def dumps_by_value(value: Any, what: str | None = None) -> bytes:
    """Pickle a value of the user's, with the functions and classes of ``__main__`` by value.

    If that fails, raise ``ConfigError``, which calls the value ``what`` or shows its ``repr``.
    """
    try:
        return cloudpickle.dumps(value, protocol=5)  # type: ignore[no-any-return]
    except Exception as error:
        raise ConfigError(
            f"{what or shown(value)} cannot be sent to a worker: {error}. Locks, open files and "
            "environments cannot be pickled: create them on the worker"
        ) from error
