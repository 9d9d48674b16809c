"""Starts the processes of local clusters quickly, by forking them from one that waits for it."""

from __future__ import annotations

import os
import sys
from multiprocessing import forkserver
from typing import Any

import dask

from clusterenv import config

__all__ = ["fork_workers"]

_METHOD = "distributed.worker.multiprocessing-method"


def fork_workers() -> dict[str, Any]:
    """Have Dask fork the workers that this process starts; return options for their nannies.

    A worker that is spawned imports everything anew, in about three seconds. Here one process does
    so, waits, and is forked for each worker: those begin at once, also after a kill, and
    share the memory of what was imported. It ends with this process.

    The setting ``clusterenv.local.fork`` turns it off, and so does another method than ``spawn``
    in Dask's configuration. Elsewhere than on Linux libraries do not stand a fork, and Python
    3.11.0 lets other users in (CVE-2022-42919).
    """
    safe = sys.platform == "linux" and sys.version_info >= (3, 11, 1)
    wanted = safe and config.get("local.fork")
    if not wanted or dask.config.get(_METHOD) not in ("spawn", "forkserver"):
        return {}
    dask.config.set({_METHOD: "forkserver"})  # for good: nannies start workers again and again
    for name, value in dask.config.get("distributed.nanny.pre-spawn-environ").items():
        os.environ.setdefault(name, str(value))  # as nannies do; libraries look when imported
    forkserver.set_forkserver_preload(["clusterenv.worker.preload"])
    forkserver.ensure_running()
    # What was set since the process began to wait must reach the workers too.
    return {"env": dict(os.environ)}
