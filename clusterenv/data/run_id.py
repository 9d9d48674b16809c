"""The number that tells one collector's rows from those of all others."""

from __future__ import annotations

import secrets
import time

__all__ = ["new_run_id"]

_RANDOM_BITS = 21


def new_run_id() -> int:
    """Return a number that no other run has, and that is larger the later a run begins.

    It fits an int64: the upper 42 bits are milliseconds since 1970 (enough until 2109), the
    lower 21 are random, so that runs which begin in the same millisecond differ. The random bits
    are the system's: no seed repeats them.
    """
    return time.time_ns() // 1_000_000 << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
