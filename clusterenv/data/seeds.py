"""Seeds of environments, by global index and incarnation, and the ids of runs."""

from __future__ import annotations

import secrets
import time

import numpy as np

__all__ = ["env_seeds", "new_run_id", "rebuilt_seed"]

_RANDOM_BITS = 21


def env_seeds(seed: int | None, incarnation: int, first: int, count: int) -> list[int | None]:
    """Return the seeds of the environments ``first`` to ``first + count - 1``.

    Environment ``i`` starts with ``seed + i``. After a restart its seed is derived from the seed,
    the incarnation and ``i``, so that no incarnation repeats the episodes of another.

    Examples
    --------
    >>> env_seeds(7, 0, 2, 3)
    [9, 10, 11]
    >>> env_seeds(7, 1, 2, 3) == env_seeds(7, 1, 0, 5)[2:]
    True
    """
    if seed is None:
        return [None] * count
    if incarnation == 0:
        return [seed + env for env in range(first, first + count)]
    return [_derived(seed, incarnation, env) for env in range(first, first + count)]


def rebuilt_seed(seed: int | None, env: int, count: int) -> int | None:
    """Return the seed of an environment that is rebuilt for the ``count``-th time.

    Examples
    --------
    >>> rebuilt_seed(None, 3, 1) is None, rebuilt_seed(7, 3, 1) != rebuilt_seed(7, 3, 2)
    (True, True)
    """
    return None if seed is None else _derived(seed, env, count, 1)


def _derived(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)


def new_run_id() -> int:
    """Return a number that no other run has; later runs have larger numbers.

    It fits an int64. The upper 42 bits are milliseconds since 1970, enough until 2109. The lower
    21 bits are random, so that runs that start in the same millisecond differ. They come from the
    operating system: no seed repeats them.
    """
    return time.time_ns() // 1_000_000 << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
