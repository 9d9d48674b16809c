"""Sampler that draws rows in proportion to their priorities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_number
from clusterenv.errors import ConfigError, EmptyStore
from clusterenv.store.samplers.sampler import Draw, Numbers, Transitions, required
from clusterenv.store.samplers.sum_tree import SumTree
from clusterenv.store.table.ring import Ring
from clusterenv.store.table.slots import Block, Ints, pieces

__all__ = ["Prioritized"]

_MAX_PRIORITY = 1e200  # the sum of all priorities must be finite


class Prioritized(Transitions):
    """Draws rows in proportion to a power of their priorities (Schaul et al., 2016).

    Row ``i`` is drawn with probability ``P(i) = p_i^alpha / sum p^alpha``; ``p_i`` is the absolute
    error passed to ``update_priorities``, plus ``epsilon``. Its weight is ``(N P(i))^-beta``,
    divided by the largest weight of the sample. Draws are stratified. New rows get their
    priority from the column ``priority``, if there is one, otherwise the largest so far.

    Parameters
    ----------
    alpha
        0 draws uniformly, 1 in proportion to the priorities.
    beta
        How far weights correct for it; 1 corrects fully. May be changed at any time.
    epsilon
        Added to each priority, so that rows without an error can still be drawn.
    """

    def __init__(self, alpha: float = 0.6, beta: float = 0.4, epsilon: float = 1e-6) -> None:
        self.alpha = check_number("alpha", alpha, "Prioritized(alpha=0.6)", least=0, most=1)
        self.beta = beta
        right = "Prioritized(epsilon=1e-6)"
        self.epsilon = check_number("epsilon", epsilon, right, above=0, most=_MAX_PRIORITY)
        self._largest = 1.0
        self._left = 0  # rows before this one have no priority

    @property
    def beta(self) -> float:
        """Exponent of the weights."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = check_number("beta", value, "Prioritized(beta=0.4)", least=0, most=1)

    def settings(self) -> dict[str, Any]:
        return {"alpha": self.alpha, "beta": self.beta, "epsilon": self.epsilon}

    def bytes_needed(self, capacity: int) -> int:
        return SumTree.bytes_needed(capacity)

    def attach(self, ring: Ring) -> None:
        super().attach(ring)
        self._tree = SumTree(ring.capacity)

    def check(self, batch: Batch) -> None:
        if "priority" in batch.names:
            given = batch.flat("priority")
            if given.ndim != 1:
                raise ConfigError(
                    f"the column 'priority' has {given.shape[1:]} numbers in each row; one is "
                    "wanted, the absolute error"
                )
            self._check(given, "the column 'priority'")

    def added(self, block: Block, batch: Batch) -> None:
        if "priority" in batch.names:
            given = batch.flat("priority").astype(np.float64)
            self._put_block(block, self._powers(given))
        else:
            self._put_block(block, self._largest**self.alpha)

    def added_only(self, rows: Ints, block: Block) -> None:
        """Register a block of which only ``rows`` may be drawn."""
        self._put_block(block, 0.0)
        self._tree.put(self.ring.slots(rows), self._largest**self.alpha)

    def draw(self, n: int | None, rng: np.random.Generator) -> Draw:
        count = required(n, "Prioritized")
        tree = self._tree
        total = tree.total
        if not total > 0:
            raise EmptyStore("no row has a priority yet; add a batch first: store.add(batch)")
        strata = rng.random(count)
        strata += np.arange(count)
        strata *= total / count
        slots = tree.find(strata)
        powers = tree.leaves.take(slots)
        if np.count_nonzero(powers) < count:  # rounding, at the edge of a leaf
            drawable = np.flatnonzero(tree.leaves)
            missed = np.flatnonzero(powers == 0)
            slots[missed] = drawable[
                np.minimum(np.searchsorted(drawable, slots[missed]), len(drawable) - 1)
            ]
            powers = tree.leaves.take(slots)
        first = self.ring.first
        return Draw(first + (slots - first) % self.ring.capacity, self._weights(powers))

    def draw_from(self, rows: Ints, n: int, rng: np.random.Generator) -> Draw:
        """Draw ``n`` of the given rows by priority."""
        powers = self._tree.leaves[self.ring.slots(rows)]
        at = rng.choice(len(rows), n, p=powers / powers.sum())
        return Draw(rows[at], self._weights(powers[at]))

    def _weights(self, powers: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        # The number of rows and the total cancel out; the smallest power has the largest weight.
        weights: npt.NDArray[np.float64] = powers / np.minimum.reduce(powers)
        np.power(weights, -self.beta, out=weights)
        return weights.astype(np.float32)

    def update(self, rows: Ints, priorities: Numbers) -> None:
        values = self._check(priorities, "priorities")
        live = rows >= self.ring.first
        if np.count_nonzero(live) < len(live):
            rows, values = rows[live], values[live]
        self._tree.put(self.ring.slots(rows), self._powers(values))

    def state(self) -> dict[str, Numbers]:
        rows = np.arange(self.ring.first, self.ring.end)
        powers = self._tree.leaves[self.ring.slots(rows)]
        return {"powers": powers, "largest": np.array([self._largest])}

    def restore(self, state: Mapping[str, Numbers]) -> None:
        powers, largest = state["powers"].astype(np.float64), float(state["largest"][0])
        if powers.shape != (len(self.ring),) or not 0 < largest < np.inf:
            raise ValueError(f"{powers.shape} priorities of {len(self.ring)} rows, up to {largest}")
        self._check(powers, "priorities")
        self._put_range(self._left, self.ring.first, 0.0)
        self._left = self.ring.first
        self._tree.put(self.ring.slots(np.arange(self.ring.first, self.ring.end)), powers)
        self._largest = largest

    def _powers(self, priorities: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        values = priorities + self.epsilon
        if len(values):
            self._largest = max(self._largest, float(np.maximum.reduce(values)))
        return values**self.alpha

    def _check(self, priorities: Numbers, what: str) -> npt.NDArray[np.float64]:
        values = np.asarray(priorities, np.float64)
        if len(values) and not (
            np.minimum.reduce(values) >= 0 and np.maximum.reduce(values) < _MAX_PRIORITY
        ):
            at = int(np.flatnonzero(~((values >= 0) & (values < _MAX_PRIORITY)))[0])
            raise ConfigError(
                f"{what}[{at}] is {values[at]}; they are absolute errors, finite and not "
                "negative: store.update_priorities(sample['indices'], error.abs())"
            )
        return values

    def _put_block(self, block: Block, powers: Numbers | float) -> None:
        """Set the priorities of a block, and clear those of the rows evicted for it."""
        capacity, first = self.ring.capacity, self.ring.first
        # The slots of the block itself are overwritten below.
        left, self._left = max(self._left, block.end - capacity), first
        leaving = max(0, first - left)
        at, count = block.start % capacity, block.end - block.start
        adjacent = not leaving or left == block.end - capacity  # right behind the block
        if adjacent and at + count + leaving <= capacity:
            self._tree.put_range(at, at + count, powers, zeros=leaving)
        else:
            self._put_range(block.start, block.end, powers)
            self._put_range(left, first, 0.0)

    def _put_range(self, start: int, end: int, powers: Numbers | float) -> None:
        for to, of in pieces(start, max(0, end - start), self.ring.capacity):
            values = powers[of] if isinstance(powers, np.ndarray) else powers
            self._tree.put_range(to.start or 0, to.stop, values)
