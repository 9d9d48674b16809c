"""Stores of every kind, driven alike, and what they are compared with."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import Content, Fleet, Frames, FramesAndSpeed, Row, TwoLeaves, Vector, same

from clusterenv.store import (
    NStep,
    Prioritized,
    Recent,
    ReplayStore,
    Sampler,
    Sequences,
    Stack,
    Uniform,
)


@dataclass(frozen=True)
class Kind:
    """A sampler, and the batches that it is to draw from."""

    name: str
    sampler: Callable[[], Sampler]
    content: Content = field(default_factory=Vector)
    fleet: dict[str, Any] = field(default_factory=dict)
    store: dict[str, Any] = field(default_factory=dict)
    n: int | None = 16
    prioritized: bool = False
    horizon_later: int | None = None
    """Of the batches with which stores go on: small ones leave part of a batch again and again."""

    def new(self, **options: Any) -> ReplayStore:
        return ReplayStore(101, sampler=self.sampler(), **{"seed": 5, **self.store, **options})

    def batches(self, **options: Any) -> Fleet:
        return Fleet(self.content, **{"seed": 3, "episode": 9, **self.fleet, **options})

    def use(self, store: ReplayStore, fleet: Fleet) -> dict[str, Any]:
        """Add a batch and sample, as a learner would; return the sample."""
        store.add(fleet.next()[0])
        sample = store.sample(self.n)
        if self.prioritized:
            errors = np.sin(sample["indices"].astype(np.float64)) ** 2
            store.update_priorities(sample["indices"], errors)
        return sample


KINDS = [
    Kind("uniform", Uniform, horizon_later=1),
    Kind("no replacement", lambda: Uniform(replace=False), TwoLeaves(), n=12),
    Kind("prioritized", lambda: Prioritized(0.7, 0.5), prioritized=True),
    Kind("own priorities", Prioritized, TwoLeaves(), {"priority": True}, prioritized=True),
    Kind("n-step", lambda: NStep(3, 0.9), fleet={"tracks": True}, horizon_later=2),
    Kind("n-step prioritized", lambda: NStep(3, 0.9, Prioritized()), prioritized=True),
    Kind("sequences", lambda: Sequences(3, overlap=1), fleet={"episode": 4}),
    Kind("recurrent", lambda: Sequences(3, 2, 1), fleet={"state": True, "episode": 4}),
    Kind(
        "recurrent prioritized",
        lambda: Sequences(3, 2, 1, Prioritized()),
        fleet={"state": True, "tracks": True, "episode": 4},
        prioritized=True,
    ),
    Kind(
        "recurrent own priorities",
        lambda: Sequences(5, 2, 3, Prioritized()),
        fleet={"state": True, "tracks": True, "priority": True},
        prioritized=True,
    ),
    Kind("recent", lambda: Recent(4, uses=3), n=None),
    Kind("state", Uniform, TwoLeaves(), {"state": True}),
    Kind("stacks", Uniform, Frames(), {"horizon": 12}, {"stack": 4}, horizon_later=1),
    Kind(
        "one stack of two",
        Uniform,
        FramesAndSpeed(),
        {"horizon": 12},
        {"stack": Stack(4, only=("obs.image",))},
    ),
    Kind(
        "stacks last",
        lambda: NStep(2, 0.9, Prioritized()),
        Frames(3, -1, "first"),
        {"horizon": 7, "tracks": True},
        {"stack": Stack(3, -1)},
        prioritized=True,
        horizon_later=2,
    ),
]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])


def go_on_alike(kind: Kind, left: ReplayStore, right: ReplayStore, fleet: Fleet) -> None:
    """Fail unless two stores go on the same, bit for bit, while more and more rows leave."""
    for _ in range(12):
        batch = fleet.next(horizon=kind.horizon_later)[0]
        for store in (left, right):
            store.add(batch)
        assert left.stats == right.stats
        first, second = left.sample(kind.n), right.sample(kind.n)
        assert first.keys() == second.keys()
        same(first, second)
        if kind.prioritized:
            for store in (left, right):
                store.update_priorities(first["indices"], np.cos(first["indices"]) ** 2)


def n_step(rows: list[Row], at: int, n: int, gamma: float) -> tuple[float, Row, int]:
    """Return the return, the last row and the steps, by looking each row up."""
    there = {row.key: row for row in rows}
    row, total, steps = rows[at], rows[at].reward, 1
    while steps < n and not (row.terminated or row.truncated) and row.after in there:
        row = there[row.after]
        total += gamma**steps * row.reward
        steps += 1
    return total, row, steps


@contextmanager
def no_file_larger_than(nbytes: int) -> Iterator[None]:
    """Let the system refuse to write more into a file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.is_file() and path.name != "lock"
    }
