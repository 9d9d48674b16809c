"""Random numbers of one shard's policy, apart from those of its process."""

from __future__ import annotations

import os
import secrets
import threading

import torch

__all__ = ["RandomStream", "this_process"]

_turn = threading.Lock()  # torch has one generator for all threads that do not name another
_current: RandomStream | None = None  # whose numbers torch draws; None: the process's own
_own: torch.Tensor | None = None  # the process's own numbers, while others are drawn


class RandomStream:
    """Within it, what torch draws goes on from a seed, whatever other drawings drew.

    Parameters
    ----------
    seed
        Any integer; ``None`` for numbers that nobody else draws.
    returns
        Whether the process's own numbers are drawn again afterwards. Otherwise it goes on with
        these until another needs its turn, which spares a shard that is alone in its process two
        changes a step; environments that draw with torch then draw of them too.

    Examples
    --------
    >>> drawing = RandomStream(5)
    >>> with drawing:
    ...     first = torch.rand(2)
    >>> with drawing:
    ...     second = torch.rand(2)
    >>> with RandomStream(5):
    ...     torch.equal(torch.rand(4), torch.cat([first, second]))
    True
    """

    def __init__(self, seed: int | None, *, returns: bool = True) -> None:
        seed = secrets.randbits(63) if seed is None else seed % 2**63
        self._state = torch.Generator().manual_seed(seed).get_state()
        self._returns = returns

    def __enter__(self) -> None:
        _turn.acquire()
        if _current is not self:
            self._before = _current
            _change(self)

    def __exit__(self, *exception: object) -> None:
        if self._returns:
            _change(self._before)
        _turn.release()


_process = secrets.randbits(63)


def this_process() -> tuple[int, int]:
    """Return what no other process has: numbers of processes repeat in containers."""
    return _process, os.getpid()


def _change(to: RandomStream | None) -> None:
    """Have torch draw the numbers of another, or the process's own."""
    global _current, _own
    now = torch.get_rng_state()
    if _current is None:
        _own = now
    else:
        _current._state = now
    state = _own if to is None else to._state
    assert state is not None
    torch.set_rng_state(state)
    _current = to
