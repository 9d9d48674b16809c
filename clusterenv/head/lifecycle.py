"""Life cycle of what runs on a cluster: closed once, by its process, or at exit."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import TYPE_CHECKING, Self

from clusterenv import config
from clusterenv.data.processes import ProcessGuard
from clusterenv.errors import ClosedError

if TYPE_CHECKING:
    from distributed import Client

    from clusterenv.head.fleet.fleet import Fleet

__all__ = ["Lifecycle", "open_heads"]

open_heads: weakref.WeakSet[Lifecycle] = weakref.WeakSet()
"""All that were opened and not closed."""


class Lifecycle:
    """Base of ``ClusterEnv``, ``Collector`` and ``Evaluator``; they call :meth:`_opened` last."""

    closed: bool = False
    _closed_because: str = ""
    """Name of the error that closed it."""
    _fleet: Fleet
    """Its shards."""
    _owned_client: Client | None = None
    """Closed with it, and so is the cluster that was started for it."""

    def _opened(self) -> None:
        self._guard = ProcessGuard(f"this {type(self).__name__}", "connections")
        open_heads.add(self)

    @property
    def client(self) -> Client:
        """Dask's client, to run something else on the same cluster."""
        return self._fleet.client

    def _check_open(self) -> None:
        self._guard.check()
        if self.closed:
            because = f" (after {self._closed_because})" if self._closed_because else ""
            raise ClosedError(f"this {type(self).__name__} is closed{because}; make a new one")

    def close(self, timeout: float | None = None) -> None:
        """Stop the shards, and the cluster if it was started for them.

        Parameters
        ----------
        timeout
            Seconds that the shards are given to stop by themselves.
        """
        if self.closed:
            return
        seconds = config.seconds("timeout.close", timeout)
        self.closed = True  # first: another thread may wait for results
        open_heads.discard(self)
        if not self._guard.is_here:
            return  # a fork: the shards belong to the parent
        try:
            self._stop(seconds)
        finally:
            if self._owned_client is not None:
                self._owned_client.close()

    def _stop(self, timeout: float) -> None:
        """Stop the shards and the threads that serve them."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_guard") and not self.closed:
            # This may be Dask's event loop, or a thread that holds a lock of the client.
            threading.Thread(target=self.close, name="clusterenv-close").start()


@atexit.register
def _close_all() -> None:
    for head in list(open_heads):
        head.close()
