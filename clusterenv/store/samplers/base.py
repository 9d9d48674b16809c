"""What a sampler is, and what most samplers gather."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from clusterenv.data.batch import Batch
from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError
from clusterenv.store.table.ring import Block, Ints, Ring

__all__ = [
    "Draw",
    "Numbers",
    "Sampler",
    "Transitions",
    "check_sampler",
    "equal_weights",
    "wanted",
]

Numbers = npt.NDArray[Any]


class Draw(NamedTuple):
    """Rows by number, and the weight of each in the loss."""

    rows: Ints
    weights: npt.NDArray[np.float32]


class Sampler(Protocol):
    """What a store asks of a sampler; :class:`Uniform` is the shortest."""

    def attach(self, ring: Ring) -> None:
        """Take the rows to draw from; called once, before everything else."""

    def check(self, batch: Batch) -> None:
        """Raise if a batch cannot be taken; nothing of it has been added yet."""

    def added(self, block: Block, batch: Batch) -> None:
        """Note new rows; rows before ``ring.first`` have left."""

    def draw(self, n: int | None, rng: np.random.Generator) -> Draw:
        """Choose ``n`` rows; ``None`` leaves the number to the sampler."""

    def gather(self, rows: Ints, columns: tuple[str, ...]) -> dict[str, Column]:
        """Return what a learner needs of these rows; ``columns`` besides the usual ones."""

    def update(self, rows: Ints, priorities: Numbers) -> None:
        """Set the priorities of rows that are still there."""

    def settings(self) -> dict[str, Any]:
        """Return the arguments that make this sampler again."""

    def state(self) -> dict[str, Numbers]:
        """Return, as arrays, what drawing depends on besides the rows."""

    def restore(self, state: Mapping[str, Numbers]) -> None:
        """Go on from a state, when all rows have been added."""


def check_sampler(given: Any) -> None:
    """Raise ``ConfigError`` unless this is a sampler."""
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


class Transitions:
    """Single steps: what most samplers gather."""

    ring: Ring

    def attach(self, ring: Ring) -> None:
        if hasattr(self, "ring"):
            raise ConfigError(
                f"this {type(self).__name__} is the sampler of another store; make a new one"
            )
        self.ring = ring

    def bytes_needed(self, capacity: int) -> int:
        """Return the bytes that the sampler takes besides the rows."""
        return 0

    def check(self, batch: Batch) -> None:
        """Every batch will do."""

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
        """Nothing but the rows matters."""


@functools.lru_cache(maxsize=16)
def _ones(count: int) -> npt.NDArray[np.float32]:
    return np.ones(count, np.float32)


def equal_weights(count: int) -> npt.NDArray[np.float32]:
    """Return the weights of rows that are all alike; a copy takes a quarter of the time."""
    return _ones(count).copy()


def wanted(n: int | None, sampler: str) -> int:
    """Return ``n``, or raise if it was left to a sampler that needs it."""
    if n is None:
        raise ConfigError(f"{sampler} must be told how many rows: store.sample(256)")
    return n
