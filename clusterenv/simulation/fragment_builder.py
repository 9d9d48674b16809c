"""Base of the two fragment builders, and the columns that they write steps into."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from clusterenv.data.fragment import Fragment
from clusterenv.data.spaces import Column, Layout
from clusterenv.errors import ConfigError
from clusterenv.simulation.engines.base import Engine, Slot
from clusterenv.simulation.episodes import EpisodeTracker
from clusterenv.simulation.masks import InfoMask
from clusterenv.simulation.policy_runner import Acting, PolicyRunner
from clusterenv.simulation.space_check import SpaceCheck

__all__ = [
    "STEP_COLUMNS",
    "Block",
    "BuilderInputs",
    "FragmentBuilder",
    "Interrupted",
    "column_of",
]

Block = dict[str, Column]
"""Columns by name, each ``[time, envs, …]``."""
STEP_COLUMNS = ("reward", "terminated", "truncated")
"""What environments return with every step, besides observations."""


class Interrupted(Exception):
    """The current fragment was abandoned on request."""


class BuilderInputs(NamedTuple):
    """What a fragment builder works with."""

    engine: Engine
    runner: PolicyRunner
    horizon: int
    """Time rows of a fragment."""
    obs: list[Column]
    """Observations of the first reset."""
    info_mask: InfoMask
    """Action masks from the infos, those of the first reset included."""
    space_check: SpaceCheck | None
    """Checks what environments return; without it nothing is checked."""


class FragmentBuilder(ABC):
    """Steps environments until a fragment is full; keeps ``horizons`` of steps in memory."""

    def __init__(self, inputs: BuilderInputs, horizons: int = 1) -> None:
        self.interrupted = False
        """Set by another thread: raise :class:`Interrupted` before the next step."""
        engine, self._runner, self._horizon, _, self._info_mask, self._space_check = inputs
        self._engine = engine
        self._n = engine.num_envs
        self._rows = horizons * self._horizon
        self._layout = Layout(engine.description.observation_space)
        self._obs_names = [leaf.name("obs") for leaf in self._layout.leaves]
        self._tracker = EpisodeTracker(self._n)
        self.between: Callable[[], Acting] | None = None
        """Called before every step; returns what the policy acts with from there on."""
        self._check_memory()

    @property
    @abstractmethod
    def waiting_rows(self) -> int:
        """Rows of real steps that are in no fragment yet."""

    @abstractmethod
    def fragment(self, block: Block, fresh: bool) -> Fragment:
        """Step until a fragment is full, and return it.

        ``block`` holds the columns of an earlier fragment to reuse, or is empty. With ``fresh``,
        rows that are in no fragment are dropped, before and after, and counted.
        """

    def _act(self, obs: list[Tensor], block: Block, t: int, finished: Column | None) -> Column:
        """Let the policy act, write its answer to time row ``t`` and return the actions."""
        if self.interrupted:
            raise Interrupted
        if self.between is not None:
            self._runner.acting = self.between()
        allowed = self._info_mask.value
        columns = self._runner.act(obs, allowed, finished)
        action = columns["action"]
        if allowed is not None:
            columns["action_mask"] = allowed
        try:
            for name, values in columns.items():
                block[name][t] = values
        except KeyError:  # the first step of a new block
            for name, values in columns.items():
                column_of(block, name, values, self._rows)[t] = values
        return action

    def _prepare(self, block: Block) -> list[Column]:
        """Allocate the columns of the spaces in a new block; return those of the observations.

        Observations have one time row more, for what follows the last step.
        """
        rows, n = self._rows, self._n
        if "reward" not in block:
            for name, leaf in zip(self._obs_names, self._layout.leaves, strict=True):
                block[name] = np.empty((rows + 1, n, *leaf.shape), leaf.dtype)
            block["reward"] = np.empty((rows, n), np.float32)
            block["terminated"] = np.empty((rows, n), np.bool_)
            block["truncated"] = np.empty((rows, n), np.bool_)
        return [block[name] for name in self._obs_names]

    def _time_rows(
        self, block: Block, obs: Sequence[Column]
    ) -> Iterator[tuple[int, list[Tensor], Slot]]:
        """Yield time rows, the observations to act on and the slot for the step's result.

        Text has a column like arrays, but policies do not get it.
        """
        with torch.inference_mode(False):  # where torch counts in-place changes
            arrays = [column for column in obs if column.dtype != object]
            views = [torch.from_numpy(column[:-1]).unbind(0) for column in arrays]
        current = zip(*views, strict=True)
        following = zip(*(column[1:] for column in obs), strict=True)
        steps = (block[name] for name in STEP_COLUMNS)
        rows = range(self._rows)
        for t, now, after, *step in zip(rows, current, following, *steps, strict=True):
            yield t, list(now), Slot(list(after), *step)

    def _check_memory(self) -> None:
        """Raise ``ConfigError`` if the columns do not fit into the machine's free memory."""
        row = sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in self._layout.leaves)
        needed, free = self._rows * self._n * row, psutil.virtual_memory().available
        if needed > free:
            fits = max(1, self._horizon * free // (2 * needed))
            raise ConfigError(
                f"horizon={self._horizon:,} with {self._n} environments in a shard takes "
                f"{needed / 1e9:,.1f} GB, and the worker has {free / 1e9:,.1f} GB free: "
                f"horizon={fits}, or more shards"
            )


def column_of(block: Block, name: str, values: Column, rows: int) -> Column:
    """Return a column of a block; allocate it if it is missing, for such values."""
    column = block.get(name)
    if column is None:
        column = block[name] = np.empty((rows, *values.shape), values.dtype)
    return column
