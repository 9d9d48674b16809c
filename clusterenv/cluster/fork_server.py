"""Starts the workers of local clusters quickly, by forking them from a prepared process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import dask

from clusterenv import config

__all__ = ["can_fork", "forking", "start_fork_server"]

_METHOD = "distributed.worker.multiprocessing-method"

_lock = threading.Lock()
_starting = 0  # workers that are being forked now
_before = ""  # the method that was set before


def can_fork() -> bool:
    """Whether local workers are forked.

    The setting ``clusterenv.local.fork`` turns this off, and so does any method but ``spawn`` in
    Dask's configuration. It is used on Linux only, where libraries survive a fork, and not with
    Python 3.11.0, whose fork server is open to other users (CVE-2022-42919).
    """
    safe = sys.platform == "linux" and sys.version_info >= (3, 11, 1)
    wanted = safe and config.get("local.fork")
    return bool(wanted and dask.config.get(_METHOD) in ("spawn", "forkserver"))


def start_fork_server() -> dict[str, Any]:
    """Start the process that workers are forked from; return options for their nannies.

    A worker that is spawned imports everything, in about three seconds. The fork server has
    imported everything and is forked for each worker: workers start at once, also after a kill,
    and share the memory of what was imported. It ends with this process.
    """
    if not can_fork():
        return {}
    for name, value in dask.config.get("distributed.nanny.pre-spawn-environ").items():
        os.environ.setdefault(name, str(value))  # as nannies do; libraries read it on import
    forkserver.set_forkserver_preload(["clusterenv.worker.preload"])
    forkserver.ensure_running()
    # Variables that were set after the fork server started must reach the workers too.
    return {"env": dict(os.environ)}


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Let Dask fork the worker processes that are started in this context.

    Dask reads the method from its global configuration. It is set only while workers of ours
    start, so that other clusters of this process keep theirs.
    """
    global _starting, _before
    with _lock:
        if not _starting:
            _before = dask.config.get(_METHOD)
            dask.config.set({_METHOD: "forkserver"})
        _starting += 1
    try:
        yield
    finally:
        with _lock:
            _starting -= 1
            if not _starting:
                dask.config.set({_METHOD: _before})
