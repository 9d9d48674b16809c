"""Columns that steps are written into, time row by time row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import psutil
import torch
from torch import Tensor

from clusterenv.data.spaces import Column, Layout
from clusterenv.errors import ConfigError
from clusterenv.simulation.engines import Slot

__all__ = ["GIVEN", "TAKEN", "Block", "check_memory", "prepare", "room", "time_rows"]

Block = dict[str, Column]
"""Columns by name, each ``[time, envs, …]``."""
GIVEN = ("reward", "terminated", "truncated")
"""What environments give with every step, besides observations."""
TAKEN = {
    *("obs", "next_obs", "action", "action_mask", *GIVEN),
    *("env", "episode", "step", "version", "run", "shard", "incarnation"),
}
"""Names of columns that rows have, or get where they are written: none for a policy's own."""


def check_memory(layout: Layout, rows: int, n: int, horizon: int) -> None:
    """Raise ``ConfigError`` if this machine has no memory for so many time rows."""
    row = sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in layout.leaves)
    needed, free = rows * n * row, psutil.virtual_memory().available
    if needed > free:
        fits = max(1, horizon * free // (2 * needed))
        raise ConfigError(
            f"horizon={horizon:,} with {n} environments in a shard takes {needed / 1e9:,.1f} GB, "
            f"and the worker has {free / 1e9:,.1f} GB free: horizon={fits}, or more shards"
        )


def prepare(block: Block, layout: Layout, rows: int, n: int) -> list[Column]:
    """Make sure of the columns that the spaces ask for; return those of the observations.

    Observations have one time row more: what follows the last step.
    """
    names = [leaf.name("obs") for leaf in layout.leaves]
    if "reward" not in block:
        for name, leaf in zip(names, layout.leaves, strict=True):
            block[name] = np.empty((rows + 1, n, *leaf.shape), leaf.dtype)
        block["reward"] = np.empty((rows, n), np.float32)
        block["terminated"] = np.empty((rows, n), np.bool_)
        block["truncated"] = np.empty((rows, n), np.bool_)
    return [block[name] for name in names]


def room(block: Block, name: str, values: Column, rows: int) -> Column:
    """Return a column, made with the first ``values`` that go into it."""
    column = block.get(name)
    if column is None:
        column = block[name] = np.empty((rows, *values.shape), values.dtype)
    return column


def time_rows(
    block: Block, obs: Sequence[Column], span: range
) -> Iterator[tuple[int, list[Tensor], Slot]]:
    """Yield time rows, the observations to act on and where the step's result goes.

    A policy acts on arrays; text is written like them, and no policy gets it.
    """
    here, after = slice(span.start, span.stop), slice(span.start + 1, span.stop + 1)
    with torch.inference_mode(False):  # so that torch counts whoever changes them
        arrays = [column for column in obs if column.dtype != object]
        views = [torch.from_numpy(column[here]).unbind(0) for column in arrays]
    tensors = zip(*views, strict=True)
    following = zip(*(column[after] for column in obs), strict=True)
    flags = (block[name][here] for name in GIVEN)
    for t, current, beyond, *flag in zip(span, tensors, following, *flags, strict=True):
        yield t, list(current), Slot(list(beyond), *flag)
