"""Sampler of n-step returns, on top of another sampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_number, check_whole
from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError
from clusterenv.store.samplers.prioritized import Prioritized
from clusterenv.store.samplers.sampler import Draw, Numbers, Transitions, Uniform
from clusterenv.store.table.ring import Ring
from clusterenv.store.table.slots import Block, Ints

__all__ = ["NStep"]


class NStep(Transitions):
    """Gathers returns of up to ``n`` steps for the rows that another sampler draws.

    ``reward`` is ``sum_k gamma^k r_k`` over the ``m <= n`` consecutive rows from the row drawn;
    ``next_obs``, ``terminated`` and ``truncated`` are those of the last of them, and
    ``discount`` is ``gamma^m``, so the target is
    ``reward + discount * (1 - terminated) * value(next_obs)``. ``m`` is less than ``n`` at the end
    of an episode, and where the store holds no later row of it.

    Parameters
    ----------
    n
        Maximum number of steps.
    gamma
        Discount per step.
    base
        Draws the rows: :class:`Uniform` or :class:`Prioritized`.
    """

    def __init__(self, n: int, gamma: float, base: Uniform | Prioritized | None = None) -> None:
        self.n = check_whole("n", n, "NStep(3, gamma=0.99)", least=1)
        self.gamma = check_number("gamma", gamma, "NStep(3, gamma=0.99)", least=0, most=1)
        self.base = base if base is not None else Uniform()
        if not isinstance(self.base, (Uniform, Prioritized)):
            raise ConfigError(
                f"base={type(base).__name__}(...) does not draw single rows: "
                "NStep(3, gamma=0.99, base=Prioritized())"
            )

    def settings(self) -> dict[str, Any]:
        return {"n": self.n, "gamma": self.gamma}

    def bytes_needed(self, capacity: int) -> int:
        return self.base.bytes_needed(capacity)

    def attach(self, ring: Ring) -> None:
        super().attach(ring)
        self.base.attach(ring)

    def check(self, batch: Batch) -> None:
        self.base.check(batch)

    def added(self, block: Block, batch: Batch) -> None:
        self.base.added(block, batch)

    def draw(self, n: int | None, rng: np.random.Generator) -> Draw:
        return self.base.draw(n, rng)

    def gather(self, rows: Ints, columns: tuple[str, ...]) -> dict[str, Column]:
        ring = self.ring
        slots = ring.slots(rows)
        found = ring.observations(slots)
        for name in columns:
            found[name] = ring.columns[name].take(slots, axis=0)
        last = ring.steps.take(slots)
        found["action"] = last["action"].copy()
        total = last["reward"].astype(np.float64)
        discount = np.full(len(rows), self.gamma)
        ends, going = slots.copy(), np.arange(len(rows))  # going: rows that may have a successor
        for _ in range(self.n - 1):
            following = last["next"][going]
            continues = following < ring.capacity
            going, following = going[continues], following[continues]
            if not len(going):
                break
            steps = ring.steps.take(following)
            total[going] += discount[going] * steps["reward"]
            discount[going] *= self.gamma
            last[going] = steps
            ends[going] = following
        found["reward"] = total.astype(last["reward"].dtype)
        for name in ("terminated", "truncated"):
            found[name] = ring.columns[name].take(ends)
        found["discount"] = discount.astype(np.float32)
        return found | ring.observations(last["next"], "next_")

    def update(self, rows: Ints, priorities: Numbers) -> None:
        self.base.update(rows, priorities)

    def state(self) -> dict[str, Numbers]:
        return self.base.state()

    def restore(self, state: Mapping[str, Numbers]) -> None:
        self.base.restore(state)
