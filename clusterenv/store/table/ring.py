"""Rows in preallocated columns that are used as rings.

An observation is stored once. If a row's next observation is the observation of a later row,
``next`` holds the slot of that row. All other next observations (ends of episodes and of
fragments) are in side slots, behind the slots of the rows.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterenv.data.arrow import RowSpec
from clusterenv.data.batch import Batch
from clusterenv.data.buffer_pool import LARGE, BufferPool
from clusterenv.data.spaces import Column
from clusterenv.store.table.continuation import Continuations
from clusterenv.store.table.schema import Admission, Admitted, TableSchema
from clusterenv.store.table.slots import Block, Ints, NextSlots, RecurrentStates, SideSlots, pieces
from clusterenv.store.table.stacks import FrameHistory, Stack, stacks_of, take_rows

__all__ = ["Ring", "bytes_needed"]

logger = logging.getLogger("clusterenv")
_FULL = 0.9  # of the capacity; a store that holds less because of its side slots warns
_STEP_FIELDS = ("action", "reward")  # in one record with the next slot: every sample needs them


class Ring:
    """``capacity`` rows in columns that ``allocate`` creates, and ``side`` side slots."""

    def __init__(
        self,
        schema: TableSchema,
        capacity: int,
        side: int,
        allocate: Callable[[str, tuple[int, ...], np.dtype[Any]], Column],
        stack: Stack | None = None,
    ) -> None:
        self.schema = schema
        self.capacity = capacity
        self.first = 0
        """Number of the oldest row."""
        self.end = 0
        """Number of the next row, and the count of rows ever added."""
        self.blocks: deque[Block] = deque()
        arrays = {part[0]: allocate(*part) for part in _arrays(schema, capacity, side, stack)}
        self.nbytes = sum(array.nbytes for array in arrays.values())
        self.steps: npt.NDArray[np.void] = arrays["steps"]
        """Records of action, reward and next slot: one memory access instead of three."""
        self.next: Column = self.steps["next"]
        self.columns: dict[str, Column] = {
            name: self.steps[name] if name in _STEP_FIELDS else arrays[name] for name in schema.rows
        }
        self._admission = Admission(schema, capacity, side, stack)
        self._continuations = Continuations()
        self._links = NextSlots(self.next)
        self._side = SideSlots(arrays["side_row"], capacity, ordered=stack is None)
        self._frames: FrameHistory | None = None
        if stack is not None:
            names = self._admission.stacked
            self._frames = FrameHistory(stack, names, arrays["previous"], capacity)
        self._states: RecurrentStates | None = None
        if schema.state:
            states = {name: arrays[f"state.{name}"] for name in schema.state}
            self._states = RecurrentStates(states, arrays["state_at"])
        self._kept = 0  # the oldest row whose columns have not been overwritten
        self._begin = 0  # number of the very first row
        self._warned = False
        self._buffers = BufferPool()
        self._obs_bytes = max(schema.rows[name].nbytes for name in schema.obs)

    def __len__(self) -> int:
        return self.end - self.first

    def start_at(self, row: int) -> None:
        """Start the row numbers of an empty ring at ``row``."""
        self.first = self.end = self._kept = self._begin = row

    @property
    def position(self) -> dict[str, int]:
        """What determines, besides the rows, which of them are evicted next."""
        oldest = self.blocks[0].start if self.blocks else self.first
        return {"first": self.first, "kept": self._kept, "oldest": oldest}

    def resume(self, position: Mapping[str, int]) -> None:
        """Evict the rows that a ring with the same rows had evicted at this position."""
        if self.blocks and self.blocks[0].start == position["first"]:
            self.blocks[0].start = position["oldest"]  # some rows of the batch were evicted
        self.first, self._kept = position["first"], min(self._kept, position["kept"])
        self.evict(position["kept"])

    def release(self) -> None:
        """Drop the arrays, even if a sampler still refers to the ring."""
        self.columns = {}
        self.steps = np.empty(0, self.steps.dtype)
        self.next = np.empty(0, self.next.dtype)
        del self._links, self._side, self._frames, self._states

    def check(self, batch: Batch) -> Admitted:
        """Raise if a batch cannot be added; afterwards, :meth:`add` does not fail."""
        return self._admission.check(batch, self._continuations, not self.end)

    def add(self, batch: Batch, admitted: Admitted) -> Block:
        """Copy a checked batch in, evicting old rows for it."""
        rows, width = batch.num_rows, batch.num_envs
        tail_rows, tail, starts = admitted.tail_rows, admitted.tail, admitted.starts
        frames = self._frames
        self._make_room(rows, admitted.side_slots)
        if frames is not None and starts is not None:
            older_slots = self._side.take(frames.owners(starts, self.end, rows, width))[0]
        owners = self.end + tail_rows
        tail_slots, tail_at = self._side.take(owners)
        block = Block(
            *(self.end, self.end + rows, width),
            *(batch.run, batch.shard, batch.incarnation, batch.policy_version),
            *(owners, tail_slots),
        )
        where = pieces(self.end, rows, self.capacity)
        for (name, column), given in zip(self.columns.items(), admitted.columns, strict=True):
            if name in tail:
                ends = tail[name]
                if frames is not None and name in frames.names:
                    given, ends = frames.stack.newest(given), frames.stack.newest(ends)
                column[tail_at] = ends
            for to, of in where:
                column[to] = given[of]
        self._links.add(block, slice(rows - width, rows) if admitted.whole else tail_rows, where)
        if self._states is not None:
            self._states.add(block, batch.state)
        if frames is not None and starts is not None:
            frames.add(block, batch, starts, older_slots, self.columns)
        continued = self._continuations.add(batch, admitted.envs, block.start, self.first)
        self._links.join(block, *continued)
        self.blocks.append(block)
        self.end += rows
        return block

    def _make_room(self, rows: int, side_slots: int) -> None:
        end = self.end + rows
        kept = max(self._kept, end - self.capacity)
        oldest = self._side.oldest_row(side_slots)
        if oldest > kept:
            kept = oldest
            if end - kept < _FULL * self.capacity and not self._warned:
                self._warned = True
                per_row = (self._side.taken + side_slots) / (end - self._begin)
                logger.warning(
                    f"The store is full with {end - kept:,} of {self.capacity:,} rows: "
                    f"{self._side.size:,} observations have room beside those of rows, and the "
                    f"ends of episodes and fragments need more. For all rows: ReplayStore("
                    f"{self.capacity:_}, side={min(1.0, math.ceil(100 * per_row) / 100):.2f}), "
                    "or collect with a longer horizon."
                )
        self.evict(kept)

    def evict(self, first: int) -> None:
        kept = self._kept = max(self._kept, first)
        self.first = max(self.first, kept)
        while self.blocks and self.blocks[0].end <= kept:
            self.blocks.popleft()
        if self.blocks and kept > self.blocks[0].start:
            # Only whole time rows stay, and a stack of frames needs the rows before it.
            oldest = self.blocks[0]
            times = -(-(kept - oldest.start) // oldest.num_envs)
            times += 0 if self._frames is None else self._frames.older
            self.first = max(self.first, oldest.start + times * oldest.num_envs)
            if self.first >= oldest.end:
                self.first = oldest.end
                self.blocks.popleft()
            else:
                self._links.separate(oldest, self.first)

    def slots(self, rows: Ints) -> Ints:
        return rows % self.capacity

    def observations(self, slots: Column, prefix: str = "") -> dict[str, Column]:
        """Return the observations in these slots; stacks are put together from their frames."""
        columns, names, frames = self.columns, self.schema.obs, self._frames
        if frames is None and slots.size * self._obs_bytes < LARGE:  # the common case
            return {prefix + name: columns[name].take(slots, 0) for name in names}
        found, history = {}, None if frames is None else frames.of(slots)
        for name in names:
            if frames is not None and history is not None and name in frames.names:
                column = frames.stack.join(columns[name], history, self._buffers)
            else:
                column = take_rows(columns[name], slots, self._buffers)
            found[prefix + name] = column
        return found

    def states(self, rows: Ints) -> tuple[dict[str, Column], npt.NDArray[np.bool_]]:
        """Return the recurrent state before these rows, and whether it is known."""
        if self._states is None:
            return {}, np.zeros(len(rows), np.bool_)
        return self._states.of(self.slots(rows))

    def batch(self, block: Block) -> Batch:
        """Return the rows of a block that were not evicted, as they were added."""
        start = max(block.start, self.first)
        rows = np.arange(start, block.end)
        slots = self.slots(rows)
        columns = self.observations(slots)
        for name in self.schema.rows:
            if name not in columns:
                columns[name] = self.columns[name][slots]
        kept = block.tail_rows >= start
        state, known = self.states(rows[: block.num_envs])
        if not known.all():  # the first time row was evicted
            state = {name: column[:0] for name, column in state.items()}
        return Batch(
            {name: columns[name] for name in self.schema.rows},
            block.num_envs,
            tail_rows=block.tail_rows[kept] - start,
            tail=self.observations(block.tail_slots[kept]),
            state=state,
            run=block.run,
            shard=block.shard,
            incarnation=block.incarnation,
            policy_version=block.policy_version,
        )


def _arrays(
    schema: TableSchema, capacity: int, side: int, stack: Stack | None
) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Yield name, shape and dtype of each array."""
    stacks = stacks_of(stack, schema.obs)
    yield "steps", (capacity,), _steps_dtype(schema, capacity + side)
    for name, spec in schema.rows.items():
        if name in _STEP_FIELDS:
            continue
        slots = capacity + side if name in schema.obs else capacity
        shape = stacks[name].frame(spec.shape) if name in stacks else spec.shape
        yield name, (slots, *shape), spec.dtype
    for name, spec in schema.state.items():
        yield f"state.{name}", (side, *spec.shape), spec.dtype
    yield "side_row", (side,), np.dtype(np.int64)
    if schema.state:
        yield "state_at", (capacity,), np.dtype(np.int64)
    if stack is not None:
        yield "previous", (capacity + side,), np.dtype(np.int64)


def bytes_needed(schema: TableSchema, capacity: int, side: int, stack: Stack | None = None) -> int:
    """Return the total size of the arrays."""
    arrays = _arrays(schema, capacity, side, stack)
    return sum(RowSpec(dtype, shape).nbytes for _, shape, dtype in arrays)


def _steps_dtype(schema: TableSchema, slots: int) -> np.dtype[Any]:
    """Return the record of a row's step and the slot of its next observation."""
    link = np.dtype(np.int32 if 2 * slots < np.iinfo(np.int32).max else np.int64)
    names = (*_STEP_FIELDS, "next")
    specs = [*(schema.rows[name] for name in _STEP_FIELDS), RowSpec(link, ())]
    formats = [np.dtype((spec.dtype, spec.shape)) for spec in specs]
    packed = np.dtype({"names": names, "formats": formats}, align=True)
    # NumPy copies records of 16 and 32 bytes with single instructions.
    size = next((size for size in (16, 32) if packed.itemsize <= size), packed.itemsize)
    return np.dtype({"names": names, "formats": formats, "itemsize": size}, align=True)
