"""Rate limiting: whether the learner waits for collection, or collection for the learner."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clusterenv.data.checks import check_number, check_whole
from clusterenv.errors import ConfigError, EmptyStore, RatioError, shown
from clusterenv.store.samplers.recent import Recent

if TYPE_CHECKING:
    from clusterenv.data.batch import Batch
    from clusterenv.store.replay import ReplayStore
    from clusterenv.store.samplers.sampler import Sampler

__all__ = ["RateLimiter", "Ratio", "check_source"]


@dataclass(frozen=True)
class Ratio:
    """Target ratio of rows sampled to rows added, kept within ``slack`` sampled rows.

    Parameters
    ----------
    samples_per_insert
        Rows sampled for each row added.
    min_rows
        Rows that must have been added before the first sample.
    slack
        How many sampled rows learner or collection may be ahead. By default the least with which
        neither blocks the other forever. If ``slack`` is too small for the actual sizes of
        batches and samples, ``sample``, ``may_sample`` and ``feed`` raise :class:`RatioError` as
        soon as these are known.

    Raises
    ------
    ConfigError
        If a setting would block one side, or both, with batches and samples of any size.

    Examples
    --------
    >>> ratio = Ratio(8, min_rows=1000)
    >>> ratio.may_sample(256, added=500, sampled=0), ratio.may_sample(256, added=1000, sampled=0)
    (False, True)
    >>> ratio.may_add(512, 256, added=1000, sampled=0)  # the learner is behind
    False
    >>> ratio.may_add(512, 256, added=1000, sampled=2048)
    True
    """

    samples_per_insert: float
    min_rows: int = 1
    slack: float | None = None

    def __post_init__(self) -> None:
        right = "Ratio(8), or ratio=None for any number"
        per_insert = check_number(
            "samples_per_insert", self.samples_per_insert, right, above=0, most=1e300
        )
        check_whole("min_rows", self.min_rows, "Ratio(8, 1000)", least=1)
        least = max(1.0, per_insert)
        right = f"Ratio({per_insert:g}, slack={8 * least:g})"
        if self.slack is not None and check_number("slack", self.slack, right) < least:
            raise ConfigError(
                f"slack={self.slack} would stop both sides: one row more is {per_insert:g} samples "
                f"more, so slack must be at least {least:g}: {right}"
            )

    def check(self, capacity: int) -> None:
        """Raise if a store of this capacity never reaches ``min_rows``."""
        if self.min_rows > capacity:
            raise ConfigError(
                f"min_rows={self.min_rows:,} is never reached with capacity={capacity:,}: "
                f"Ratio({self.samples_per_insert:g}, min_rows={max(1, capacity // 2):_})"
            )

    def check_sizes(self, rows: int, n: int) -> None:
        """Raise if batches of ``rows`` rows and samples of ``n`` could block both sides."""
        least = self._least(rows, n)
        if self.slack is not None and self.slack < least:
            raise RatioError(
                f"slack={self.slack:g} stops both sides with batches of {rows} rows and samples of "
                f"{n}: each waits for the other. Use at least Ratio({self.samples_per_insert:g}, "
                f"slack={least:g})"
            )

    def may_sample(self, n: int, *, added: int, sampled: int, rows: int = 0) -> bool:
        """Whether the learner may sample ``n`` rows now; batches have ``rows`` rows."""
        if added < self.min_rows:
            return False
        return sampled + n <= self._credit(added) + self._slack(rows, n)

    def may_add(self, rows: int, n: int, *, added: int, sampled: int) -> bool:
        """Whether a batch of ``rows`` rows may be added now; samples have ``n`` rows."""
        if added < self.min_rows:
            return True
        return self._credit(added + rows) - sampled <= self._slack(rows, n)

    def _credit(self, added: int) -> float:
        """Return how many samples the rows allow; the first ``min_rows`` rows allow none."""
        return (added - self.min_rows) * self.samples_per_insert

    def _slack(self, rows: int, n: int) -> float:
        return self._least(rows, n) if self.slack is None else self.slack

    def _least(self, rows: int, n: int) -> float:
        # If sampling is refused, credit - sampled < n - slack; then adding must be allowed:
        # credit + rows * ratio - sampled <= slack, which holds if n + rows * ratio <= 2 * slack.
        return max(1.0, n, (n + rows * self.samples_per_insert) / 2)


class RateLimiter:
    """Enforces the ratio of a store of this capacity and sampler; ``None`` for no limit."""

    def __init__(self, ratio: Ratio | float | None, capacity: int, sampler: Sampler) -> None:
        self.ratio = ratio if ratio is None or isinstance(ratio, Ratio) else Ratio(ratio)
        if self.ratio is not None:
            self.ratio.check(capacity)
            if isinstance(sampler, Recent):
                raise ConfigError(
                    f"Recent counts the uses of each batch itself, and leaves nothing to "
                    f"{self.ratio}: ReplayStore(..., sampler=Recent(4, uses=2)), without ratio="
                )
        self.batch_rows = 0
        """Rows of the largest batch so far; a batch that is refused now will come again."""
        self.sample_rows = 0
        """Rows of the largest sample so far."""
        self.starved = False
        """Whether the sampler found nothing to draw, although there are rows."""
        self.postponed: deque[Batch] = deque()
        """Batches of a feed that were larger than the ratio allowed."""

    def may_add(self, rows: int, added: int, sampled: int) -> bool:
        if self.ratio is None or not self.sample_rows or self.starved:
            return True  # a learner that waits for rows must get them
        return self.ratio.may_add(rows, self.sample_rows, added=added, sampled=sampled)

    def may_sample(self, n: int, added: int, sampled: int) -> bool:
        """Whether ``n`` rows may be sampled now; raise ``RatioError`` if the slack is too small."""
        if self.ratio is None:
            return True
        if self.batch_rows:
            self.ratio.check_sizes(self.batch_rows, n)
        return self.ratio.may_sample(n, added=added, sampled=sampled, rows=self.batch_rows)

    def check_add(self, rows: int, added: int, sampled: int) -> None:
        if not self.may_add(rows, added, sampled):
            raise RatioError(
                f"the learner is behind: {added:,} rows were added and {sampled:,} sampled, "
                f"with {self.ratio}; sample before adding more, or let store.feed(collector, n) "
                "do it"
            )

    def check_sample(self, n: int, added: int, sampled: int) -> None:
        self.sample_rows = max(self.sample_rows, n)
        if not self.may_sample(n, added, sampled):
            raise RatioError(
                f"the learner is ahead: {added:,} rows were added and {sampled:,} sampled, "
                f"with {self.ratio}; add a batch before sampling more, or let "
                "store.feed(collector, n) do it"
            )

    def feed(
        self, store: ReplayStore, source: Iterable[Batch], n: int | None, options: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Yield samples, and add batches meanwhile; see :meth:`ReplayStore.feed`."""
        self.sample_rows = max(self.sample_rows, n or 0)
        batches, postponed = iter(source), self.postponed
        must_wait = not store.may_sample(n or 1)  # a resumed store may allow samples already
        while True:
            ready = len(postponed) + getattr(source, "ready", 1)  # without waiting
            while must_wait or (ready > 0 and store.may_add(self.batch_rows)):
                batch = postponed.popleft() if postponed else next(batches, None)
                if batch is None:
                    return
                try:
                    store.add(batch)
                except RatioError:  # its size was not known before
                    postponed.appendleft(batch)
                ready -= 1
                must_wait = not store.may_sample(n or 1)
            try:
                sample = store.sample(n, **options)
            except (EmptyStore, RatioError):
                must_wait = True
                continue
            yield sample


def check_source(source: Any) -> None:
    """Raise ``ConfigError`` unless this can be a source of batches."""
    if not isinstance(source, Iterable) or isinstance(source, (np.ndarray, torch.Tensor)):
        raise ConfigError(
            f"feed() takes a Collector, or batches, got {shown(source)}: store.feed(collector, 256)"
        )
