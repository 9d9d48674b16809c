"""Imported by the fork server, so that local workers start with everything imported."""

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


# Python's fork server ends when all processes have closed a pipe. Workers hold it too, so a worker
# that is stopped (SIGSTOP) when the head is killed would keep the fork server alive.
_before = signal.signal(signal.SIGHUP, _end_with_head)
signal_on_parent_death(signal.SIGHUP)


def _begin_worker() -> None:
    """Restore a worker's handling of SIGHUP, and reseed its random number generators.

    Python reseeds its own generator. Processes that a worker forks are left alone: a thread of the
    worker may hold the lock of torch's generator.
    """
    if os.getppid() == _HERE:
        signal.signal(signal.SIGHUP, _before)
        np.random.seed()  # noqa: NPY002  # what old environments use
        torch.seed()


os.register_at_fork(after_in_child=_begin_worker)
