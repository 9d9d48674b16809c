"""Sampler of whole batches, each used a few times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from clusterenv.data.checks import check_whole
from clusterenv.errors import ConfigError, EmptyStore
from clusterenv.store.samplers.sampler import Draw, Numbers, Transitions

if TYPE_CHECKING:
    from clusterenv.data.batch import Batch
    from clusterenv.data.spaces import Column
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
        self._blocks: list[Block] = []
        self._used: list[int] = []

    def settings(self) -> dict[str, Any]:
        return {"n": self.n, "uses": self.uses}

    def added(self, block: Block, batch: Batch) -> None:
        self._blocks.append(block)
        self._used.append(0)
        self._drop(len(self._blocks) - self.n)
        self._drop(sum(block.start < self.ring.first for block in self._blocks))

    def draw(self, n: int | None, rng: np.random.Generator) -> Draw:
        if not self._blocks:
            raise EmptyStore(
                f"every batch has been used {self.uses} times; add one before sampling: "
                "store.add(next(iter(collector)))"
            )
        at = int(rng.integers(len(self._blocks)))
        block = self._blocks[at]
        rows = block.end - block.start
        if n is not None and n != rows:
            raise ConfigError(f"Recent hands out whole batches of {rows} rows, not {n}: sample()")
        self._used[at] += 1
        if self._used[at] == self.uses:
            del self._blocks[at], self._used[at]
        self._width = block.num_envs
        return Draw(np.arange(block.start, block.end), np.ones(rows, np.float32))

    def gather(self, rows: Ints, columns: tuple[str, ...]) -> dict[str, Column]:
        width = self._width
        return {
            name: column.reshape(-1, width, *column.shape[1:])
            for name, column in super().gather(rows, columns).items()
        }

    def state(self) -> dict[str, Numbers]:
        starts = np.array([block.start for block in self._blocks], np.int64)
        return {"starts": starts, "used": np.array(self._used, np.int64)}

    def restore(self, state: Mapping[str, Numbers]) -> None:
        blocks = {max(block.start, self.ring.first): block for block in self.ring.blocks}
        pairs = zip(state["starts"].tolist(), state["used"].tolist(), strict=True)
        left = [(blocks[start], int(used)) for start, used in pairs]
        self._blocks = [block for block, _ in left]
        self._used = [used for _, used in left]

    def _drop(self, count: int) -> None:
        if count > 0:
            del self._blocks[:count], self._used[:count]
