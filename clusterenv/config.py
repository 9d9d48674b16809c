"""Loads ``clusterenv.yaml`` into Dask's configuration and reads settings from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

from clusterenv.errors import ConfigError

__all__ = ["check", "get", "nbytes", "seconds"]

_FILE = Path(__file__).with_name("clusterenv.yaml")

dask.config.update_defaults(yaml.safe_load(_FILE.read_text()))


def get(key: str) -> Any:
    """Return the setting ``clusterenv.<key>``."""
    return dask.config.get(f"clusterenv.{key}")


def seconds(key: str, override: float | str | None = None) -> float:
    """Return ``override``, or else the setting ``clusterenv.<key>``, in seconds.

    Raises
    ------
    ConfigError
        If it is no time.
    """
    value = get(key) if override is None else override
    return _parsed(key, value, lambda: float(parse_timedelta(value)), "'10s', '5m', '1h'")


def nbytes(key: str) -> int:
    """Return the setting ``clusterenv.<key>`` in bytes.

    Raises
    ------
    ConfigError
        If it is no size.
    """
    value = get(key)
    return int(_parsed(key, value, lambda: parse_bytes(value), "'64 KiB', '1 GiB'"))


def check() -> None:
    """Raise ``ConfigError`` if a time or size among the settings cannot be read."""
    for name in get("timeout"):
        seconds(f"timeout.{name}")
    seconds("watch")
    for name in ("message", "extras"):
        nbytes(f"channel.{name}")


def _parsed(key: str, value: Any, parse: Callable[[], float], examples: str) -> float:
    try:
        return parse()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"clusterenv.{key} is {value!r}; it is set as {examples}, for example by "
            f"dask.config.set({{'clusterenv.{key}': …}})"
        ) from error
