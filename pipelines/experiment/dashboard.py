"""Dask's dashboard for a run that starts its cluster."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import dask

from clusterenv import Collector
from clusterenv.errors import ConfigError
from pipelines.experiment.display import Display

__all__ = ["say_where", "shown"]

ADDRESS = "127.0.0.1:8787"


@contextmanager
def shown(wanted: bool) -> Iterator[None]:
    """Enable the dashboard for local clusters started within the context, if wanted.

    Raises
    ------
    ConfigError
        If the package that draws it is not installed.
    """
    if wanted and importlib.util.find_spec("bokeh") is None:
        raise ConfigError("--dashboard needs a package that is not here: pip install bokeh")
    with dask.config.set({"clusterenv.local.dashboard-address": ADDRESS} if wanted else {}):
        yield


def say_where(collector: Collector, display: Display) -> None:
    """Print the address of the dashboard page, if there is one."""
    if collector.dashboard_link is not None:
        display.say(f"dashboard: {collector.dashboard_link}")
