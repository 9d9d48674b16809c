"""Returns and lengths of episodes, computed from batches."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from clusterenv import Batch, Collector
from pipelines.experiment.interrupt import Interrupt

__all__ = ["BatchStream", "Episodes", "mean"]

WINDOW = 100


class Episodes:
    """Adds up rewards to returns, batch by batch, and counts steps.

    Parameters
    ----------
    num_envs
        Environments, all shards together.
    judged
        Environments, by global index, whose returns are also kept apart; by default all.

    Attributes
    ----------
    returns
        Of the last 100 finished episodes, oldest first.
    lengths
        Steps of these episodes.
    judged_returns
        The returns of the environments that are judged; as much less than 100 as these are
        less than all, so that both look back over as many steps.
    count
        Episodes finished.
    """

    def __init__(self, num_envs: int, judged: Iterable[int] | None = None) -> None:
        self._open = np.zeros(num_envs)  # rewards of the episode that goes on
        self._judged = np.zeros(num_envs, np.bool_)
        self._judged[slice(None) if judged is None else list(judged)] = True
        window = max(1, round(WINDOW * float(self._judged.mean())))
        self.returns: deque[float] = deque(maxlen=WINDOW)
        self.lengths: deque[float] = deque(maxlen=WINDOW)
        self.judged_returns: deque[float] = deque(maxlen=window)
        self.count = 0

    def add(self, batch: Batch) -> list[tuple[int, float]]:
        """Book a batch; return environment and return of every episode that ended in it."""
        # Environment by environment, each in order of time: tracks of one lie side by side.
        names = ("env", "step", "reward", "terminated", "truncated")
        env, step, reward, terminated, truncated = (batch[name].T.reshape(-1) for name in names)
        over = terminated | truncated
        last = over.copy()  # rows after which another episode, or another environment, begins
        last[:-1] |= env[1:] != env[:-1]
        last[-1] = True
        ends = np.flatnonzero(last)
        starts = np.concatenate([[0], ends[:-1] + 1])
        total = np.add.reduceat(reward.astype(np.float64), starts)
        of = env[starts]
        first = np.concatenate([[True], of[1:] != of[:-1]])
        goes_on = first & (step[starts] > 0)  # a restarted shard begins a new episode
        total[goes_on] += self._open[of[goes_on]]
        self._open[of[first]] = 0.0
        done = over[ends]
        self._open[of[~done]] = total[~done]
        self.returns.extend(total[done].tolist())
        self.lengths.extend((step[ends[done]] + 1).tolist())
        self.judged_returns.extend(total[done & self._judged[of]].tolist())
        self.count += int(done.sum())
        return list(zip(of[done].tolist(), total[done].tolist(), strict=True))

    @property
    def judgement(self) -> float:
        """Mean return of the environments that are judged; NaN until their window is full."""
        kept = self.judged_returns
        return mean(kept) if len(kept) == kept.maxlen else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, without unfinished episodes."""
        kept = ("returns", "lengths", "judged_returns")
        return {**{name: list(getattr(self, name)) for name in kept}, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.returns.extend(state["returns"])
        self.lengths.extend(state.get("lengths", ()))  # older runs have not kept them
        self.judged_returns.extend(state["judged_returns"])
        self.count = int(state["count"])


def mean(values: Iterable[float]) -> float:
    """Return the mean, NaN if there is none."""
    values = list(values)
    return statistics.fmean(values) if values else math.nan


class BatchStream:
    """Passes a collector's batches on to a store, and counts them.

    Parameters
    ----------
    collector
        Where batches come from.
    episodes
        Records the returns.
    interrupt
        When it is wanted, no further batch is taken.
    rows
        Rows that earlier sessions collected.
    """

    def __init__(
        self,
        collector: Collector,
        episodes: Episodes,
        interrupt: Interrupt,
        *,
        rows: int = 0,
    ) -> None:
        self._collector = collector
        self._episodes = episodes
        self._interrupt = interrupt
        self.rows = rows

    @property
    def ready(self) -> int:
        """Batches that can be taken without waiting."""
        return self._collector.ready

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._collector:
            self.rows += batch.num_rows
            self._episodes.add(batch)
            yield batch
            if self._interrupt.wanted:
                return
