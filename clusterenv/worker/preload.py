"""Imported once by the process that local workers are forked from: each begins with all of it."""

from __future__ import annotations

import os
import signal

import numpy as np
import torch

import clusterenv.worker.actor  # noqa: F401
from clusterenv.data.processes import signal_on_parent_death

__all__: list[str] = []

_HERE, _HEAD = os.getpid(), os.getppid()


def _end_with_head(*_: object) -> None:
    """End if the head has ended, and not just the thread of it that started this process."""
    if os.getppid() != _HEAD:
        os._exit(0)


# Workers hold the pipe by which Python's own fork server learns that it is not needed any more: one
# that is stopped when the head is killed would keep it for ever.
_before = signal.signal(signal.SIGHUP, _end_with_head)
signal_on_parent_death(signal.SIGHUP)


def _begin_worker() -> None:
    """Have a worker treat hangups as usual, and draw random numbers of its own.

    Python's generator sees to the latter by itself. What a worker forks in its turn is left
    alone: a thread of it may hold torch's generator.
    """
    if os.getppid() == _HERE:
        signal.signal(signal.SIGHUP, _before)
        np.random.seed()  # noqa: NPY002  # what old environments use
        torch.seed()


os.register_at_fork(after_in_child=_begin_worker)
