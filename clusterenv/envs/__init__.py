"""Engines: groups of environments behind one small interface, with no cluster."""

from __future__ import annotations

from collections.abc import Callable

from clusterenv.envs.base import Engine, EnvDescription, EnvRaised, Infos, Recipe, Slot
from clusterenv.envs.loop import LoopEngine
from clusterenv.envs.native import NativeEngine
from clusterenv.envs.pool import EnvPoolEngine

__all__ = ["ENGINES", "Engine", "EnvDescription", "EnvRaised", "Infos", "Recipe", "Slot", "build"]

ENGINES: dict[str, Callable[[Recipe, int, int], Engine]] = {
    "gymnasium": LoopEngine,
    "native": NativeEngine,
    "envpool": EnvPoolEngine,
}


def build(recipe: Recipe, first: int, count: int) -> Engine:
    """Make ``count`` environments, beginning at global index ``first``."""
    return ENGINES[recipe.engine](recipe, first, count)
