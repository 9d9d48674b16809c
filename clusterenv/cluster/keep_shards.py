"""Keeps adaptive clusters from taking workers that hold a shard."""

from __future__ import annotations

import logging
from typing import Any

from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin

__all__ = ["KeepShards", "keep_shards"]

logger = logging.getLogger("clusterenv")


class KeepShards(SchedulerPlugin):  # type: ignore[misc]  # distributed is untyped
    """Lets ``cluster.adapt(...)`` close only workers without actors.

    Dask itself does not move an actor, and closes its worker all the same.
    """

    name = "clusterenv-keep-shards"
    idempotent = True

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
        return [worker for worker in workers if not worker.actors]


def keep_shards(client: Client) -> None:
    """Have the cluster's scheduler keep workers that hold a shard."""
    try:
        client.register_plugin(KeepShards())
    except Exception as error:  # a scheduler without this package cannot import the plugin
        logger.warning(
            "the scheduler does not protect workers with shards from adaptive scaling: %s. "
            "Install clusterenv where the scheduler runs, or do not call cluster.adapt()",
            error,
        )
