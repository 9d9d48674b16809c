"""The protocol of samplers, what most of them have in common, and the uniform one.

A sampler is notified of every block of rows, draws row numbers, and gathers the columns that a
learner needs of these rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_flag
from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError, EmptyStore
from clusterenv.store.table.ring import Ring
from clusterenv.store.table.slots import Block, Ints

__all__ = ["Draw", "Numbers", "Sampler", "Transitions", "Uniform", "check_sampler", "required"]

Numbers = npt.NDArray[Any]


class Draw(NamedTuple):
    """Row numbers, and the weight of each row in the loss."""

    rows: Ints
    weights: npt.NDArray[np.float32]


class Sampler(Protocol):
    """Methods that a store calls on its sampler; :class:`Uniform` is the shortest example."""

    def attach(self, ring: Ring) -> None:
        """Set the rows to draw from; called once, before any other method."""

    def check(self, batch: Batch) -> None:
        """Raise to refuse a batch, before any of it is added."""

    def added(self, block: Block, batch: Batch) -> None:
        """Register new rows; rows before ``ring.first`` were evicted."""

    def draw(self, n: int | None, rng: np.random.Generator) -> Draw:
        """Draw ``n`` rows; ``None`` leaves the number to the sampler."""

    def gather(self, rows: Ints, columns: tuple[str, ...]) -> dict[str, Column]:
        """Return the usual columns of these rows, and ``columns``."""

    def update(self, rows: Ints, priorities: Numbers) -> None:
        """Set the priorities of rows; some may have been evicted."""

    def settings(self) -> dict[str, Any]:
        """Return the constructor arguments."""

    def state(self) -> dict[str, Numbers]:
        """Return, as arrays, all other state that draws depend on."""

    def restore(self, state: Mapping[str, Numbers]) -> None:
        """Restore the state, after all rows were added."""


def check_sampler(given: Sampler) -> Sampler:
    """Return the object, or raise ``ConfigError`` if it is no sampler."""
    if isinstance(given, type):
        raise ConfigError(
            f"sampler={given.__name__} is a class; make one: "
            f"ReplayStore(..., sampler={given.__name__}(...))"
        )
    methods = [name for name in vars(Sampler) if not name.startswith("_")]
    missing = [name for name in methods if not callable(getattr(given, name, None))]
    if missing == methods:
        raise ConfigError(f"sampler={given!r} is no sampler: ReplayStore(..., sampler=Uniform())")
    if missing:
        raise ConfigError(
            f"{type(given).__name__} has no {', '.join(missing)}, which a store asks of a sampler; "
            f"take them from another: class {type(given).__name__}(Uniform)"
        )
    return given


class Transitions:
    """Base class of samplers that gather single transitions."""

    ring: Ring

    def attach(self, ring: Ring) -> None:
        if hasattr(self, "ring"):
            raise ConfigError(
                f"this {type(self).__name__} is the sampler of another store; make a new one"
            )
        self.ring = ring

    def bytes_needed(self, capacity: int) -> int:
        """Return the bytes that the sampler allocates."""
        return 0

    def check_capacity(self, capacity: int) -> None:
        """Accept stores of every capacity."""

    def check(self, batch: Batch) -> None:
        """Accept every batch."""

    def gather(self, rows: Ints, columns: tuple[str, ...]) -> dict[str, Column]:
        ring = self.ring
        slots = ring.slots(rows)
        steps = ring.steps.take(slots)
        found = ring.observations(slots)
        found["action"] = steps["action"].copy()
        found["reward"] = steps["reward"].copy()
        found["terminated"] = ring.columns["terminated"].take(slots)
        found["truncated"] = ring.columns["truncated"].take(slots)
        for name in columns:
            found[name] = ring.columns[name].take(slots, axis=0)
        found.update(ring.observations(steps["next"], "next_"))
        return found

    def update(self, rows: Ints, priorities: Numbers) -> None:
        raise ConfigError(
            f"{type(self).__name__} has no priorities; ReplayStore(..., sampler=Prioritized())"
        )

    def state(self) -> dict[str, Numbers]:
        return {}

    def restore(self, state: Mapping[str, Numbers]) -> None:
        """Do nothing: draws depend on the rows only."""


@functools.lru_cache(maxsize=16)
def _ones(count: int) -> npt.NDArray[np.float32]:
    return np.ones(count, np.float32)


def required(n: int | None, sampler: str) -> int:
    """Return ``n``, or raise if it is ``None``."""
    if n is None:
        raise ConfigError(f"{sampler} needs the number of rows: store.sample(256)")
    return n


class Uniform(Transitions):
    """Draws every row with the same probability.

    Parameters
    ----------
    replace
        Whether a sample may contain a row twice.
    """

    def __init__(self, replace: bool = True) -> None:
        self.replace = check_flag("replace", replace, "Uniform(replace=False)")

    def settings(self) -> dict[str, Any]:
        return {"replace": self.replace}

    def added(self, block: Block, batch: Batch) -> None:
        """Do nothing: all rows are equal."""

    def draw(self, n: int | None, rng: np.random.Generator) -> Draw:
        count = required(n, "Uniform")
        if self.replace:
            # Twice as fast as rng.integers, and as uniform: a store has far fewer than 2^53 rows.
            parts = rng.random(count)
            parts *= len(self.ring)
            rows = parts.astype(np.int64)
            rows += self.ring.first
        elif count > len(self.ring):
            raise EmptyStore(
                f"sample({count}) without replacement, but the store holds {len(self.ring)} rows: "
                f"sample({len(self.ring)}), or Uniform(replace=True)"
            )
        else:
            rows = self.ring.first + rng.choice(len(self.ring), count, replace=False)
        return Draw(rows, _ones(count).copy())  # in a quarter of the time of np.ones
