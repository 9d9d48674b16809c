"""How often a lost shard is restarted, and how soon."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from clusterenv.data.checks import check_number, check_whole
from clusterenv.errors import (
    ClusterEnvError,
    ConfigError,
    EnvError,
    EnvGivenUp,
    PolicyError,
    SchedulerLost,
    WorkerLost,
)

__all__ = ["RestartHistory", "Restarts"]


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


_FINAL = (ConfigError, PolicyError, EnvGivenUp, SchedulerLost)  # the next one would fail too


class RestartHistory:
    """What was lost when and how, and whether a shard may be placed again.

    Parameters
    ----------
    rule
        How often, and how soon.
    """

    def __init__(self, rule: Restarts) -> None:
        self._rule = rule
        self._times: defaultdict[int, list[float]] = defaultdict(list)
        self._errors: defaultdict[int, list[BaseException]] = defaultdict(list)
        self._incarnations: defaultdict[int, int] = defaultdict(int)

    def note(self, shard: int, error: BaseException) -> float | None:
        """Note a loss; return the seconds to wait, or ``None`` if the run must end."""
        self._times[shard].append(time.monotonic())
        self._errors[shard].append(error)
        if isinstance(error, _FINAL):
            return None
        return self._rule.wait(self._times[shard], time.monotonic())

    def next_incarnation(self, shard: int) -> int:
        """Return the number that a shard has when it is placed again."""
        self._incarnations[shard] += 1
        return self._incarnations[shard]

    def verdict(self, shard: int) -> BaseException:
        """Return the error that ends the run: the last one, and all before it."""
        errors = self._errors[shard]
        last = errors[-1]
        if len(errors) == 1:
            return last
        kinds = (ConfigError, PolicyError, EnvError, SchedulerLost)
        kind: type[ClusterEnvError] = type(last) if isinstance(last, kinds) else WorkerLost
        seen = "\n\n".join(f"{number}. {error}" for number, error in enumerate(errors, 1))
        final = isinstance(last, _FINAL)
        why = "the last time for good" if final else f"{self._rule} allows no more"
        verdict = kind(
            f"shard {shard} was lost {len(errors)} times, and {why}. What was seen:\n\n{seen}"
        )
        verdict.__cause__ = last
        return verdict
