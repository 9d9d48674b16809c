"""Loads ``clusterenv.yaml`` into Dask's configuration and reads settings from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.config
import yaml
from dask.utils import parse_timedelta

__all__ = ["get", "seconds"]

_FILE = Path(__file__).with_name("clusterenv.yaml")

dask.config.update_defaults(yaml.safe_load(_FILE.read_text()))


def get(key: str) -> Any:
    """Return the setting ``clusterenv.<key>``."""
    return dask.config.get(f"clusterenv.{key}")


def seconds(key: str, override: float | str | None = None) -> float:
    """Return ``override``, or else the setting ``clusterenv.<key>``, in seconds."""
    return float(parse_timedelta(get(key) if override is None else override))
