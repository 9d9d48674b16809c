"""Random numbers of one shard's policy, apart from those of its process."""

from __future__ import annotations

import threading

import torch

__all__ = ["Drawing"]

_turn = threading.Lock()  # torch has one generator for all threads that do not name another


class Drawing:
    """Within it, what torch draws goes on from a seed; outside of it, nothing has changed.

    Parameters
    ----------
    seed
        Any integer; ``None`` leaves torch's own numbers.

    Examples
    --------
    >>> drawing = Drawing(5)
    >>> with drawing:
    ...     first = torch.rand(2)
    >>> with drawing:
    ...     second = torch.rand(2)
    >>> with Drawing(5):
    ...     torch.equal(torch.rand(4), torch.cat([first, second]))
    True
    """

    def __init__(self, seed: int | None) -> None:
        self._state: torch.Tensor | None = None
        if seed is not None:
            self._state = torch.Generator().manual_seed(seed % 2**63).get_state()

    def __enter__(self) -> None:
        if self._state is not None:
            _turn.acquire()
            self._before = torch.get_rng_state()
            torch.set_rng_state(self._state)

    def __exit__(self, *exception: object) -> None:
        if self._state is not None:
            self._state = torch.get_rng_state()
            torch.set_rng_state(self._before)
            _turn.release()
