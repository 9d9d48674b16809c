"""Observations that are stacks of the last frames; each frame is stored once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clusterenv.data.batch import Batch
from clusterenv.data.buffer_pool import BufferPool
from clusterenv.data.checks import check_names, is_whole
from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError
from clusterenv.store.table.slots import Block, Ints, put

__all__ = ["FrameHistory", "Stack", "stack_starts", "stacks_of", "take_rows"]

_SPOT_CHECKS = 32  # rows of each batch after the first


@dataclass(frozen=True)
class Stack:
    """``size`` frames along ``axis`` of an observation, newest last.

    Parameters
    ----------
    only
        Names of the observations that are stacks, such as ``("obs.image",)``; empty for all.

    Examples
    --------
    >>> Stack(4).frame((4, 84, 84)), Stack(4, axis=-1).frame((84, 84, 4))
    ((84, 84), (84, 84))
    """

    size: int
    axis: int = 0
    only: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not (is_whole(self.size) and self.size >= 2):
            raise ConfigError(f"stack={self.size!r} is no stack; for four frames: stack=4")
        if not is_whole(self.axis):
            raise ConfigError(
                f"axis={self.axis!r} is no axis; frames that lie along the last one: "
                f"Stack({self.size}, axis=-1)"
            )
        only = check_names("only", self.only, f"Stack({self.size}, only=('obs.image',))")
        object.__setattr__(self, "only", only)  # a list is accepted, and compares equal

    def of(self, observations: Sequence[str]) -> list[str]:
        """Return the observations that are stacks.

        Raises
        ------
        ConfigError
            If a name in :attr:`only` is not an observation.
        """
        for name in self.only:
            if name not in observations:
                raise ConfigError(
                    f"stack={self} names {name!r}, but the observations are "
                    f"{', '.join(observations)}: Stack({self.size}, only=({observations[0]!r},))"
                )
        return [name for name in observations if not self.only or name in self.only]

    def frame(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one frame of an observation of this shape."""
        if not -len(shape) <= self.axis < len(shape) or shape[self.axis] != self.size:
            raise ConfigError(
                f"stack={self.size} frames along axis {self.axis}, but observations have the shape "
                f"{shape}; give the axis of the frames: stack=Stack({self.size}, axis=-1), "
                f"or which observations are stacks: Stack({self.size}, only=('obs.image',))"
            )
        axis = self.axis % len(shape)
        return shape[:axis] + shape[axis + 1 :]

    def _frames_first(self, stacked: Column) -> Column:
        """Return a view ``[rows, frames, …]``."""
        return np.moveaxis(stacked, self.axis if self.axis < 0 else self.axis + 1, 1)

    def newest(self, stacked: Column) -> Column:
        """Return the newest frame of each row, as a view."""
        return self._frames_first(stacked)[:, -1]

    def older(self, stacked: Column) -> Column:
        """Return all other frames, oldest first, ``[rows, size - 1, …]``."""
        return self._frames_first(stacked)[:, :-1]

    def history(self, slots: Ints, previous: Ints) -> Ints:
        """Follow ``previous`` back to the slots of all frames, ``[rows, size]``, oldest first."""
        history = np.empty((len(slots), self.size), np.int64)
        history[:, -1] = slots
        for k in range(self.size - 1, 0, -1):
            history[:, k - 1] = previous.take(history[:, k])
        return history

    def join(self, frames: Column, history: Ints, buffers: BufferPool) -> Column:
        """Return the stacks of the frames in ``history``."""
        joined = take_rows(frames, history, buffers)
        if self.axis == 0:
            return joined
        moved = np.moveaxis(joined, 1, self.axis if self.axis < 0 else self.axis + 1)
        out = buffers.empty(moved.shape, moved.dtype)
        out[...] = moved
        return out

    def check(self, batch: Batch, name: str, thorough: bool) -> None:
        """Raise unless stacks continue those of the rows before: all of them, or only some."""
        stacks, step = self._frames_first(batch.flat(name)), batch.flat("step")
        width = batch.num_envs
        rows = np.flatnonzero(step[width:] > 0) + width
        if not thorough and len(rows) > _SPOT_CHECKS:
            rows = rows[:: len(rows) // _SPOT_CHECKS]
        ends = batch.tail_rows if thorough else batch.tail_rows[:_SPOT_CHECKS]
        pairs = [
            (stacks[rows], stacks[rows - width], rows),
            (self._frames_first(batch.tail[name])[: len(ends)], stacks[ends], ends),
        ]
        for after, before, at in pairs:
            differs = (after[:, :-1] != before[:, 1:]).any(tuple(range(1, after.ndim)))
            if differs.any():
                row = at[np.argmax(differs)]
                raise ConfigError(
                    f"{name} of environment {batch.flat('env')[row]} at step {step[row]} does not "
                    f"go on from the stack before it, so stack={self.size} would change it; leave "
                    "stack= out"
                )


def stacks_of(stack: Stack | None, observations: Sequence[str]) -> dict[str, Stack]:
    """Return the observations that are stacks; none of them without ``stack``."""
    return {} if stack is None else dict.fromkeys(stack.of(observations), stack)


def take_rows(column: Column, rows: Column, buffers: BufferPool) -> Column:
    """Return the given rows of a column, which may repeat."""
    out = buffers.empty((*rows.shape, *column.shape[1:]), column.dtype)
    # The rows are valid; in any other mode NumPy writes to a temporary buffer first.
    return column.take(rows, axis=0, out=out, mode="clip")


def stack_starts(batch: Batch) -> Ints:
    """Return the rows whose stack does not continue the row before."""
    begins = batch.flat("step") == 0
    begins[: batch.num_envs] = True
    return np.flatnonzero(begins)


class FrameHistory:
    """The slot ``previous`` to each frame, for the observations ``names`` that are stacks.

    The older frames of a stack that does not continue the row before are in side slots.
    """

    def __init__(self, stack: Stack, names: Sequence[str], previous: Ints, capacity: int) -> None:
        self.stack = stack
        self.names = names
        self.older = stack.size - 1
        """Frames of a stack besides the newest."""
        self._previous = previous
        self._capacity = capacity

    def owners(self, starts: Ints, first: int, rows: int, width: int) -> Ints:
        """Return the last row that needs each older frame of the rows ``starts`` of a batch."""
        last = np.minimum(starts + (self.older - 1) * width, rows - 1)
        return first + np.repeat(last, self.older)

    def add(
        self, block: Block, batch: Batch, starts: Ints, slots: Ints, columns: Mapping[str, Column]
    ) -> None:
        """Store the older frames of the rows ``starts`` in side slots, and link all frames."""
        slots = slots.reshape(len(starts), self.older)
        previous = (np.arange(block.start, block.end) - block.num_envs) % self._capacity
        for name in self.names:
            columns[name][slots] = self.stack.older(batch.flat(name)[starts])
        self._previous[slots[:, 1:]] = slots[:, :-1]
        self._previous[slots[:, 0]] = slots[:, 0]
        previous[starts] = slots[:, -1]
        put(self._previous, block.start, previous, self._capacity)
        self._previous[block.tail_slots] = block.tail_rows % self._capacity

    def of(self, slots: Ints) -> Ints:
        """Return the slots of all frames of the stacks in ``slots``, ``[slots, size]``."""
        return self.stack.history(slots, self._previous)
