"""Starts the workers of local clusters quickly, by forking them from a prepared process."""

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
    """Make Dask fork the workers that this process starts; return options for their nannies.

    A spawned worker takes about three seconds to import its packages. The fork server imports them
    once and is forked for each worker. Workers then start at once, also after a kill, and share
    the memory of the imported packages. The fork server ends with this process.

    The setting ``clusterenv.local.fork`` turns this off, and so does any method but ``spawn`` in
    Dask's configuration. It is used on Linux only, where libraries survive a fork, and not with
    Python 3.11.0, whose fork server is open to other users (CVE-2022-42919).
    """
    safe = sys.platform == "linux" and sys.version_info >= (3, 11, 1)
    wanted = safe and config.get("local.fork")
    if not wanted or dask.config.get(_METHOD) not in ("spawn", "forkserver"):
        return {}
    dask.config.set({_METHOD: "forkserver"})  # permanently: nannies also restart workers
    for name, value in dask.config.get("distributed.nanny.pre-spawn-environ").items():
        os.environ.setdefault(name, str(value))  # as nannies do; libraries read it on import
    forkserver.set_forkserver_preload(["clusterenv.worker.preload"])
    forkserver.ensure_running()
    # Variables that were set after the fork server started must reach the workers too.
    return {"env": dict(os.environ)}
