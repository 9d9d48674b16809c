"""The registry of engines; :mod:`~clusterenv.simulation.engines.base` defines what an engine is."""

from __future__ import annotations

from collections.abc import Callable

from clusterenv.simulation.engines.base import Engine, Recipe
from clusterenv.simulation.engines.envpool import EnvPoolEngine
from clusterenv.simulation.engines.gymnasium import GymnasiumEngine
from clusterenv.simulation.engines.native import NativeEngine

__all__ = ["ENGINES", "build"]

ENGINES: dict[str, Callable[[Recipe, int, int], Engine]] = {
    "gymnasium": GymnasiumEngine,
    "native": NativeEngine,
    "envpool": EnvPoolEngine,
}


def build(recipe: Recipe, first: int, count: int) -> Engine:
    """Make ``count`` environments, starting at global index ``first``."""
    return ENGINES[recipe.engine](recipe, first, count)
