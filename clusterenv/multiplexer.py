"""The head's side of all its connections: one thread reads and writes frames without waiting.

Of a frame the multiplexer reads and writes what there is, then goes on with the other shards, so a
shard that stops in the middle of a frame, in either direction, holds up none of them.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from clusterenv.channel import Array, Header
from clusterenv.errors import ChannelClosed, ClusterEnvError
from clusterenv.fleet import Link
from clusterenv.frames import Frame

__all__ = ["Message", "Multiplexer", "Place"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

Place = Callable[[Link, Header, Any], Sequence[Array]]
"""Returns the arrays that the body of a shard's frame is received into, given header and blob.

It raises if there should be no such frame.
"""


class Message(NamedTuple):
    """A frame that has come."""

    kind: int
    blob: Any
    body: Sequence[Array]
    """The arrays that hold it."""


Incoming = Generator[bool, None, tuple[Header, Any, Sequence[Array]]]


class Multiplexer:
    """Reads and writes the frames of all shards.

    One thread calls :meth:`add`, :meth:`remove` and :meth:`listen`; any may call :meth:`send` and
    :meth:`wake`.

    Parameters
    ----------
    place
        Where the body of a frame goes.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._woken, _READ)
        self._incoming: dict[Link, Incoming | None] = {}  # of each shard, a frame on its way
        self._decrypting: list[Link] = []  # shards whose bytes a selector may not report
        self._behind: set[Link] = set()  # shards that have not read all that was sent to them
        self._posted: set[Link] = set()  # shards that may have become so

    def add(self, link: Link) -> None:
        """Listen to a shard from now on."""
        self._selector.register(link.channel, _READ, link)
        self._incoming[link] = None
        if link.channel.encrypted:
            self._decrypting.append(link)
        if link.channel.is_behind:
            self._posted.add(link)

    def remove(self, link: Link) -> None:
        """Listen to a shard no more; a frame of which a part has come is dropped."""
        self._selector.unregister(link.channel)
        del self._incoming[link]
        self._behind.discard(link)
        if link in self._decrypting:
            self._decrypting.remove(link)

    def send(
        self,
        link: Link,
        kind: Frame,
        blob: bytes = b"",
        body: Sequence[Any] = (),
        *,
        copy: bool = False,
    ) -> None:
        """Send a frame: what the system takes at once, the rest while :meth:`listen` runs.

        A connection that broke is reported by :meth:`listen`.

        Parameters
        ----------
        copy
            Whether the arrays of ``body`` may change after this call.
        """
        try:
            if link.channel.post(kind, blob, body):
                if copy:
                    link.channel.own_kept()
                self._posted.add(link)
                self.wake()
        except ChannelClosed:
            pass

    def wake(self) -> None:
        """End the pause of the thread that listens."""
        try:
            self._waker.send(b"!")
        except OSError:
            pass  # enough bytes lie there to wake it, or it has ended

    def is_receiving(self, link: Link) -> bool:
        """Whether a part of a frame of this shard has come."""
        return self._incoming[link] is not None

    def listen(self, seconds: float) -> Iterator[tuple[Link, Message | ClusterEnvError]]:
        """Wait for shards to say something, and yield what each has said.

        A connection that broke, or a frame that should not be, is an error instead; who gets it
        removes the shard.
        """
        if self._posted or self._behind:
            self._follow()
        # What was decrypted already, no selector reports; the others have their turn all the same.
        ready: dict[Link | None, int]
        ready = {link: _READ for link in self._decrypting if link.channel.has_buffered()}
        for key, events in self._selector.select(0 if ready else seconds):
            ready[key.data] = ready.get(key.data, 0) | events
        for link, events in ready.items():
            if link is None:
                self._woken.recv(64)
            elif link in self._incoming:  # not removed meanwhile
                try:
                    message = self._serve(link, events)
                except ClusterEnvError as error:
                    yield link, error
                else:
                    if message is not None:
                        yield link, message

    def close(self) -> None:
        """Stop listening."""
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _follow(self) -> None:
        """Wait for shards to read on while something is kept for them, and no longer."""
        while self._posted:
            link = self._posted.pop()
            if link in self._incoming and link not in self._behind and link.channel.is_behind:
                self._behind.add(link)
                self._selector.modify(link.channel, _READ | _WRITE, link)
        for link in [link for link in self._behind if not link.channel.is_behind]:
            self._behind.discard(link)
            self._selector.modify(link.channel, _READ, link)

    def _serve(self, link: Link, events: int) -> Message | None:
        """Go on for a moment with the frames of a shard; return the one that is whole now."""
        if events & _WRITE and link.channel.flush():
            link.pulse.heard(time.monotonic())  # it reads
        if not events & _READ:
            return None
        incoming = self._incoming[link]
        if incoming is None:
            link.pulse.heard(time.monotonic())
            incoming = link.channel.frame(partial(self._place, link))
        else:  # more of a frame: however long it is under way, nothing hangs
            link.pulse.progress(time.monotonic())
        try:
            begun = next(incoming)
        except StopIteration as whole:
            self._incoming[link] = None
            header, blob, body = whole.value
            return Message(header.kind, blob, body)
        self._incoming[link] = incoming if begun else None
        return None
