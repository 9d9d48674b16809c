"""The replay store's rows: preallocated columns, used as rings.

A row has a number that never repeats; row ``r`` lies in slot ``r % capacity``. An observation
is stored once: where a row's next observation is the observation of a later row, ``next`` says
in which slot; the true next observations of all other rows (ends of episodes, ends of
fragments) lie on the side, behind the slots of rows.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterenv.data.batch import Batch
from clusterenv.data.buffer_pool import LARGE, BufferPool
from clusterenv.data.spaces import Column
from clusterenv.store.table.admission import Admission, Admitted
from clusterenv.store.table.links import Links
from clusterenv.store.table.specs import Spec, Specs
from clusterenv.store.table.stacks import Stack, take_rows

__all__ = [
    "STEP_COLUMNS",
    "Allocate",
    "Block",
    "Ints",
    "Ring",
    "bytes_needed",
]

logger = logging.getLogger("clusterenv")
Ints = npt.NDArray[np.int64]
_MOST = 0.9  # of the capacity; a store that holds less for want of room beside rows says so
STEP_COLUMNS = ("action", "reward", "terminated", "truncated")
"""What every sample has of a row besides its observations."""
_RECORD = ("action", "reward")  # with the next slot: 16 bytes of most environments' rows
Allocate = Callable[[str, tuple[int, ...], np.dtype[Any]], Column]
Pieces = list[tuple[slice, slice]]


def _steps_dtype(specs: Specs, slots: int) -> np.dtype[Any]:
    """Return a record of a row's step and the slot of its next observation."""
    link = np.dtype(np.int32 if 2 * slots < np.iinfo(np.int32).max else np.int64)
    fields: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = [
        (name, specs.rows[name].dtype, specs.rows[name].shape) for name in _RECORD
    ]
    dtype = np.dtype([*fields, ("next", link, ())], align=True)
    # NumPy copies records of these sizes by single instructions.
    size = next((size for size in (16, 32) if dtype.itemsize <= size), dtype.itemsize)
    names = list(dtype.names or ())
    offsets = [dtype.fields[name][1] for name in names] if dtype.fields else []
    formats = [dtype[name] for name in names]
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}, align=True
    )


def _arrays(
    specs: Specs, capacity: int, side: int, stack: Stack | None
) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Yield name, shape and dtype of every array of a ring."""
    stacked = [] if stack is None else stack.of(list(specs.obs))
    yield "steps", (capacity,), _steps_dtype(specs, capacity + side)
    for name, spec in specs.rows.items():
        if name in _RECORD:
            continue
        shape, slots = spec.shape, capacity
        if name in specs.obs:
            slots += side
            shape = stack.frame(shape) if stack is not None and name in stacked else shape
        yield name, (slots, *shape), spec.dtype
    for name, spec in specs.state.items():
        yield f"state.{name}", (side, *spec.shape), spec.dtype
    yield "side_row", (side,), np.dtype(np.int64)
    if specs.state:
        yield "state_at", (capacity,), np.dtype(np.int64)
    if stack is not None:
        yield "previous", (capacity + side,), np.dtype(np.int64)


def bytes_needed(specs: Specs, capacity: int, side: int, stack: Stack | None = None) -> int:
    """Return the bytes of a ring's arrays."""
    arrays = _arrays(specs, capacity, side, stack)
    return sum(Spec(dtype, shape).nbytes for _, shape, dtype in arrays)


@dataclass(slots=True)
class Block:
    """The rows of one batch: ``start`` to ``end``, ``num_envs`` in each time row."""

    start: int
    end: int
    num_envs: int
    run: int
    shard: int
    incarnation: int
    policy_version: int
    tail_rows: Ints
    """Rows whose next observation was given with the batch, by number, ascending."""
    tail_slots: Ints
    rejoined: tuple[Ints, Ints] | None = None
    """Ends of tracks that go on with an earlier row, where another track begins, and which."""


class Ring:
    """Rows in preallocated columns; the oldest make room for the newest.

    Parameters
    ----------
    specs
        Columns.
    capacity
        Rows held at most.
    side
        Observations held besides those of rows.
    allocate
        Makes the arrays: in memory, or in files.
    stack
        How observations are stacked from frames; each frame is then stored once.
    """

    def __init__(
        self, specs: Specs, capacity: int, side: int, allocate: Allocate, stack: Stack | None = None
    ) -> None:
        self.specs = specs
        self.capacity = capacity
        self.side = side
        self.stack = stack
        self._admission = Admission(specs, capacity, side, stack)
        self._stacked = self._admission.stacked
        arrays = {
            name: allocate(name, shape, dtype)
            for name, shape, dtype in _arrays(specs, capacity, side, stack)
        }
        self.steps: npt.NDArray[np.void] = arrays["steps"]
        """What every sample needs of a row, side by side: one look at memory instead of three."""
        self.columns: dict[str, Column] = {
            name: self.steps[name] if name in _RECORD else arrays[name] for name in specs.rows
        }
        self.state: dict[str, Column] = {name: arrays[f"state.{name}"] for name in specs.state}
        self.next: Column = self.steps["next"]
        self._side_row: Ints = arrays["side_row"]
        self._state_at: Ints | None = arrays.get("state_at")
        self._previous: Ints | None = arrays.get("previous")
        self.nbytes = sum(array.nbytes for array in arrays.values())
        self.first = 0
        """Number of the oldest row."""
        self.end = 0
        """Number of the next row; also rows ever added."""
        self._kept = 0  # the oldest row whose columns have not been overwritten
        self._side_end = 0
        self._side_owner = -1
        self._begin = 0  # number of the first row of all
        self._warned = False
        self.blocks: deque[Block] = deque()
        self._count = np.arange(1024, dtype=self.next.dtype)
        self._links = Links()
        self._lender = BufferPool()
        self._obs_bytes = max(specs.rows[name].nbytes for name in specs.obs)

    def __len__(self) -> int:
        return self.end - self.first

    def start_at(self, row: int) -> None:
        """Give the next row this number; for an empty ring."""
        self.first = self.end = self._kept = self._begin = row

    @property
    def position(self) -> dict[str, int]:
        """What decides, besides the rows, which of them leave next."""
        oldest = self.blocks[0].start if self.blocks else self.first
        return {"first": self.first, "kept": self._kept, "oldest": oldest}

    def go_on_from(self, position: Mapping[str, int]) -> None:
        """Let the rows go that had left a ring with this position; it held the same rows."""
        if self.blocks and self.blocks[0].start == position["first"]:
            self.blocks[0].start = position["oldest"]  # some rows of the batch had left
        self.first, self._kept = position["first"], min(self._kept, position["kept"])
        self.leave(position["kept"])

    def release(self) -> None:
        """Let go of the arrays, whoever holds the ring."""
        self.columns, self.state = {}, {}
        self.steps = np.empty(0, self.steps.dtype)
        self.next = np.empty(0, self.next.dtype)
        self._side_row = np.empty(0, np.int64)
        self._state_at = self._previous = None

    # Adding

    def check(self, batch: Batch) -> Admitted:
        """Raise if a batch cannot be taken, for any reason: :meth:`add` does not fail."""
        return self._admission.check(batch, self._links, not self.end)

    def add(self, batch: Batch, admitted: Admitted) -> Block:
        """Copy in a batch that was checked, make room first, and return where the rows are."""
        rows, width = batch.num_rows, batch.num_envs
        tail_rows, tail, starts = admitted.tail_rows, admitted.tail, admitted.starts
        self._make_room(rows, admitted.beside)
        older_slots = None if starts is None else self._take_side_of_stacks(starts, rows, width)
        owners = self.end + tail_rows
        tail_slots, tail_at = self._take_side(owners)
        block = Block(
            *(self.end, self.end + rows, width),
            *(batch.run, batch.shard, batch.incarnation, batch.policy_version),
            *(owners, tail_slots),
        )
        pieces = self._pieces(self.end, rows)
        for (name, column), given in zip(self.columns.items(), admitted.columns, strict=True):
            if name in tail:
                ends = tail[name]
                if self.stack is not None and name in self._stacked:
                    given, ends = self.stack.newest(given), self.stack.newest(ends)
                column[tail_at] = ends
            for to, of in pieces:
                column[to] = given[of]
        tails = slice(rows - width, rows) if admitted.through else tail_rows
        self._put_next(width, tails, block, pieces)
        if self.specs.state:
            self._put_state(block, batch)
        if starts is not None and older_slots is not None:
            self._put_older(block, batch, starts, older_slots)
        self._join(block, *self._links.add(batch, admitted.envs, block.start, self.first))
        self.blocks.append(block)
        self.end += rows
        return block

    def _join(self, block: Block, before: range | Ints, after: range | Ints) -> None:
        """Let rows go on with others instead of what was given as their next observation."""
        if isinstance(before, range) or isinstance(after, range):
            assert isinstance(before, range)
            assert isinstance(after, range)
            start, count = after.start % self.capacity, len(before)
            links = np.arange(start, start + count)
            if start + count > self.capacity:
                links %= self.capacity
            self._put(self.next, before.start, links)
        elif len(before):
            self.next[before % self.capacity] = after % self.capacity
            if before.max() >= block.start:  # tracks of one batch
                back = before > after
                block.rejoined = before[back], after[back]

    @property
    def _older(self) -> int:
        """Frames of a stack besides the newest."""
        return 0 if self.stack is None else self.stack.size - 1

    def _make_room(self, rows: int, beside: int) -> None:
        kept = max(self._kept, self.end + rows - self.capacity)
        overwritten = self._side_end + beside - self.side
        if overwritten > 0:
            needed = int(self._side_row[(overwritten - 1) % self.side]) + 1
            if needed > kept and self.end + rows - needed < _MOST * self.capacity:
                taken = (self._side_end + beside) / (self.end + rows - self._begin)
                self._say_it_is_full(self.end + rows - needed, taken)
            kept = max(kept, needed)
        self.leave(kept)

    def _say_it_is_full(self, rows: int, taken: float) -> None:
        """Warn, once, that rows leave though there are slots; each has ``taken`` on the side."""
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "The store is full with %s of %s rows: %s observations have room beside those of "
            "rows, and the ends of episodes and fragments need more. For all rows: "
            "ReplayStore(%s, side=%.2f), or collect with a longer horizon.",
            f"{rows:,}",
            f"{self.capacity:,}",
            f"{self.side:,}",
            f"{self.capacity:_}",
            min(1.0, math.ceil(100 * taken) / 100),
        )

    def leave(self, first: int) -> None:
        """Let all rows before ``first`` go."""
        kept = self._kept = max(self._kept, first)
        self.first = max(self.first, kept)
        while self.blocks and self.blocks[0].end <= kept:
            self.blocks.popleft()
        if self.blocks and kept > self.blocks[0].start:
            # Whole time rows leave; what is stacked needs the rows before it.
            oldest = self.blocks[0]
            times = -(-(kept - oldest.start) // oldest.num_envs) + self._older
            self.first = max(self.first, oldest.start + times * oldest.num_envs)
            if self.first >= oldest.end:
                self.first = oldest.end
                self.blocks.popleft()
            elif oldest.rejoined is not None:
                self._part_again(oldest, *oldest.rejoined)

    def _part_again(self, block: Block, rows: Ints, then: Ints) -> None:
        """Let tracks end with their fragment where the row that they went on with has left."""
        rows = rows[then < self.first]
        slots = block.tail_slots[rows - block.end]  # the last time row's are the last
        self.next[rows % self.capacity] = slots

    def _take_side(self, owners: Ints) -> tuple[Ints, slice | Ints]:
        """Return slots on the side, twice: as numbers, and as what is fastest to write to.

        Once one is used again, its owner and all before have left.
        """
        start = self._side_end % self.side
        end = start + len(owners)
        if self.stack is not None:  # only then are they not ascending
            owners = np.maximum(np.maximum.accumulate(owners), self._side_owner)
            self._side_owner = int(owners[-1])
        self._side_end += len(owners)
        if end <= self.side:
            self._side_row[start:end] = owners
            start, end = start + self.capacity, end + self.capacity
            return np.arange(start, end), slice(start, end)
        slots = np.arange(start, end) % self.side
        self._side_row[slots] = owners
        slots += self.capacity
        return slots, slots

    def _take_side_of_stacks(self, starts: Ints, rows: int, width: int) -> Ints:
        """Return slots for the older frames of these rows, ``[starts, size - 1]``."""
        last_needed = np.minimum(starts + (self._older - 1) * width, rows - 1)
        owners = self.end + np.repeat(last_needed, self._older)
        return self._take_side(owners)[0].reshape(len(starts), self._older)

    def _put_next(self, width: int, tails: slice | Ints, block: Block, pieces: Pieces) -> None:
        """ShardHandle each row to the one below it, and those with tails to their tails."""
        rows, then = block.end - block.start, (block.start + width) % self.capacity
        if len(self._count) < rows:
            self._count = np.arange(rows, dtype=self.next.dtype)
        if len(pieces) == 1 and then + rows <= self.capacity:
            links = self.next[pieces[0][0]]
            np.add(self._count[:rows], then, out=links)
            links[tails] = block.tail_slots
        else:
            links = self._count[:rows] + self.next.dtype.type(then)
            links[links >= self.capacity] -= self.capacity
            links[tails] = block.tail_slots
            self._put(self.next, block.start, links)

    def _pieces(self, row: int, count: int) -> Pieces:
        """Return where rows from ``row`` on lie, and which of them: one piece, or two."""
        at = row % self.capacity
        beyond = at + count - self.capacity
        if beyond <= 0:
            return [(slice(at, at + count), slice(None))]
        return [
            (slice(at, self.capacity), slice(count - beyond)),
            (slice(beyond), slice(count - beyond, count)),
        ]

    def _put(self, column: Column, row: int, values: Column) -> None:
        for to, of in self._pieces(row, len(values)):
            column[to] = values[of]

    def _put_state(self, block: Block, batch: Batch) -> None:
        """Keep the state of the first time row beside the block's first tails."""
        assert self._state_at is not None
        width = block.num_envs
        at = block.tail_slots[:width] - self.capacity
        known = all(len(column) for column in batch.state.values())
        for name, column in batch.state.items():
            if known:
                self.state[name][at] = column
        self._put(self._state_at, block.start, np.full(batch.num_rows, -1))
        if known:
            self._put(self._state_at, block.start, at)

    def _put_older(self, block: Block, batch: Batch, starts: Ints, slots: Ints) -> None:
        """Link every frame to the one before it; where that is in no row, keep it on the side."""
        assert self._previous is not None
        assert self.stack is not None
        previous = (np.arange(block.start, block.end) - block.num_envs) % self.capacity
        for name in self._stacked:
            self.columns[name][slots] = self.stack.older(batch.flat(name)[starts])
        self._previous[slots[:, 1:]] = slots[:, :-1]
        self._previous[slots[:, 0]] = slots[:, 0]
        previous[starts] = slots[:, -1]
        self._put(self._previous, block.start, previous)
        self._previous[block.tail_slots] = block.tail_rows % self.capacity

    # Reading

    def slots(self, rows: Ints) -> Ints:
        """Return where rows lie."""
        return rows % self.capacity

    def observations(self, slots: Column, prefix: str = "") -> dict[str, Column]:
        """Return the observations in these slots, put together from frames if they are."""
        columns = self.columns
        if self.stack is None or self._previous is None:
            if slots.size * self._obs_bytes < LARGE:  # as most: by the shortest way
                return {prefix + name: columns[name].take(slots, 0) for name in self.specs.obs}
            return {
                prefix + name: take_rows(columns[name], slots, self._lender)
                for name in self.specs.obs
            }
        history = self.stack.history(slots, self._previous)
        return {
            prefix + name: self.stack.join(columns[name], history, self._lender)
            if name in self._stacked
            else take_rows(columns[name], slots, self._lender)
            for name in self.specs.obs
        }

    def states(self, rows: Ints) -> tuple[dict[str, Column], npt.NDArray[np.bool_]]:
        """Return the recurrent state before these rows, and whether it is known."""
        if self._state_at is None:
            return {}, np.zeros(len(rows), np.bool_)
        at = self._state_at[self.slots(rows)]
        return {name: column[at] for name, column in self.state.items()}, at >= 0

    def batch(self, block: Block) -> Batch:
        """Return what is left of a block, as it was added."""
        start = max(block.start, self.first)
        rows = np.arange(start, block.end)
        slots = self.slots(rows)
        columns = {
            name: column[slots]
            for name, column in self.columns.items()
            if name not in self.specs.obs
        } | self.observations(slots)
        kept = block.tail_rows >= start
        state: dict[str, Column] = {}
        if self.specs.state:
            state, known = self.states(rows[: block.num_envs])
            if not known.all():  # its first time row has left
                state = {name: column[:0] for name, column in state.items()}
        return Batch(
            {name: columns[name] for name in self.specs.rows},
            block.num_envs,
            tail_rows=block.tail_rows[kept] - start,
            tail=self.observations(block.tail_slots[kept]),
            state=state,
            run=block.run,
            shard=block.shard,
            incarnation=block.incarnation,
            policy_version=block.policy_version,
        )
