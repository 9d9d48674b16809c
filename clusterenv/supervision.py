"""What happens to shards when workers come and go: decisions only, no cluster in sight."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clusterenv.checks import check_flag, check_number, check_whole

__all__ = [
    "EnvFaults",
    "Pulse",
    "Restarts",
    "about_to_leave",
    "choose_worker",
    "env_seeds",
    "rebuilt_seed",
    "shards_to_add",
    "shards_to_move",
]


@dataclass(frozen=True)
class Restarts:
    """How often a lost shard is placed again, and how soon.

    Parameters
    ----------
    count
        Restarts of one shard within ``seconds``; one loss more ends the run.
    seconds
        The time that they are counted over.
    backoff
        Wait before the second restart within that time; it doubles with each further one.
    backoff_max
        The longest wait, at most a year.

    Examples
    --------
    >>> rule = Restarts(count=3, seconds=60, backoff=1)
    >>> [rule.wait(losses=[0, 1, 2][:n], now=2) for n in (1, 2, 3)]
    [0.0, 1.0, 2.0]
    >>> rule.wait(losses=[0, 1, 2, 3], now=3) is None
    True
    """

    count: int = 5
    seconds: float = 600.0
    backoff: float = 1.0
    backoff_max: float = 60.0

    def __post_init__(self) -> None:
        check_whole("count", self.count, "Restarts(5), or Restarts(0) for no restart")
        right = "Restarts(5, seconds=600, backoff=1, backoff_max=60)"
        check_number("seconds", self.seconds, right, above=0)
        check_number("backoff", self.backoff, right, least=0)
        longest = 365 * 24 * 3600.0
        check_number("backoff_max", self.backoff_max, right, least=self.backoff, most=longest)

    def wait(self, losses: Sequence[float], now: float) -> float | None:
        """Return the seconds until a shard is placed again, or ``None`` to give up.

        Parameters
        ----------
        losses
            When the shard was lost, the last time included.
        now
            By the same clock.
        """
        recent = sum(now - lost <= self.seconds for lost in losses)
        if recent > self.count:
            return None
        if recent < 2:
            return 0.0
        return float(min(self.backoff_max, self.backoff * 2.0 ** min(recent - 2, 1000)))


@dataclass(frozen=True)
class EnvFaults:
    """What becomes of an environment that raises or breaks its own space.

    Parameters
    ----------
    count
        How often one environment is rebuilt within ``seconds``; one fault more ends the run.
        With 0 the first fault does.
    seconds
        The time that faults are counted over.
    bounds
        Whether an observation outside the bounds of its ``Box`` is a fault too. Numbers that
        are not finite, wrong shapes and wrong dtypes always are.

    Examples
    --------
    >>> EnvFaults(count=2, seconds=60).allows([0, 50, 70], now=70)
    True
    """

    count: int = 5
    seconds: float = 600.0
    bounds: bool = False

    def __post_init__(self) -> None:
        right = "EnvFaults(5, seconds=600), or EnvFaults(0) to end the run at the first fault"
        check_whole("count", self.count, right)
        check_number("seconds", self.seconds, right, above=0)
        check_flag("bounds", self.bounds, "EnvFaults(5, bounds=True)")

    def allows(self, faults: Sequence[float], now: float) -> bool:
        """Whether an environment with faults at these times, the last included, is rebuilt."""
        return sum(now - fault <= self.seconds for fault in faults) <= self.count


class Pulse:
    """When a shard was last heard, and when its environments last moved.

    Examples
    --------
    >>> pulse = Pulse(now=0)
    >>> pulse.pong(10, steps=5, busy=True)
    >>> pulse.pong(20, steps=5, busy=True)
    >>> pulse.fault(25, silence=30, step=60), pulse.fault(80, silence=100, step=60)
    (None, 'has not finished a step for 70 s: an environment hangs')
    """

    def __init__(self, now: float) -> None:
        self._heard = self._moved = now
        self._steps = -1
        self._busy = False

    @property
    def steps(self) -> int:
        """Steps that the shard had taken when it last answered."""
        return max(0, self._steps)

    @property
    def heard_at(self) -> float:
        """When something last came."""
        return self._heard

    def heard(self, now: float) -> None:
        """Note that something came."""
        self._heard = now

    def progress(self, now: float) -> None:
        """Note that a fragment came."""
        self._heard = self._moved = now

    def pong(self, now: float, steps: int, busy: bool) -> None:
        """Note an answer: steps taken so far, and whether more are being taken."""
        self._heard = now
        if steps != self._steps or not busy:
            self._moved = now
        self._steps, self._busy = steps, busy

    def fault(self, now: float, silence: float, step: float) -> str | None:
        """Say what is wrong, if anything is: no answer for long, or no step for long."""
        if now - self._heard > silence:
            return (
                f"has not answered for {now - self._heard:.0f} s: its process is stopped, holds "
                "Python's lock, or cannot be reached"
            )
        if self._busy and now - self._moved > step:
            return f"has not finished a step for {now - self._moved:.0f} s: an environment hangs"
        return None


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

    Whoever is at an address long after the end is another process, with another end.

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
    another, as many as make the two even.

    Parameters
    ----------
    placed
        The worker of each shard.
    load
        Shards of each worker that is there, whoever they belong to.
    leaving
        Workers that are to leave.

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


def env_seeds(seed: int | None, incarnation: int, first: int, count: int) -> list[int | None]:
    """Return the seeds of a shard's environments, which no other incarnation has.

    Environment ``i`` begins with ``seed + i``; after a restart its seed is drawn from the
    seed, the incarnation and ``i``, so that no stream is ever repeated.

    Examples
    --------
    >>> env_seeds(7, 0, 2, 3)
    [9, 10, 11]
    >>> env_seeds(7, 1, 2, 3) == env_seeds(7, 1, 0, 5)[2:]
    True
    """
    if seed is None:
        return [None] * count
    if incarnation == 0:
        return [seed + first + i for i in range(count)]
    return [
        int(np.random.SeedSequence([seed, incarnation, env]).generate_state(1)[0] >> 1)
        for env in range(first, first + count)
    ]


def rebuilt_seed(seed: int | None, env: int, count: int) -> int | None:
    """Return the seed of an environment that is rebuilt, for the ``count``-th time.

    Examples
    --------
    >>> rebuilt_seed(None, 3, 1) is None, rebuilt_seed(7, 3, 1) != rebuilt_seed(7, 3, 2)
    (True, True)
    """
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, env, count, 1]).generate_state(1)[0] >> 1)
