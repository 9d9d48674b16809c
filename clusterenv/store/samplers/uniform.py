"""Sampler that draws all rows with the same probability."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clusterenv.data.checks import check_flag
from clusterenv.errors import EmptyStore
from clusterenv.store.samplers.sampler import Draw, Transitions, equal_weights, required

if TYPE_CHECKING:
    from clusterenv.data.batch import Batch
    from clusterenv.store.table.slots import Block

__all__ = ["Uniform"]


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
        return Draw(rows, equal_weights(count))
