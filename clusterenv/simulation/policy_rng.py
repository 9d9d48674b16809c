"""Random numbers of one shard's policy, separate from those of its process."""

from __future__ import annotations

import secrets
import threading

import torch

__all__ = ["PolicyRNG"]

_lock = threading.Lock()  # torch has one default generator for all threads of a process
_current: PolicyRNG | None = None  # whose state torch's generator has; None: the process's own
_process_state: torch.Tensor | None = None  # the process's own state, while another is in use


class PolicyRNG:
    """A context in which torch draws from a random stream of its own.

    With ``restore``, leaving the context restores the process's own generator state. Without it,
    the state stays until another stream is entered, which saves a shard that is alone in its
    process two changes per step; environments that draw with torch then draw from this stream too.

    Examples
    --------
    >>> rng = PolicyRNG(5)
    >>> with rng:
    ...     first = torch.rand(2)
    >>> with rng:
    ...     second = torch.rand(2)
    >>> with PolicyRNG(5):
    ...     torch.equal(torch.rand(4), torch.cat([first, second]))
    True
    """

    def __init__(self, seed: int | None, *, restore: bool = True) -> None:
        seed = secrets.randbits(63) if seed is None else seed % 2**63
        self._state = torch.Generator().manual_seed(seed).get_state()
        self._restore = restore

    def __enter__(self) -> None:
        _lock.acquire()
        if _current is not self:
            self._before = _current
            _switch(self)

    def __exit__(self, *exception: object) -> None:
        if self._restore:
            _switch(self._before)
        _lock.release()


def _switch(to: PolicyRNG | None) -> None:
    """Save the state of torch's generator for its owner, and set that of another."""
    global _current, _process_state
    now = torch.get_rng_state()
    if _current is None:
        _process_state = now
    else:
        _current._state = now
    state = _process_state if to is None else to._state
    assert state is not None
    torch.set_rng_state(state)
    _current = to
