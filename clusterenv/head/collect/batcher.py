"""Decides which requests are evaluated together, and when; without I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Batcher"]

R = TypeVar("R")


class _Pending(NamedTuple):
    request: object
    rows: int
    since: float


class Batcher(Generic[R]):
    """Requests that wait to be evaluated, the oldest first.

    They are evaluated once they have enough rows for a batch, once half of all groups of
    environments wait (the other half steps meanwhile), and at the latest when one has waited for
    so long. All times are of one clock, which the caller reads.

    Parameters
    ----------
    rows
        Of a batch, at most; a single request may have more.
    wait
        Seconds.

    Examples
    --------
    >>> batcher = Batcher(rows=64, wait=0.001)
    >>> batcher.add("first", rows=8, now=10.0)
    >>> batcher.left(now=10.0, groups=4)
    0.001
    >>> batcher.add("second", rows=8, now=10.0)
    >>> batcher.left(now=10.0, groups=4), batcher.take()
    (0.0, ['first', 'second'])
    """

    def __init__(self, rows: int, wait: float) -> None:
        self._most, self._wait = rows, wait
        self._pending: list[_Pending] = []
        self._rows = 0

    def add(self, request: R, rows: int, now: float) -> None:
        """Let a request wait."""
        self._pending.append(_Pending(request, rows, now))
        self._rows += rows

    def forget(self, matches: Callable[[R], bool]) -> None:
        """Drop the requests that match."""
        self._pending = [each for each in self._pending if not matches(each.request)]  # type: ignore[arg-type]
        self._rows = sum(each.rows for each in self._pending)

    def left(self, now: float, groups: int) -> float | None:
        """Return the seconds until a batch is due; ``None`` if no request waits.

        ``groups`` are being stepped or wait.
        """
        if not self._pending:
            return None
        if self._rows >= self._most or 2 * len(self._pending) >= groups:
            return 0.0
        return max(0.0, self._wait - (now - self._pending[0].since))

    def take(self) -> list[R]:
        """Return the requests of the next batch."""
        count, rows = 0, 0
        for each in self._pending:
            if count and rows + each.rows > self._most:
                break
            count, rows = count + 1, rows + each.rows
        taken, self._pending = self._pending[:count], self._pending[count:]
        self._rows -= rows
        return [each.request for each in taken]  # type: ignore[misc]
