"""Sampler of whole batches, each used a few times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_whole
from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError, EmptyStore
from clusterenv.store.samplers.sampler import Draw, Numbers, Transitions
from clusterenv.store.table.slots import Block, Ints

__all__ = ["Recent"]


class Recent(Transitions):
    """Draws one of the newest ``n`` batches, each at most ``uses`` times.

    ``sample()`` returns a random batch, ``[horizon, envs, …]``. A batch is dropped after ``uses``
    samples, or when it is the oldest of ``n`` and a new one is added; adding never waits.

    Parameters
    ----------
    n
        Number of batches.
    uses
        How often each may be sampled.
    """

    def __init__(self, n: int, uses: int) -> None:
        self.n = check_whole("n", n, "Recent(4, uses=2)", least=1)
        self.uses = check_whole("uses", uses, "Recent(4, uses=2)", least=1)
        self._blocks: list[tuple[Block, int]] = []  # each with the number of its samples

    def settings(self) -> dict[str, Any]:
        return {"n": self.n, "uses": self.uses}

    def added(self, block: Block, batch: Batch) -> None:
        newest = [*self._blocks, (block, 0)][-self.n :]
        self._blocks = [each for each in newest if each[0].start >= self.ring.first]

    def draw(self, n: int | None, rng: np.random.Generator) -> Draw:
        if not self._blocks:
            raise EmptyStore(
                f"every batch has been used {self.uses} times; add one before sampling: "
                "store.add(next(iter(collector)))"
            )
        at = int(rng.integers(len(self._blocks)))
        block, used = self._blocks[at]
        rows = block.end - block.start
        if n is not None and n != rows:
            raise ConfigError(f"Recent returns whole batches of {rows} rows, not {n}: sample()")
        if used + 1 < self.uses:
            self._blocks[at] = block, used + 1
        else:
            del self._blocks[at]
        self._width = block.num_envs
        return Draw(np.arange(block.start, block.end), np.ones(rows, np.float32))

    def gather(self, rows: Ints, columns: tuple[str, ...]) -> dict[str, Column]:
        width = self._width
        return {
            name: column.reshape(-1, width, *column.shape[1:])
            for name, column in super().gather(rows, columns).items()
        }

    def state(self) -> dict[str, Numbers]:
        pairs = [(block.start, used) for block, used in self._blocks]
        starts, used = np.array(pairs, np.int64).reshape(-1, 2).T
        return {"starts": starts, "used": used}

    def restore(self, state: Mapping[str, Numbers]) -> None:
        blocks = {max(block.start, self.ring.first): block for block in self.ring.blocks}
        pairs = zip(state["starts"].tolist(), state["used"].tolist(), strict=True)
        self._blocks = [(blocks[start], int(used)) for start, used in pairs]
