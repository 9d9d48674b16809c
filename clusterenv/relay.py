"""Weights from worker to worker: who has them serves those whom the head sends."""

from __future__ import annotations

import ssl
import threading

import numpy as np

from clusterenv.channel import Channel, dumps
from clusterenv.errors import ChannelClosed
from clusterenv.frames import Frame
from clusterenv.rendezvous import Endpoint, Listener, reach
from clusterenv.sync.shelf import Shelf
from clusterenv.sync.weights import Weights

__all__ = ["Relay", "fetch"]

_SHELF_SECONDS = 5.0


class Relay:
    """Serves what is on a process's shelf to whoever knows the listener's token."""

    def __init__(self, shelf: Shelf, listener: Listener) -> None:
        self.endpoint = listener.endpoint
        self._shelf = shelf
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="clusterenv-relay", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                channel = self._listener.accept(None)
            except ChannelClosed:
                return
            threading.Thread(
                target=self._answer, args=(channel,), name="clusterenv-relay-answer", daemon=True
            ).start()

    def _answer(self, channel: Channel) -> None:
        try:
            header = channel.recv_header()
            weights = self._shelf.take(channel.recv_blob(header), _SHELF_SECONDS)
            if weights is not None:
                blob = dumps((weights.version, weights.digest))
                channel.send(Frame.WEIGHTS, blob, [weights.buffer])
                channel.recv_header()  # until the other end has all, and closes
        except ChannelClosed:
            pass
        finally:
            channel.close()

    def close(self) -> None:
        """Serve nobody any more."""
        self._listener.close()
        self._thread.join(timeout=1.0)


def fetch(
    endpoint: Endpoint, version: int, nbytes: int, context: ssl.SSLContext | None, timeout: float
) -> Weights:
    """Get weights of this version, or a newer one, from a worker that has them.

    Raises
    ------
    OSError
        If it cannot be reached, has none, or what came is damaged or late.
    """
    channel = reach(endpoint, context, timeout)
    late = threading.Timer(timeout, channel.close)
    late.start()
    try:
        channel.send(Frame.PULL, dumps(version))
        header = channel.recv_header()
        found, digest = channel.recv_blob(header)
        buffer = np.empty(nbytes, np.uint8)
        channel.recv_body(header, [buffer])
    finally:
        late.cancel()
        channel.close()
    weights = Weights(found, buffer)
    if weights.digest != digest:
        raise ChannelClosed(f"the weights of version {found} arrived damaged")
    return weights
