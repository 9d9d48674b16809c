"""What a collector has done so far, counted as it arrives."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from clusterenv.sync.publisher import Publisher
from clusterenv.transport.messages import FragmentMeta

__all__ = ["Stats", "Tally"]


@dataclass(frozen=True)
class Stats:
    """What a collector has done so far."""

    rows: int
    """Received by the head."""
    dropped_rows: int
    """Rows left behind by a lock-step start or a move (engines that spend steps on resetting)."""
    lost_rows: int
    """Rows that lost shards had taken, as far as they had told, and not delivered."""
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
    """Of announcements, sent to all shards together."""
    checks: int
    """Announcements that shards judged by the rule."""
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
    """Of each shard's version from the newest it had heard of, when its last fragment began."""
    version: int
    """The newest."""
    versions: list[int]
    """That acted in the first row of each shard's last fragment."""
    restarts: int
    """Shards placed again after a loss."""
    moves: int
    """Shards that were moved from one worker to another, with nothing lost."""
    rebuilt: int
    """Environments that were rebuilt after a fault of their own."""
    incarnations: list[int]
    """Of each shard: how often it was placed again."""
    queued: int
    """Batches received and not yet taken."""
    queued_by_shard: list[int]
    """The same, of each shard."""
    evaluation_seconds: float
    """Spent by ``publish`` on computing divergences."""


class Tally:
    """Counts what was received; guarded by its lock."""

    def __init__(self, shards: int, version: int) -> None:
        self.lock = threading.Lock()
        self.weight_bytes = self.relayed_bytes = 0
        self.announced_bytes = 0
        self._began = time.monotonic()
        self._rows = [0] * shards
        self._checks = [0] * shards
        self._pulls = [0] * shards
        self._first_version = version
        self._versions = [version] * shards
        self._divergences: list[float | None] = [None] * shards
        self._wire = self._dropped = self._lost = self._episodes = 0
        self._unsettled: list[tuple[int, list[float], list[int]]] = []
        self._returns: deque[float] = deque(maxlen=100)
        self._lengths: deque[int] = deque(maxlen=100)
        self._lags: list[int] = [0, 0, 0]  # least, most, sum
        self._fragments = 0
        self._incarnations = [0] * shards
        self._restarts = self._moves = self._rebuilt = 0
        self._earlier = [0, 0]  # checks and pulls of incarnations that are gone

    def began(self, shard: int, incarnation: int, because: str) -> None:
        """Note that a shard begins, and counts from 0."""
        while shard >= len(self._rows):
            for counts in (self._rows, self._checks, self._pulls):
                counts.append(0)
            self._versions.append(self._first_version)
            self._divergences.append(None)
            self._incarnations.append(0)
        self._moves += because == "move"
        self._restarts += because == "loss"
        self._incarnations[shard] = incarnation
        self._earlier[0] += self._checks[shard]
        self._earlier[1] += self._pulls[shard]
        self._checks[shard] = self._pulls[shard] = 0

    def left_behind(self, rows: int) -> None:
        """Count rows that a move has cost."""
        self._dropped += rows

    def lost(self, rows: int) -> None:
        """Count rows that went with a shard."""
        self._lost += rows

    def add(self, shard: int, rows: int, nbytes: int, meta: FragmentMeta) -> None:
        self._rows[shard] += rows
        self._wire += nbytes
        self._dropped += meta.dropped
        self._episodes += len(meta.returns)
        self._unsettled.append((shard, meta.returns, meta.lengths))
        self._checks[shard] = meta.checks
        self._pulls[shard] = meta.pulls
        self._rebuilt += len(meta.cuts)
        self._versions[shard] = meta.version
        self._divergences[shard] = meta.divergence
        lag = meta.newest - meta.version
        least, most, total = self._lags
        self._lags = [min(least, lag) if self._fragments else lag, max(most, lag), total + lag]
        self._fragments += 1

    def settle(self) -> None:
        """Enter the episodes of the fragments since the last call, by shard.

        In lock-step that is once a rollout: whichever shard was first, the same run has the
        same last episodes.
        """
        for _, returns, lengths in sorted(self._unsettled, key=lambda each: each[0]):
            self._returns.extend(returns)
            self._lengths.extend(lengths)
        self._unsettled.clear()

    def stats(self, publisher: Publisher, queued: int, queued_by_shard: list[int]) -> Stats:
        seconds = time.monotonic() - self._began
        least, most, total = self._lags
        return Stats(
            rows=sum(self._rows),
            dropped_rows=self._dropped,
            lost_rows=self._lost,
            episodes=self._episodes,
            returns=list(self._returns),
            lengths=list(self._lengths),
            seconds=seconds,
            steps_per_second=[rows / seconds for rows in self._rows],
            announcements=publisher.announcements,
            announced_bytes=self.announced_bytes,
            checks=self._earlier[0] + sum(self._checks),
            pulls=self._earlier[1] + sum(self._pulls),
            weight_bytes=self.weight_bytes,
            relayed_bytes=self.relayed_bytes,
            wire_bytes=self._wire,
            lag_min=least,
            lag_mean=total / max(1, self._fragments),
            lag_max=most,
            divergences=list(self._divergences),
            version=publisher.version,
            versions=list(self._versions),
            restarts=self._restarts,
            moves=self._moves,
            rebuilt=self._rebuilt,
            incarnations=list(self._incarnations),
            queued=queued,
            queued_by_shard=queued_by_shard,
            evaluation_seconds=publisher.evaluation_seconds,
        )
