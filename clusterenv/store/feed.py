"""Alternation of adding batches and sampling, as a rate limiter allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from clusterenv.data.batch import Batch
from clusterenv.errors import ConfigError, EmptyStore, RatioError, shown
from clusterenv.store.rate_limiter import RateLimiter

if TYPE_CHECKING:
    from clusterenv.store.replay import ReplayStore

__all__ = ["feed"]


@runtime_checkable
class _Source(Protocol):
    """A collector: batches, and how many of them can be taken without waiting."""

    @property
    def ready(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


def feed(
    store: ReplayStore,
    limiter: RateLimiter,
    source: Iterable[Batch],
    n: int | None,
    options: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Return an iterator of samples that adds batches meanwhile; see :meth:`ReplayStore.feed`."""
    if not isinstance(source, Iterable) or isinstance(source, (np.ndarray, torch.Tensor)):
        raise ConfigError(
            f"feed() takes a Collector, or batches, got {shown(source)}: store.feed(collector, 256)"
        )
    return _samples(store, limiter, source, n, options)


def _samples(
    store: ReplayStore,
    limiter: RateLimiter,
    source: Iterable[Batch],
    n: int | None,
    options: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    limiter.sample_rows = max(limiter.sample_rows, n or 0)
    postponed, batches = limiter.postponed, iter(source)
    must_wait = not store.may_sample(n or 1)  # a resumed store may allow samples already
    while True:
        ready = len(postponed) + (source.ready if isinstance(source, _Source) else 1)
        while must_wait or (ready > 0 and store.may_add(limiter.batch_rows)):
            batch = _next(postponed, batches)
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


def _next(postponed: deque[Batch], batches: Iterator[Batch]) -> Batch | None:
    try:
        return postponed.popleft()
    except IndexError:
        return next(batches, None)
