"""How rows reach a learner: as rollouts, as fragments, or as samples of a replay store."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from clusterenv import Batch, Collector
from clusterenv.errors import ConfigError, EmptyStore, StaleBatch
from clusterenv.store import (
    NStep,
    Prioritized,
    Ratio,
    ReplayStore,
    Rollout,
    RolloutStore,
    Sequences,
)
from pipelines.experiment.algorithm import (
    Algorithm,
    Losses,
    ReplayAlgorithm,
    RolloutAlgorithm,
    StreamAlgorithm,
)
from pipelines.experiment.episodes import BatchStream, Episodes
from pipelines.experiment.interrupt import Interrupt

__all__ = ["Feed", "ReplayFeed", "RolloutFeed", "StreamFeed", "feed_of"]


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

    def __init__(self, algorithm: Algorithm[Any, Any]) -> None:
        self._algorithm = algorithm
        self._rows, self._seconds = 0, 0.0  # learned from, in this session

    def _learn(self, rows: Any, count: int, progress: float) -> Any:
        """Make one step of learning, and measure it."""
        began = time.perf_counter()
        learned = self._algorithm.learn(rows, progress)
        self._seconds += time.perf_counter() - began
        self._rows += count
        return learned

    @abstractmethod
    def learn(self, collector: Collector, interrupt: Interrupt) -> Iterator[Losses]:
        """Yield what each step of learning lost, until the run is interrupted."""

    def collector_options(self) -> dict[str, Any]:
        """Return options of the collector."""
        return {}

    def metrics(self, seconds: float) -> dict[str, Any]:
        """Return metrics of the learner's work in so many seconds, and of the store."""
        return {
            "learner_rows_per_second": self._rows / max(self._seconds, 1e-9),
            "learner_share": min(1.0, self._seconds / max(seconds, 1e-9)),
        }

    def close(self) -> None:
        """Close the store."""
        if self.store is not None:
            self.store.close()


class RolloutFeed(Feed):
    """One step of learning for every rollout."""

    def __init__(self, algorithm: RolloutAlgorithm[Any], episodes: Episodes, steps: int) -> None:
        super().__init__(algorithm)
        self._episodes, self.steps = episodes, steps

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
            self.steps += (rows := store.rows)
            yield self._learn(store.take(), rows, progress)


class StreamFeed(Feed):
    """One step of learning for every fragment, or several if the learner keeps recent ones."""

    def __init__(self, algorithm: StreamAlgorithm[Any], episodes: Episodes, steps: int) -> None:
        super().__init__(algorithm)
        self._episodes, self.steps = episodes, steps
        self._args, self._recent = algorithm.args, algorithm.recent()
        self._draws = algorithm.draws

    def collector_options(self) -> dict[str, Any]:
        return {"credits": self._args.queue}

    def learn(self, collector: Collector, interrupt: Interrupt) -> Iterator[Losses]:
        stream = BatchStream(collector, self._episodes, interrupt, rows=self.steps)
        fragments = self._fragments(stream) if self._recent is None else self._sampled(stream)
        for rows in fragments:
            progress = min(1.0, self.steps / self._args.total_steps)
            self.steps = stream.rows
            yield self._learn(rows, rows["reward"].numel(), progress)

    def _fragments(self, stream: BatchStream) -> Iterator[Rollout]:
        """Yield every fragment once."""
        for batch in stream:
            self._check_lag(batch)
            yield batch.torch()

    def _sampled(self, stream: BatchStream) -> Iterator[Rollout]:
        """Yield samples of recent fragments: for each that arrives as many as the learner wants.

        While none arrives it draws more. When all have been used up, it waits for the next.
        """
        assert self._recent is not None
        args = self._args
        capacity = self._recent.n * args.num_envs * args.horizon  # if one shard has them all
        # With a side slot for every row, the ends of episodes cost no fragment its place.
        store = ReplayStore(capacity, sampler=self._recent, side=1.0, seed=args.seed)
        with store:
            for batch in stream:
                self._check_lag(batch)
                store.add(batch)
                for drawn in itertools.count(1):
                    try:
                        sample = store.sample(columns=self._columns(batch), tensors=True)
                    except EmptyStore:
                        break
                    yield _rollout(sample)
                    if drawn >= self._draws and stream.ready:
                        break

    def _columns(self, batch: Batch) -> list[str]:
        """Return the columns that a learner may need beyond those that every sample has."""
        return [name for name in ("log_prob", "raw_action", "step") if name in batch.names]

    def _check_lag(self, batch: Batch) -> None:
        """Raise ``StaleBatch`` if a fragment is older than allowed."""
        lag, limit = self.version - batch.policy_version, self._args.lag_limit
        if limit is not None and lag > limit:
            raise StaleBatch(
                f"a fragment of shard {batch.shard} was acted by version {batch.policy_version}, "
                f"{lag} behind version {self.version}, and --lag-limit is {limit}. The run goes on "
                f"with --lag-limit {lag}; with --sync every-version and a larger --publish-every "
                "fragments lag less"
            )


class ReplayFeed(Feed):
    """One step of learning for every sample of a replay store, whose rows are on disk too."""

    store: ReplayStore

    def __init__(
        self, algorithm: ReplayAlgorithm[Any], episodes: Episodes, steps: int, journal: Path
    ) -> None:
        super().__init__(algorithm)
        self._episodes, self.steps = episodes, steps
        args = self._args = algorithm.args
        sampler = algorithm.sampler()
        if isinstance(sampler, Sequences) and sampler.burn_in:
            _check_state(algorithm)
        base = sampler.base if isinstance(sampler, (NStep, Sequences)) else sampler
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
            losses, errors = self._learn(rows, rows["reward"].numel(), progress)
            if self._prioritized is not None and errors is not None:
                self.store.update_priorities(rows["indices"], errors)
                self._prioritized.beta = args.beta + (1 - args.beta) * progress
            self.steps = stream.rows
            yield losses

    def metrics(self, seconds: float) -> dict[str, Any]:
        held = self.store.stats
        return super().metrics(seconds) | {
            "store_rows": held.rows,
            "store_capacity": held.capacity,
            "store_bytes": held.nbytes,
            "store_age": held.newest_version - held.oldest_version,
        }


def feed_of(algorithm: Algorithm[Any, Any], episodes: Episodes, steps: int, journal: Path) -> Feed:
    """Return the feed of a learner, after so many steps."""
    if isinstance(algorithm, ReplayAlgorithm):
        return ReplayFeed(algorithm, episodes, steps, journal)
    if isinstance(algorithm, StreamAlgorithm):
        return StreamFeed(algorithm, episodes, steps)
    assert isinstance(algorithm, RolloutAlgorithm)
    return RolloutFeed(algorithm, episodes, steps)


def _check_state(algorithm: ReplayAlgorithm[Any]) -> None:
    """Raise if the rows would have no recurrent state to begin a burn-in with."""
    policy = algorithm.policy
    if not policy.initial_state(1):
        raise ConfigError(
            f"{algorithm.title} burns in from the recurrent state that is stored with its "
            f"sequences, and {type(policy).__name__} has none: define its initial_state(n), for "
            "example {'hidden': torch.zeros(n, 64)}, or sample Sequences(…, burn_in=0)"
        )


def _rollout(sample: Mapping[str, Tensor]) -> Rollout:
    """Return a sampled fragment as a rollout, whose tails are among its next observations."""
    ends = sample["terminated"] | sample["truncated"]
    ends[-1] = True
    tail_rows = ends.flatten().nonzero().squeeze(-1)
    besides = ("next_obs", "indices", "weights")
    columns = {name: column for name, column in sample.items() if not name.startswith(besides)}
    tail = {
        name.removeprefix("next_"): column.flatten(0, 1)[tail_rows]
        for name, column in sample.items()
        if name.startswith("next_obs")
    }
    return Rollout(columns, tail_rows, tail)
