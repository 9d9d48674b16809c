"""Process ids, protection of objects and locks from forks, and a signal when the parent ends."""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
import threading
import weakref
from typing import Any

from clusterenv.errors import WrongProcess

__all__ = [
    "OWN_WORKER",
    "ProcessGuard",
    "hold_at_fork",
    "signal_on_parent_death",
    "this_process",
]

OWN_WORKER = "CLUSTERENV_WORKER"
"""Environment variable that marks worker processes of clusters that ClusterEnv started."""

_random = secrets.randbits(63)
_generation = 0  # number of forks since the first process: faster to read than os.getpid()
_forking = threading.Lock()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_held: list[Any] = []


def this_process() -> tuple[int, int]:
    """Return a unique id of this process; process ids repeat in containers."""
    return _random, os.getpid()


class ProcessGuard:
    """Raises when an object is used in a fork of the process that created it.

    A fork inherits its parent's sockets and open files. If both processes used them, each would
    read data that is meant for the other. The error names the object and what would be shared.

    Examples
    --------
    >>> guard = ProcessGuard("this Collector", "connections")
    >>> guard.is_here
    True
    >>> guard.check()
    """

    def __init__(self, what: str, shared: str) -> None:
        self._what = what
        self._shared = shared
        self._process = os.getpid()
        self._generation = _generation

    @property
    def is_here(self) -> bool:
        """Whether this is the process that created the object."""
        return self._generation == _generation

    def check(self) -> None:
        """Raise ``WrongProcess`` in every process but the one that created the object."""
        if self._generation != _generation:
            raise WrongProcess(
                f"{self._what} belongs to process {self._process}, and process {os.getpid()} is a "
                f"fork of it: both would use the same {self._shared}. Use it there, or create "
                "another here. Start processes that create their own with "
                "multiprocessing.get_context('spawn')"
            )


def hold_at_fork(lock: Any) -> None:
    """Hold an ``RLock`` during every fork: the child gets consistent data and a free lock."""
    with _forking:
        _locks.add(lock)


def _hold() -> None:
    _forking.acquire()
    for lock in list(_locks):
        lock.acquire()
        _held.append(lock)


def _release() -> None:
    while _held:
        _held.pop().release()
    _forking.release()


def _begin_fork() -> None:
    global _generation
    _generation += 1
    _release()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_begin_fork)


def signal_on_parent_death(number: int) -> None:
    """Have the kernel send a signal to this process when its parent ends; only on Linux.

    More precisely, when the thread of the parent that started this process ends.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(number))
