"""Loads ``clusterenv.yaml`` into Dask's configuration and reads settings from it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

from clusterenv.errors import ConfigError, shown

__all__ = ["check", "count", "get", "nbytes", "positive", "seconds"]

_FILE = Path(__file__).with_name("clusterenv.yaml")

dask.config.update_defaults(yaml.safe_load(_FILE.read_text()))


def get(key: str) -> Any:
    """Return the setting ``clusterenv.<key>``."""
    return dask.config.get(f"clusterenv.{key}")


def seconds(key: str, override: float | str | None = None) -> float:
    """Return ``override``, or else the setting ``clusterenv.<key>``, in seconds.

    Raise ``ConfigError`` if it is no time, or longer than the system can wait.
    """
    given = get(key) if override is None else override
    name = f"clusterenv.{key}" if override is None else "timeout"
    return _parsed(name, given, parse_timedelta, threading.TIMEOUT_MAX, "no time: 10, '10s', '5m'")


def positive(key: str) -> float:
    """Return the setting ``clusterenv.<key>``, a time above 0, in seconds."""
    found = seconds(key)
    if found > 0:
        return found
    raise ConfigError(f"clusterenv.{key}={shown(get(key))} must be a time above 0: '1 ms'")


def count(key: str) -> int:
    """Return the setting ``clusterenv.<key>``, a number of at least 1."""
    given = get(key)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return given
    raise ConfigError(f"clusterenv.{key}={shown(given)} must be a whole number of at least 1: 1024")


def nbytes(key: str) -> int:
    """Return the setting ``clusterenv.<key>`` in bytes, or raise ``ConfigError``."""
    return int(_parsed(f"clusterenv.{key}", get(key), parse_bytes, 2**62, "no size: '64 KiB'"))


def check() -> None:
    """Raise ``ConfigError`` if a setting is invalid."""
    for name in get("timeout"):
        seconds(f"timeout.{name}")
    seconds("watch")
    for name in ("message", "extras"):
        nbytes(f"channel.{name}")
    positive("inference.wait")
    for name in ("rows", "groups"):
        count(f"inference.{name}")
    share = get("publish.share")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ConfigError(f"clusterenv.publish.share={shown(share)} is no share of a core: 0.05")
    if get("worker.tune") not in (True, False, "auto"):
        raise ConfigError(
            f"clusterenv.worker.tune={shown(get('worker.tune'))}; one of 'auto', True and False"
        )


def _parsed(name: str, given: Any, parse: Callable[[Any], Any], most: float, fault: str) -> float:
    try:
        found = float(parse(given))
    except Exception:  # Dask's parsers raise all kinds
        found = -1.0
    if 0 <= found < most:
        return found
    raise ConfigError(f"{name}={shown(given)} is {fault}")
