"""The head's end of one shard."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from clusterenv.head.fleet.placement import Share
from clusterenv.transport.connection import NonBlockingConnection
from clusterenv.transport.endpoint import Endpoint
from clusterenv.transport.heartbeat import Heartbeat
from clusterenv.worker.specs import ShardSpec

__all__ = ["ShardHandle"]


class ShardHandle:
    """The head's end of one incarnation of a shard: actor, connection and heartbeat.

    Its state is in the :class:`~clusterenv.head.fleet.roster.Roster`.
    """

    def __init__(self, spec: ShardSpec, worker: str, future: Any) -> None:
        self.index = spec.index
        self.incarnation = spec.incarnation
        self.share = Share(spec.first, spec.count)
        self.span = slice(spec.first, spec.first + spec.count)
        self.rows = np.arange(spec.first, spec.first + spec.count)
        self.rows.setflags(write=False)  # handed out as info["env_id"]
        self.worker = worker
        self.future = future  # holding the Actor alone can lose it
        self.actor: Any = None
        self._connection: NonBlockingConnection | None = None
        self.relay: Endpoint | None = None
        """Where other workers fetch weights from it, if they do."""
        self.heartbeat = Heartbeat(time.monotonic())

    def __str__(self) -> str:
        first, last = self.span.start, self.span.stop - 1
        return f"shard {self.index} (environments {first}–{last}) on {self.worker}"

    @property
    def connection(self) -> NonBlockingConnection:
        """The connection to the shard's thread."""
        assert self._connection is not None
        return self._connection

    def connected(self, connection: NonBlockingConnection) -> None:
        """Set the connection."""
        self._connection = connection

    def disconnect(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
