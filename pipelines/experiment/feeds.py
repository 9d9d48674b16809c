"""How rows reach a learner: as rollouts, or as samples of a replay store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterenv import Collector
from clusterenv.store import NStep, Prioritized, Ratio, ReplayStore, RolloutStore
from pipelines.experiment.algorithm import Algorithm, Losses, ReplayAlgorithm, RolloutAlgorithm
from pipelines.experiment.episodes import BatchStream, Episodes
from pipelines.experiment.interrupt import Interrupt

__all__ = ["Feed", "ReplayFeed", "RolloutFeed", "feed_of"]


class Feed(ABC):
    """Takes batches from a collector, and has a learner learn from them.

    Attributes
    ----------
    steps
        Rows taken so far, in all sessions.
    version
        The newest that was published.
    store
        The replay store, if there is one.
    """

    steps: int
    version: int = 0
    store: ReplayStore | None = None

    @abstractmethod
    def learn(self, collector: Collector, interrupt: Interrupt) -> Iterator[Losses]:
        """Yield what each step of learning lost, until the run is interrupted."""

    def collector_options(self) -> dict[str, Any]:
        """Return options of the collector."""
        return {}

    def metrics(self) -> dict[str, Any]:
        """Return metrics of the store."""
        return {}

    def close(self) -> None:
        """Close the store."""
        if self.store is not None:
            self.store.close()


class RolloutFeed(Feed):
    """One step of learning for every rollout."""

    def __init__(self, algorithm: RolloutAlgorithm[Any], episodes: Episodes, steps: int) -> None:
        self._algorithm, self._episodes, self.steps = algorithm, episodes, steps

    def collector_options(self) -> dict[str, Any]:
        return {"overlap": self._algorithm.args.overlap}

    def learn(self, collector: Collector, interrupt: Interrupt) -> Iterator[Losses]:
        args = self._algorithm.args
        most = None if args.max_lag is None else args.max_lag + args.overlap
        store = RolloutStore(max_lag=most)
        while not interrupt.wanted:
            for batch in collector.rollout():
                self._episodes.add(batch)
                store.add(batch, newest_version=self.version)
            progress = min(1.0, self.steps / args.total_steps)
            self.steps += store.rows
            yield self._algorithm.learn(store.take(), progress)


class ReplayFeed(Feed):
    """One step of learning for every sample of a replay store, whose rows are on disk too."""

    store: ReplayStore

    def __init__(
        self, algorithm: ReplayAlgorithm[Any], episodes: Episodes, steps: int, journal: Path
    ) -> None:
        self._algorithm, self._episodes, self.steps = algorithm, episodes, steps
        args = self._args = algorithm.args
        sampler = algorithm.sampler()
        base = sampler.base if isinstance(sampler, NStep) else sampler
        self._prioritized = base if isinstance(base, Prioritized) else None
        self.store = ReplayStore(
            args.capacity,
            sampler=sampler,
            journal=journal,
            ratio=Ratio(args.batch / args.rows_per_update, min_rows=args.min_rows),
            stack=algorithm.stack,
            seed=args.seed,
        )

    def learn(self, collector: Collector, interrupt: Interrupt) -> Iterator[Losses]:
        args = self._args
        stream = BatchStream(collector, self._episodes, interrupt, rows=self.steps)
        for rows in self.store.feed(stream, args.batch, tensors=True):
            progress = min(1.0, stream.rows / args.total_steps)
            losses, errors = self._algorithm.learn(rows, progress)
            if self._prioritized is not None and errors is not None:
                self.store.update_priorities(rows["indices"], errors)
                self._prioritized.beta = args.beta + (1 - args.beta) * progress
            self.steps = stream.rows
            yield losses

    def metrics(self) -> dict[str, Any]:
        held = self.store.stats
        return {
            "store_rows": held.rows,
            "store_capacity": held.capacity,
            "store_bytes": held.nbytes,
            "store_age": held.newest_version - held.oldest_version,
        }


def feed_of(algorithm: Algorithm[Any, Any], episodes: Episodes, steps: int, journal: Path) -> Feed:
    """Return the feed of a learner, after so many steps."""
    if isinstance(algorithm, ReplayAlgorithm):
        return ReplayFeed(algorithm, episodes, steps, journal)
    assert isinstance(algorithm, RolloutAlgorithm)
    return RolloutFeed(algorithm, episodes, steps)
