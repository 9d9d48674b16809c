"""How many samples a learner takes per row: who has to wait, learner or collection."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clusterenv.data.checks import is_number, is_whole
from clusterenv.errors import ConfigError, RatioError

__all__ = ["Ratio"]


@dataclass(frozen=True)
class Ratio:
    """Rows sampled per row added, kept within ``slack`` sampled rows.

    Parameters
    ----------
    samples_per_insert
        Rows sampled for each row added.
    min_rows
        Rows that must have been added before the first sample.
    slack
        How many sampled rows learner or collection may be ahead. By default as little as
        lets both go on with the batches and samples that come. One that is too small for all
        sizes is refused at once; one that is too small for those that come, when they are
        known: by ``sample``, ``may_sample`` and ``feed``, as soon as there is a batch, and
        whenever a larger batch or sample comes.

    Raises
    ------
    ConfigError
        If a setting would stop one side, or both, with batches and samples of any size.

    Examples
    --------
    >>> ratio = Ratio(8, min_rows=1000)
    >>> ratio.may_sample(256, added=500, sampled=0), ratio.may_sample(256, added=1000, sampled=0)
    (False, True)
    >>> ratio.may_add(512, 256, added=1000, sampled=0)  # first it is the learner's turn
    False
    >>> ratio.may_add(512, 256, added=1000, sampled=2048)
    True
    """

    samples_per_insert: float
    min_rows: int = 1
    slack: float | None = None

    def __post_init__(self) -> None:
        per_insert = self.samples_per_insert
        if not is_number(per_insert):
            raise ConfigError(
                f"samples_per_insert={per_insert!r} is no number: Ratio(8), or ratio=8"
            )
        if not 0 < per_insert < math.inf:
            raise ConfigError(
                f"samples_per_insert={per_insert} would stop one side for good: "
                "Ratio(8), or ratio=None for any number"
            )
        if not (is_whole(self.min_rows) and self.min_rows >= 1):
            raise ConfigError(
                f"min_rows={self.min_rows!r} is no number of rows, and a sample needs one row: "
                "Ratio(8, 1000)"
            )
        least = max(1.0, per_insert)
        if self.slack is not None and not is_number(self.slack):
            raise ConfigError(
                f"slack={self.slack!r} is no number: Ratio({per_insert:g}, slack={8 * least:g})"
            )
        if self.slack is not None and not self.slack >= least:
            raise ConfigError(
                f"slack={self.slack} would stop both sides: one row more is {per_insert} samples "
                f"more, so slack must be at least {least:g}: "
                f"Ratio({per_insert:g}, slack={8 * least:g})"
            )

    def check(self, capacity: int) -> None:
        """Raise if a store of this capacity could never begin."""
        if self.min_rows > capacity:
            raise ConfigError(
                f"min_rows={self.min_rows:,} is never reached with capacity={capacity:,}: "
                f"Ratio({self.samples_per_insert:g}, min_rows={max(1, capacity // 2):_})"
            )

    def check_sizes(self, rows: int, n: int) -> None:
        """Raise if batches of ``rows`` rows and samples of ``n`` could stop both sides."""
        least = self._least(rows, n)
        if self.slack is not None and self.slack < least:
            raise RatioError(
                f"slack={self.slack:g} stops both sides with batches of {rows} rows and samples of "
                f"{n}: each waits for the other. Use at least Ratio({self.samples_per_insert:g}, "
                f"slack={least:g})"
            )

    def may_sample(self, n: int, *, added: int, sampled: int, rows: int = 0) -> bool:
        """Whether the learner may take ``n`` rows now; batches come with ``rows`` rows."""
        if added < self.min_rows:
            return False
        return sampled + n <= self._credit(added) + self._slack(rows, n)

    def may_add(self, rows: int, n: int, *, added: int, sampled: int) -> bool:
        """Whether a batch of ``rows`` rows may come now; the learner takes ``n`` at a time."""
        if added < self.min_rows:
            return True
        return self._credit(added + rows) - sampled <= self._slack(rows, n)

    def _credit(self, added: int) -> float:
        """Return the samples that the rows are good for; those before the first sample are free."""
        return (added - self.min_rows) * self.samples_per_insert

    def _slack(self, rows: int, n: int) -> float:
        return self._least(rows, n) if self.slack is None else self.slack

    def _least(self, rows: int, n: int) -> float:
        # If sampling is refused, credit - sampled < n - slack; then adding must be allowed:
        # credit + rows * ratio - sampled <= slack, which holds if n + rows * ratio <= 2 * slack.
        return max(1.0, n, (n + rows * self.samples_per_insert) / 2)
