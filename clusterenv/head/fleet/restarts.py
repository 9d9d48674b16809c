"""Restarts of lost shards: the budget, the history, and the loop that places a shard."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterenv.data.checks import check_number, check_whole
from clusterenv.errors import (
    ClosedError,
    ClusterEnvError,
    ConfigError,
    EnvError,
    EnvGivenUp,
    PolicyError,
    SchedulerLost,
    WorkerLost,
)

if TYPE_CHECKING:
    from clusterenv.head.fleet.fleet import Fleet
    from clusterenv.head.fleet.handle import ShardHandle

__all__ = ["RestartHistory", "Restarter", "Restarts", "restart_rule"]

logger = logging.getLogger("clusterenv")


@dataclass(frozen=True)
class Restarts:
    """How often a lost shard is restarted, and how soon.

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
        """Return the seconds until a shard is restarted, or ``None`` to give up.

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


def restart_rule(restarts: Any) -> Restarts:
    """Return the budget that a user passed, or the default; raise ``ConfigError`` if it is none."""
    rule = Restarts() if restarts is None else restarts
    if not isinstance(rule, Restarts):
        raise ConfigError(f"restarts={restarts!r} is no rule: restarts=clusterenv.Restarts(5)")
    return rule


_FINAL = (ConfigError, PolicyError, EnvGivenUp, SchedulerLost)  # a restart would fail too


class RestartHistory:
    """Restart history of each shard, and whether its budget allows another restart."""

    def __init__(self, rule: Restarts) -> None:
        self._rule = rule
        self._times: defaultdict[int, list[float]] = defaultdict(list)
        self._errors: defaultdict[int, list[BaseException]] = defaultdict(list)

    def note(self, shard: int, error: BaseException, now: float) -> float | None:
        """Record a loss; return the seconds to wait, or ``None`` if the run must end."""
        self._times[shard].append(now)
        self._errors[shard].append(error)
        if isinstance(error, _FINAL):
            return None
        return self._rule.wait(self._times[shard], now)

    def verdict(self, shard: int) -> BaseException:
        """Return the error that ends the run: the last one, with all before it."""
        errors = self._errors[shard]
        last = errors[-1]
        if len(errors) == 1:
            return last
        kinds = (ConfigError, PolicyError, EnvError, SchedulerLost)
        kind: type[ClusterEnvError] = type(last) if isinstance(last, kinds) else WorkerLost
        seen = "\n\n".join(f"{number}. {error}" for number, error in enumerate(errors, 1))
        final = isinstance(last, _FINAL)
        why = "the last error is final" if final else f"{self._rule} allows no more"
        verdict = kind(
            f"shard {shard} was lost {len(errors)} times, and {why}. The errors:\n\n{seen}"
        )
        verdict.__cause__ = last
        return verdict


class Restarter:
    """Restarts the shards of a fleet until they are open, or the budget is spent."""

    def __init__(
        self, rule: Restarts, fleet: Fleet, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._history = RestartHistory(rule)
        self._fleet, self._roster = fleet, fleet.roster
        self._clock = clock

    def restart(
        self, shard: int, error: Exception | None = None, end_process: bool = False
    ) -> ShardHandle:
        """Place a shard that is lost, or one that moves; return the handle once it is open.

        ``error`` says how the loss was noticed; ``None`` for a move. With ``end_process`` its
        worker process hangs and is ended first. Raises ``ClosedError`` if the fleet was closed
        meanwhile, or an error with all errors of the shard if no restart is allowed.
        """
        record = self._roster[shard]
        while True:
            if error is not None:
                wait = self._history.note(shard, error, self._clock())
                if wait is None:
                    raise self._history.verdict(shard)
                logger.warning("%s Restarting it%s.", error, f" in {wait:g} s" if wait else "")
                if self._fleet.closing.wait(wait):
                    raise ClosedError(f"closed while shard {shard} waited for a restart")
                if end_process and record.handle is not None:
                    self._fleet.end_process(record.handle)
                    end_process = False
                self._roster.place(shard)
            try:
                return self._fleet.place(record)
            except ClosedError:
                raise
            except Exception as problem:
                self._roster.lost(shard)
                error = problem
