"""Seeds of environments, by global index and incarnation."""

from __future__ import annotations

import numpy as np

__all__ = ["env_seeds", "rebuilt_seed"]


def env_seeds(seed: int | None, incarnation: int, first: int, count: int) -> list[int | None]:
    """Return the seeds of a shard's environments, which no other incarnation has.

    Environment ``i`` begins with ``seed + i``; after a restart its seed is drawn from the
    seed, the incarnation and ``i``, so that no stream is ever repeated.

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
        return [seed + first + i for i in range(count)]
    return [
        int(np.random.SeedSequence([seed, incarnation, env]).generate_state(1)[0] >> 1)
        for env in range(first, first + count)
    ]


def rebuilt_seed(seed: int | None, env: int, count: int) -> int | None:
    """Return the seed of an environment that is rebuilt, for the ``count``-th time.

    Examples
    --------
    >>> rebuilt_seed(None, 3, 1) is None, rebuilt_seed(7, 3, 1) != rebuilt_seed(7, 3, 2)
    (True, True)
    """
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, env, count, 1]).generate_state(1)[0] >> 1)
