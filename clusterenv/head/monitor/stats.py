"""Statistics of a collector."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterenv.data.summary import Summary, decimals
from clusterenv.head.fleet.roster import Arrival, Roster
from clusterenv.sync.announcement import Announcement
from clusterenv.sync.publisher import Publisher

__all__ = ["Stats", "Tally"]


@dataclass(frozen=True, repr=False)
class Stats(Summary):
    """Statistics of a collector since it was made.

    The fragments of a rollout, and the weights sent for it, are counted when ``rollout()`` returns
    it, so the same seed gives the same counts, with ``overlap=True`` too. What depends on time is
    ``seconds``, ``steps_per_second``, ``evaluation_seconds``, ``announced_bytes``, ``queued``,
    ``queued_by_shard`` and those of ``inference``; on lost and moving shards ``restarts``,
    ``moves``, ``incarnations`` and ``lost_rows``; and on which worker was faster how
    ``weight_bytes`` and ``relayed_bytes`` share their sum.
    """

    rows: int
    """Received by the head."""
    dropped_rows: int
    """Rows left behind by a lock-step start or a move (engines that spend steps on resetting), and
    rows that had arrived for a rollout that was not returned before ``close()``."""
    lost_rows: int
    """Rows that lost shards had collected, by their last heartbeat, and not delivered."""
    episodes: int
    """Finished."""
    returns: list[float]
    """Of the last 100 finished episodes."""
    lengths: list[int]
    """In steps, of the same episodes."""
    seconds: float
    """Since the collector was made."""
    steps_per_second: list[float]
    """Of each shard, since the collector was made."""
    announcements: int
    """Versions published."""
    announced_bytes: int
    """Of announcements on the run's topic, sent to all worker processes together."""
    checks: int
    """Announcements that shards applied the rule to."""
    pulls: int
    """Of weights, by all shards together."""
    weight_bytes: int
    """Weights sent by the head."""
    relayed_bytes: int
    """Weights sent by workers to workers."""
    wire_bytes: int
    """Fragments received by the head."""
    lag_min: int
    """Versions that a fragment's first row was behind the newest its shard knew: the least,"""
    lag_mean: float
    """the mean,"""
    lag_max: int
    """and the most, over all received fragments."""
    divergences: list[float | None]
    """Of each shard's version from the newest that it knew, when its last fragment began."""
    version: int
    """The newest."""
    versions: list[int]
    """That acted in the first row of each shard's last fragment."""
    restarts: int
    """Restarts of lost shards."""
    moves: int
    """Shards that were moved from one worker to another, with nothing lost."""
    rebuilt: int
    """Environments that were rebuilt after a fault of their own."""
    incarnations: list[int]
    """Of each shard: how often it was restarted, moved or added again."""
    queued: int
    """Batches received and not yet taken."""
    queued_by_shard: list[int]
    """The same, of each shard."""
    evaluation_seconds: float
    """Spent by ``publish`` on computing divergences."""
    inference_batches: int
    """Evaluations of the policy at the head, with ``inference="head"``; else 0."""
    inference_rows: int
    """Environment steps that these chose the actions of."""
    inference_seconds: float
    """Spent on these."""

    @property
    def mean_return(self) -> float | None:
        """Mean of ``returns``; ``None`` before an episode has finished."""
        return statistics.fmean(self.returns) if self.returns else None

    def _summary(self) -> Mapping[str, Any]:
        faults = {name: getattr(self, name) for name in ("restarts", "rebuilt", "lost_rows")}
        return {
            "rows": self.rows,
            "seconds": decimals(self.seconds),
            "episodes": self.episodes,
            "mean_return": decimals(self.mean_return),
            "version": self.version,
            "pulls": self.pulls,
            "lag_mean": decimals(self.lag_mean),
            **{name: count for name, count in faults.items() if count},
        }


class Tally:
    """Counts of all shards together, guarded by the roster's lock."""

    def __init__(self, first_version: int) -> None:
        self._weight_bytes = self._relayed_bytes = 0
        self.dropped_rows = self.lost_rows = self.restarts = self.moves = 0
        self._began = time.monotonic()
        self._first_version = first_version
        self._wire = self._episodes = self._rebuilt = 0
        self._inference_batches = self._inference_rows = 0
        self._inference_seconds = 0.0
        self._unsettled: list[tuple[Arrival, int]] = []  # and the bytes of each
        self._sent = [0, 0]  # bytes of weights since then, from the head and from workers
        self._returns: deque[float] = deque(maxlen=100)
        self._lengths: deque[int] = deque(maxlen=100)
        self._lags: list[int] = [0, 0, 0]  # least, most, sum
        self._fragments = 0

    def add(self, arrival: Arrival, nbytes: int) -> None:
        """Record a fragment, to be counted by :meth:`settle`."""
        self._unsettled.append((arrival, nbytes))

    def sent(self, nbytes: int, *, relayed: bool = False) -> None:
        """Record weights that were sent by the head, or relayed by a worker."""
        self._sent[relayed] += nbytes

    def inferred(self, rows: int, seconds: float) -> None:
        """Record an evaluation of the policy at the head."""
        self._inference_batches += 1
        self._inference_rows += rows
        self._inference_seconds += seconds

    def settle(self, roster: Roster) -> None:
        """Count the fragments and weights since the last call, in the order of shards.

        In lock-step that is once per rollout, so that neither the order in which fragments arrive
        nor those of the next rollout change a statistic.
        """
        for arrival, nbytes in sorted(self._unsettled, key=lambda each: each[0].shard):
            roster.count(arrival)
            self._count(arrival, nbytes)
        self._unsettled.clear()
        self._weight_bytes += self._sent[False]
        self._relayed_bytes += self._sent[True]
        self._sent = [0, 0]

    def discard(self) -> None:
        """Count the rows since the last :meth:`settle` as dropped: no rollout returns them."""
        self.dropped_rows += sum(arrival.rows for arrival, _ in self._unsettled)
        self._unsettled.clear()

    def _count(self, arrival: Arrival, nbytes: int) -> None:
        meta = arrival.meta
        self._wire += nbytes
        self.dropped_rows += meta.dropped
        self._episodes += len(meta.returns)
        self._returns.extend(meta.returns)
        self._lengths.extend(meta.lengths)
        self._rebuilt += len(meta.cuts)
        lag = meta.newest - meta.version
        least, most, total = self._lags
        self._lags = [min(least, lag) if self._fragments else lag, max(most, lag), total + lag]
        self._fragments += 1

    def described(self, announcement: Announcement, roster: Roster) -> Announcement:
        """Return an announcement with where the run stands, for those who follow it."""
        records = list(roster)
        return announcement._replace(
            time=time.time(),
            rows=sum(record.rows for record in records),
            pulls=sum(record.pulls for record in records),
            lag=self._lags[2] / max(1, self._fragments),
            mean_return=statistics.fmean(self._returns) if self._returns else None,
        )

    def stats(self, roster: Roster, publisher: Publisher, announced_bytes: int) -> Stats:
        """Return the statistics of a collector."""
        seconds = time.monotonic() - self._began
        least, most, total = self._lags
        records = list(roster)
        first = self._first_version
        return Stats(
            rows=sum(record.rows for record in records),
            dropped_rows=self.dropped_rows,
            lost_rows=self.lost_rows,
            episodes=self._episodes,
            returns=list(self._returns),
            lengths=list(self._lengths),
            seconds=seconds,
            steps_per_second=[record.rows / seconds for record in records],
            announcements=publisher.announcements,
            announced_bytes=announced_bytes,
            checks=sum(record.checks for record in records),
            pulls=sum(record.pulls for record in records),
            weight_bytes=self._weight_bytes,
            relayed_bytes=self._relayed_bytes,
            wire_bytes=self._wire,
            lag_min=least,
            lag_mean=total / max(1, self._fragments),
            lag_max=most,
            divergences=[record.divergence for record in records],
            version=publisher.version,
            versions=[first if record.acted is None else record.acted for record in records],
            restarts=self.restarts,
            moves=self.moves,
            rebuilt=self._rebuilt,
            incarnations=[record.incarnation for record in records],
            queued=sum(record.waiting for record in records),
            queued_by_shard=[record.waiting for record in records],
            evaluation_seconds=publisher.evaluation_seconds,
            inference_batches=self._inference_batches,
            inference_rows=self._inference_rows,
            inference_seconds=self._inference_seconds,
        )
