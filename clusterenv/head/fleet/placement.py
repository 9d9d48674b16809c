"""Decides which workers get which shards; pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

__all__ = [
    "Share",
    "about_to_leave",
    "choose_worker",
    "place",
    "shards_to_add",
    "shards_to_move",
    "split",
]


def choose_worker(load: Mapping[str, int], avoid: Collection[str] = ()) -> str | None:
    """Return the least loaded worker; one to avoid only if there is no other.

    Examples
    --------
    >>> choose_worker({"a": 0, "b": 1}, avoid={"a"})
    'b'
    >>> choose_worker({"a": 0}, avoid={"a"}), choose_worker({})
    ('a', None)
    """
    return min(load, key=lambda worker: (worker in avoid, load[worker], worker), default=None)


def about_to_leave(ends: Mapping[str, float], now: float, seconds: float) -> set[str]:
    """Return the workers that end within so many seconds, or did so recently.

    Long after its end, another process may have its address.

    Examples
    --------
    >>> ends = {"a": 99.0, "b": 105.0, "c": 200.0, "d": 50.0}
    >>> sorted(about_to_leave(ends, now=100.0, seconds=30.0))
    ['a', 'b']
    """
    return {worker for worker, end in ends.items() if now - seconds < end < now + seconds}


def shards_to_move(
    placed: Mapping[int, str], load: Mapping[str, int], leaving: Collection[str]
) -> list[int]:
    """Return the shards that should be on another worker.

    Those on workers that are to leave; and of a worker that has at least two shards more than
    another, as many as make the two even. ``placed`` has the worker of each shard of this fleet,
    ``load`` the number of shards of all fleets on each worker.

    Examples
    --------
    >>> shards_to_move({0: "a", 1: "a"}, {"a": 2, "b": 0}, leaving=())
    [1]
    >>> shards_to_move({0: "a", 1: "b"}, {"a": 1, "b": 1, "c": 0}, leaving={"b"})
    [1]
    >>> shards_to_move({0: "a", 1: "a"}, {"a": 2, "b": 1}, leaving=())
    []
    """
    moving = [shard for shard, worker in placed.items() if worker in leaving]
    staying = {worker: count for worker, count in load.items() if worker not in leaving}
    for _ in moving:
        if staying:
            staying[min(staying, key=lambda worker: staying[worker])] += 1
    while staying:
        ours = {shard: worker for shard, worker in placed.items() if shard not in moving}
        crowded = [shard for shard, worker in ours.items() if worker in staying]
        if not crowded:
            break
        shard = max(crowded, key=lambda shard: (staying[ours[shard]], shard))
        emptiest = min(staying, key=lambda worker: staying[worker])
        if staying[ours[shard]] < staying[emptiest] + 2:
            break
        staying[ours[shard]] -= 1
        staying[emptiest] += 1
        moving.append(shard)
    return moving


def shards_to_add(
    shards: int, max_shards: int, load: Mapping[str, int], leaving: Collection[str]
) -> int:
    """Return how many shards workers that have none could take.

    Examples
    --------
    >>> shards_to_add(2, 3, {"a": 1, "b": 1, "c": 0, "d": 0}, leaving=())
    1
    """
    free = sum(not count and worker not in leaving for worker, count in load.items())
    return max(0, min(free, max_shards - shards))


@dataclass(frozen=True)
class Share:
    """The environments of one shard: ``count`` of them, from global index ``first``."""

    first: int
    count: int


def split(num_envs: int, shards: int) -> list[Share]:
    """Split environments over shards as evenly as possible, larger shares first.

    >>> split(7, 3)
    [Share(first=0, count=3), Share(first=3, count=2), Share(first=5, count=2)]
    """
    small, more = divmod(num_envs, shards)
    counts = [small + (index < more) for index in range(shards)]
    return [Share(sum(counts[:index]), count) for index, count in enumerate(counts)]


def place(load: dict[str, int], shards: int) -> list[str]:
    """Choose a worker for each shard: the least loaded ones, each once.

    >>> place({"a": 1, "b": 0, "c": 0}, 2)
    ['b', 'c']
    """
    return sorted(load, key=lambda worker: (load[worker], worker))[:shards]
