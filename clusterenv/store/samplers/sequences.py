"""Sampler of consecutive rows, for recurrent policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_whole
from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError, EmptyStore
from clusterenv.returns import sequence_priorities
from clusterenv.store.samplers.prioritized import Prioritized
from clusterenv.store.samplers.sampler import Draw, Numbers, Transitions, required
from clusterenv.store.table.ring import Ring
from clusterenv.store.table.slots import Block, Ints

__all__ = ["Sequences"]

_INITIAL = "initial."  # prefix of the initial state's names when it is saved
_MAX_LENGTH = 2**16  # sequences are followed row by row
_STEP_COLUMNS = ("action", "reward", "terminated", "truncated")


class Sequences(Transitions):
    """Draws consecutive rows of one episode, ``[n, burn_in + length, …]``, with recurrent state.

    Sequences begin at the first row of an episode, and then every ``burn_in + length - overlap``
    rows. For policies with recurrent state, they begin where the state is known: at the first row
    of an episode and of a fragment, so collect with ``horizon=burn_in + length - overlap``. An
    episode that begins inside a fragment begins with the policy's initial state, which is taken
    from the first fragment that begins with an episode; until then, it is zero. Sequences of
    short episodes are padded with zeros, where ``mask`` is false. A sequence whose end has not
    been collected yet is not drawn.

    ``learn`` tells the rows to learn from: those after the burn-in, and all rows of a sequence that
    begins an episode, whose state needs no burn-in.

    If the batches have a column ``priority``, the absolute error of each row, a sequence gets its
    first priority when it is complete: :func:`clusterenv.returns.sequence_priorities` of the rows
    to learn from. Otherwise it gets the largest priority so far.

    Parameters
    ----------
    length
        Rows to learn from, at most 2**16.
    burn_in
        Rows before them, to warm up the recurrent state, at most 2**16.
    overlap
        Rows that consecutive sequences share.
    base
        Draws the first rows: a :class:`Prioritized`. By default, they are drawn uniformly.
    """

    def __init__(
        self, length: int, burn_in: int = 0, overlap: int = 0, base: Prioritized | None = None
    ) -> None:
        right = "Sequences(80, burn_in=40, overlap=40)"
        self.length = check_whole("length", length, right, least=1, most=_MAX_LENGTH)
        self.burn_in = check_whole("burn_in", burn_in, right, most=_MAX_LENGTH)
        most, why = self.length + self.burn_in - 1, "less than length and burn_in together"
        self.overlap = check_whole("overlap", overlap, right, most=most, why=why)
        if base is not None and not isinstance(base, Prioritized):
            raise ConfigError(
                f"base={type(base).__name__}(...) knows no beginnings: "
                f"Sequences({length}, base=Prioritized()), or leave base= out"
            )
        self.base = base
        self._total = self.length + self.burn_in
        self._period = self._total - self.overlap
        self._entries = np.empty(0, np.int64)
        self._unrated = np.empty(0, np.int64)  # entries that wait for the end of their sequence
        self._initial: dict[str, Column] = {}  # state at the start of an episode, once known

    def settings(self) -> dict[str, Any]:
        return {"length": self.length, "burn_in": self.burn_in, "overlap": self.overlap}

    def bytes_needed(self, capacity: int) -> int:
        return 0 if self.base is None else self.base.bytes_needed(capacity)

    def check_capacity(self, capacity: int) -> None:
        """Raise if no sequence fits into a store of this capacity."""
        if self._total > capacity:
            raise ConfigError(
                f"sequences of {self._total:,} rows, burn_in included, are longer than a store of "
                f"capacity={capacity:,}: ReplayStore({100 * self._total:_}, sampler=Sequences(…))"
            )

    def attach(self, ring: Ring) -> None:
        super().attach(ring)
        if self.base is not None:
            self.base.attach(ring)

    def check(self, batch: Batch) -> None:
        if self.base is not None:
            self.base.check(batch)
        if batch.state and batch.horizon != self._period and not self.ring.end:
            overlap = self._total - batch.horizon
            raise ConfigError(
                f"sequences begin every {self._period} rows, but the recurrent state is known "
                f"every {batch.horizon}: Collector(..., horizon={self._period})"
                + (f", or overlap={overlap}" if overlap >= 0 else "")
            )

    def added(self, block: Block, batch: Batch) -> None:
        step = batch.flat("step")
        begins = step % self._period == 0
        if self.ring.schema.state:
            begins = step == 0
            if not self._initial:
                self._initial = _initial_state(batch, begins)
            begins[: block.num_envs] |= all(len(part) for part in batch.state.values())
        rows = block.start + np.flatnonzero(begins)
        kept = np.searchsorted(self._entries, self.ring.first)
        self._entries = np.concatenate([self._entries[kept:], rows])
        if self.base is None:
            return
        if "priority" not in batch.names:
            self.base.added_only(rows, block)
            return
        self.base.added_only(rows[:0], block)
        self._rate(self.base, rows)

    def _rate(self, base: Prioritized, rows: Ints) -> None:
        """Give a priority to the sequences that are complete; ``rows`` are new first rows."""
        waiting = np.concatenate([self._unrated[self._unrated >= self.ring.first], rows])
        slots, mask = self._chains(waiting)
        whole = self._are_complete(slots, mask)
        self._unrated = waiting[~whole]
        if whole.any():
            errors = self.ring.columns["priority"][slots[whole]].astype(np.float64)
            learn = self._to_learn(slots[whole], mask[whole])
            found = sequence_priorities(torch.from_numpy(errors).T, torch.from_numpy(learn).T)
            base.update(waiting[whole], found.numpy())

    def draw(self, n: int | None, rng: np.random.Generator) -> Draw:
        count = required(n, "Sequences")
        if self.base is not None:
            return self._draw_by_priority(self.base, count, rng)
        entries = self._entries[self._entries >= self.ring.first]
        for _ in range(8 if len(entries) else 0):  # only the newest sequences are incomplete
            rows = rng.choice(entries, 2 * count)
            rows = rows[self._complete(rows)][:count]
            if len(rows) == count:
                return Draw(rows, np.ones(count, np.float32))
        return Draw(rng.choice(self._drawable(), count), np.ones(count, np.float32))

    def _draw_by_priority(self, base: Prioritized, count: int, rng: np.random.Generator) -> Draw:
        for _ in range(8):
            try:
                drawn = base.draw(count, rng)
            except EmptyStore:
                self._drawable()  # says which sequences are waited for
                raise
            whole = self._complete(drawn.rows)
            if whole.all():
                return drawn
            if whole.any():
                keep = np.where(whole, np.arange(count), rng.choice(np.flatnonzero(whole), count))
                return Draw(drawn.rows[keep], drawn.weights[keep])
        return base.draw_from(self._drawable(), count, rng)

    def _drawable(self) -> Ints:
        """Return the first rows of all complete sequences, or raise ``EmptyStore``."""
        entries = self._entries[self._entries >= self.ring.first]
        entries = entries[self._complete(entries)]
        if not len(entries):
            raise EmptyStore(
                f"no sequence of {self._total} rows is complete yet; add more batches before "
                "sampling, or collect with a longer horizon"
            )
        return entries

    def gather(self, rows: Ints, columns: tuple[str, ...]) -> dict[str, Column]:
        slots, mask = self._chains(rows)
        flat = slots.reshape(-1)
        found = self.ring.observations(flat)
        for name in (*_STEP_COLUMNS, *columns):
            found[name] = self.ring.columns[name][flat]
        found |= self.ring.observations(self.ring.next[flat], "next_")
        shaped = {
            name: column.reshape(*mask.shape, *column.shape[1:]) for name, column in found.items()
        }
        for column in shaped.values():
            column[~mask] = 0
        shaped["mask"] = mask
        shaped["learn"] = self._to_learn(slots, mask)
        states, known = self.ring.states(rows)
        for name, state in states.items():
            state[~known] = self._initial.get(name, 0)
            shaped[f"state.{name}"] = state
        return shaped

    def update(self, rows: Ints, priorities: Numbers) -> None:
        if self.base is None:
            super().update(rows, priorities)
        else:
            self.base.update(rows, priorities)

    def state(self) -> dict[str, Numbers]:
        initial = {f"{_INITIAL}{name}": column for name, column in self._initial.items()}
        return initial if self.base is None else initial | self.base.state()

    def restore(self, state: Mapping[str, Numbers]) -> None:
        initial = {
            name.removeprefix(_INITIAL): column
            for name, column in state.items()
            if name.startswith(_INITIAL)
        }
        wanted = {name: (spec.dtype, spec.shape) for name, spec in self.ring.schema.state.items()}
        found = {name: (column.dtype, column.shape) for name, column in initial.items()}
        if initial and found != wanted:
            raise ValueError(f"an initial state {found} of policies with {wanted}")
        if self.base is not None:
            self.base.restore(state)
        self._initial = initial or self._initial

    def _chains(self, rows: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return the slots of consecutive rows, and a mask of those that exist."""
        capacity = self.ring.capacity
        slots = np.zeros((len(rows), self._total), np.int64)
        slots[:, 0] = self.ring.slots(rows)
        mask = np.zeros(slots.shape, np.bool_)
        mask[:, 0] = True
        for k in range(1, self._total):
            following = self.ring.next[slots[:, k - 1]]
            mask[:, k] = mask[:, k - 1] & (following < capacity)
            slots[:, k] = np.where(mask[:, k], following, slots[:, k - 1])
        return slots, mask

    def _complete(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Whether sequences from these rows are full, or end with their episode."""
        return self._are_complete(*self._chains(rows))

    def _are_complete(self, slots: Ints, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        last = slots[:, -1]
        ended = self.ring.columns["terminated"][last] | self.ring.columns["truncated"][last]
        complete: npt.NDArray[np.bool_] = mask[:, -1] | ended
        return complete

    def _to_learn(self, slots: Ints, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which rows are to be learned from."""
        learn = mask.copy()
        learn[:, : self.burn_in] &= self.ring.columns["step"][slots[:, :1]] == 0
        return learn


def _initial_state(batch: Batch, begins: npt.NDArray[np.bool_]) -> dict[str, Column]:
    """Return the initial state of episodes, if one begins in the first time row of a batch."""
    first = np.flatnonzero(begins[: batch.num_envs])
    if not len(first) or not all(len(part) for part in batch.state.values()):
        return {}
    return {name: np.array(part[first[0]]) for name, part in batch.state.items()}
