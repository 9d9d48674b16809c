"""The head's end of many channels: frames in and out, and nobody is waited for.

One thread listens to all shards. Of a frame it reads and writes what there is, then goes on with
the others, so a shard that is stopped in the middle of a frame holds up none of them.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from clusterenv.errors import ChannelClosed
from clusterenv.fleet import Link
from clusterenv.frames import Frame
from clusterenv.lending import Lender
from clusterenv.schema import Column

__all__ = ["Message", "Switchboard"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Message(NamedTuple):
    """A frame that has come."""

    kind: int
    blob: Any
    body: Column
    """Its bytes."""


Arriving = Generator[None, None, Message]


class Switchboard:
    """Reads and writes the frames of all shards.

    One thread calls :meth:`add`, :meth:`remove` and :meth:`listen`; any may call :meth:`send` and
    :meth:`wake`.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._woken, _READ)
        self._arriving: dict[Link, Arriving | None] = {}  # of each shard, a frame on its way
        self._behind: set[Link] = set()  # shards that have not read all that was sent to them
        self._lender = Lender()  # of what bodies are made of

    def add(self, link: Link) -> None:
        """Listen to a shard from now on."""
        self._selector.register(link.channel, _READ, link)
        self._arriving[link] = None

    def remove(self, link: Link) -> None:
        """Listen to a shard no more; a frame of which a part has come is let go of."""
        self._selector.unregister(link.channel)
        del self._arriving[link]
        self._behind.discard(link)

    def send(self, link: Link, kind: Frame, blob: bytes, body: Sequence[Any] = ()) -> None:
        """Send a frame, as soon as the shard reads; whether it can be is for others to notice."""
        try:
            if link.channel.post(kind, blob, body):
                self.wake()  # to send the rest
        except ChannelClosed:
            pass

    def wake(self) -> None:
        """End the pause of whoever listens."""
        try:
            self._waker.send(b"!")
        except OSError:
            pass  # enough bytes lie there to wake it, or it has ended

    def listen(self, seconds: float) -> Iterator[tuple[Link, Message | ChannelClosed]]:
        """Wait for shards to say something, and yield what each has said.

        A connection that broke is an error instead; whoever gets it removes the shard.
        """
        self._follow()
        # What was decrypted already, no selector reports; the others have their turn all the same.
        ready: dict[Link | None, int]
        ready = {link: _READ for link in self._arriving if link.channel.has_buffered()}
        for key, events in self._selector.select(0 if ready else seconds):
            ready[key.data] = ready.get(key.data, 0) | events
        for link, events in ready.items():
            if link is None:
                self._woken.recv(64)
            elif link in self._arriving:  # not removed meanwhile
                try:
                    message = self._serve(link, events)
                except ChannelClosed as error:
                    yield link, error
                else:
                    if message is not None:
                        yield link, message

    def close(self) -> None:
        """Listen to nobody."""
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _follow(self) -> None:
        """Notice who is behind with reading, and who is no more."""
        for link in self._arriving:
            if link.channel.is_behind != (link in self._behind):
                self._behind ^= {link}
                events = _READ | _WRITE if link in self._behind else _READ
                self._selector.modify(link.channel, events, link)

    def _serve(self, link: Link, events: int) -> Message | None:
        """Go on for a moment with the frames of a shard; return the one that is whole now."""
        if events & _WRITE and link.channel.flush():
            link.pulse.heard(time.monotonic())  # it reads
        if not events & _READ:
            return None
        arriving = self._arriving[link]
        if arriving is None:
            link.pulse.heard(time.monotonic())
            arriving = self._frame(link)
        else:  # more of a frame: however long it is under way, nothing hangs
            link.pulse.progress(time.monotonic())
        try:
            next(arriving)
        except StopIteration as whole:
            self._arriving[link] = None
            message: Message = whole.value
            return message
        self._arriving[link] = arriving
        return None

    def _frame(self, link: Link) -> Arriving:
        header, blob = yield from link.channel.frame()
        body = self._lender.empty((header.body,), np.dtype(np.uint8))
        yield from link.channel.arrive([body])
        return Message(header.kind, blob, body)
