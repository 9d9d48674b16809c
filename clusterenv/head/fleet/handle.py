"""The head's end of one shard."""

from __future__ import annotations

import ssl
import time
from typing import Any

import numpy as np

from clusterenv import config
from clusterenv.errors import WorkerLost
from clusterenv.head.fleet.placement import Share
from clusterenv.transport.connection import NonBlockingConnection
from clusterenv.transport.endpoint import Endpoint, connect
from clusterenv.transport.heartbeat import Heartbeat
from clusterenv.worker.specs import Opened, ShardSpec

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

    def connect(self, opened: Opened, context: ssl.SSLContext | None) -> None:
        """Connect to a shard that has opened its environments."""
        host, port = opened.endpoint.host, opened.endpoint.port
        try:
            sock = connect(opened.endpoint, context, config.seconds("timeout.connect"))
        except OSError as error:
            raise WorkerLost(
                f"cannot reach {self} at {host}:{port}: {error}. Steps travel "
                "directly between this process and the workers: if a firewall leaves only some "
                "ports open, name them: dask.config.set({'clusterenv.channel.ports': [9000, 9100]})"
            ) from error
        self._connection = NonBlockingConnection(sock, config.nbytes("channel.message"))
        self.relay = opened.relay

    def disconnect(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
