"""Loads ``clusterenv.yaml`` into Dask's configuration and reads settings from it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import dask.config
import yaml
from dask.utils import parse_timedelta

from clusterenv.checks import shown
from clusterenv.errors import ConfigError

__all__ = ["get", "seconds"]

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
        If it is no time, or one that the system cannot wait for.
    """
    given = get(key) if override is None else override
    try:
        found = float(parse_timedelta(given))
    except Exception:  # whatever Dask's parser does not expect
        found = -1.0
    if 0 <= found < threading.TIMEOUT_MAX:
        return found
    name = f"clusterenv.{key}" if override is None else "timeout"
    raise ConfigError(f"{name}={shown(given)} is no time: 10, or '10s'")
