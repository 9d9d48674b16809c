"""A direct connection between the head and one shard.

Dask places, names and watches the shards; steps and trajectories travel here. A
connection is a connection that the shard's own thread reads and writes. Compared with an
actor call it saves the event loops and message wrapping at both ends
(``benchmarks/step.py`` measures both). How the two find each other is in ``rendezvous``.

A frame is a header, a small pickled blob, and a body of raw array bytes that is
received straight into the arrays which the caller provides.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

from clusterenv.data.pickling import loads
from clusterenv.data.spaces import Array
from clusterenv.errors import ConfigError, ConnectionClosed

__all__ = ["MESSAGE_LIMIT", "Connection", "Header", "Place", "Received"]

_HEADER = struct.Struct("<IIQ")
_IOV_MAX = 512  # buffers per system call; Linux allows 1,024
_TLS_BLOCK = 1 << 18  # bytes encrypted at a time; the other direction waits for no more
_LOCAL_BUFFER = 1 << 22  # bytes under way between processes of one machine, if it allows so many
_READ_BLOCK = 1 << 24  # bytes at a time, or a call would go on while the other end sends
_MOMENT = 0.02  # seconds for what comes on one connection; then it is the others' turn
_SEND_SECONDS = 30.0  # for a process of the same machine to read on; then it is stopped
MESSAGE_LIMIT = 1 << 29
"""Largest blob of a frame in bytes, if ``clusterenv.channel.message`` says nothing else."""
# A peer whose machine vanished without a word is noticed within half a minute.
# Keep-alive serves an idle connection, the user timeout one with bytes on the way (in ms).
_KEEPALIVE = (
    ("TCP_KEEPIDLE", 10),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", 30_000),  # also ends a send to one that does not read
)


class Header(NamedTuple):
    """What a frame is, and how much follows."""

    kind: int
    blob: int
    body: int


Place = Callable[[Header, Any], Sequence[Array]]
"""Returns the contiguous arrays that a frame's body is received into, given header and blob.

It raises if there should be no such frame.
"""

Received = tuple[Header, Any, Sequence[Array]]
"""A frame: header, unpickled blob, and the arrays that hold its body."""


class Connection:
    """One end of a connection; one thread may send while another receives.

    Whoever has one connection waits for it: ``send`` and ``recv_*``. A thread that serves many must
    wait for none of them: ``post``, ``flush`` and ``receive``. Do not mix the two ways in one
    direction.

    Parameters
    ----------
    sock
        The connected socket.
    limit
        Largest blob in bytes. A larger one is refused where it is sent; one that is announced by
        the other end breaks the connection before any memory is taken for it.
    """

    def __init__(self, sock: socket.socket, limit: int = MESSAGE_LIMIT) -> None:
        self._sock = sock
        self._limit = limit
        self._gather = not isinstance(sock, ssl.SSLSocket)  # TLS has no sendmsg
        # OpenSSL allows one thread at a time, so nobody may wait for the network in a call of it.
        self._tls = threading.Lock()
        self._shut_down = False
        self._posting = threading.Lock()
        self._kept: list[memoryview] = []  # what was posted and not taken yet
        self._incoming: Generator[None, None, Received] | None = None  # a frame on its way
        if not self._gather:
            sock.setblocking(False)
        if sock.family == getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER)
            patience = struct.pack("ll", round(_SEND_SECONDS), 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._sock.fileno()

    @property
    def encrypted(self) -> bool:
        """Whether the connection speaks TLS."""
        return isinstance(self._sock, ssl.SSLSocket)

    def has_buffered(self) -> bool:
        """Whether bytes were decrypted already, so that no selector would report them."""
        if not isinstance(self._sock, ssl.SSLSocket):
            return False
        with self._tls:
            return self._sock.pending() > 0

    def send(self, kind: int, blob: bytes = b"", body: Sequence[Array] = ()) -> None:
        """Send a frame; returns when the system has taken all of it."""
        head, size = self._head_of(kind, blob, body)
        try:
            if not self._gather:
                for part in _bytes_of((head, *body)):
                    done = 0
                    while done < part.nbytes:
                        block = part[done : done + _TLS_BLOCK]
                        done += self._alone(partial(self._sock.send, block)) or 0
                return
            done = self._sock.sendmsg((head, *body[:_IOV_MAX]))
            if done < len(head) + size:
                parts = _bytes_of((head, *body))
                while parts := _rest(parts, done):
                    done = self._sock.sendmsg(parts[:_IOV_MAX])
        except OSError as error:
            self._shut()  # whoever reads here must not take what follows for a frame
            raise ConnectionClosed(f"the connection broke while sending: {error}") from error

    def recv_header(self) -> Header:
        """Wait for the next frame."""
        raw = bytearray(_HEADER.size)
        self._fill((raw,), _HEADER.size)
        return self._header(raw)

    def _alone(self, call: Callable[[], int], wait: bool = True) -> int | None:
        """Make a call of OpenSSL while no other thread does, and wait outside of it."""
        while True:
            with self._tls:
                if self._shut_down:  # what comes now would be read as it is, encrypted
                    raise ConnectionClosed("the connection was closed")
                try:
                    return call()
                except ssl.SSLWantReadError:
                    wanted = select.POLLIN
                except ssl.SSLWantWriteError:
                    wanted = select.POLLOUT
            if not wait:
                return None
            self._poll(wanted, None)

    def _poll(self, wanted: int, seconds: float | None) -> bool:
        """Wait until the socket is ready; return whether it is."""
        poll = select.poll()
        try:
            poll.register(self._sock, wanted)
        except ValueError as error:  # closed meanwhile
            raise ConnectionClosed("the connection was closed") from error
        return bool(poll.poll(None if seconds is None else math.ceil(1e3 * seconds)))

    def recv_raw(self, header: Header) -> bytearray:
        """Read the frame's blob as it travelled."""
        raw = bytearray(header.blob)
        self._fill((raw,), header.blob)
        return raw

    def recv_blob(self, header: Header) -> Any:
        """Read the frame's blob; ``None`` if it is empty."""
        return loads(self.recv_raw(header)) if header.blob else None

    def recv_body(self, header: Header, arrays: Sequence[Array]) -> None:
        """Read the frame's body into ``arrays``, which must be contiguous."""
        _check_body(header, arrays)
        self._fill(arrays, header.body)

    def _fill(self, buffers: Sequence[bytearray | memoryview | Array], size: int) -> None:
        if not size:
            return
        try:
            done = self._sock.recvmsg_into(buffers[:_IOV_MAX])[0] if self._gather else 0
            if done == size:
                return
            if not done and self._gather:
                raise ConnectionClosed("the other end closed the connection")
            parts = _bytes_of(buffers)
            while parts := _rest(parts, done):
                if self._gather:
                    done = self._sock.recvmsg_into(parts[:_IOV_MAX])[0]
                else:
                    done = self._alone(partial(self._sock.recv_into, parts[0])) or 0
                if not done:
                    raise ConnectionClosed("the other end closed the connection")
        except OSError as error:
            if isinstance(error, ConnectionClosed):
                raise
            raise ConnectionClosed(f"the connection broke while receiving: {error}") from error

    # Without waiting, for a thread that serves many connections

    def post(self, kind: int, blob: bytes = b"", body: Sequence[Array] = ()) -> bool:
        """Send a frame as far as the system takes it now, and keep the rest for :meth:`flush`.

        From any thread. Arrays must stay as they are until all is sent; see :meth:`own_kept`.
        Returns whether something is kept.
        """
        head, size = self._head_of(kind, blob, body)
        with self._posting:
            if self._gather and not self._kept:
                done = self._push_some((head, *body[:_IOV_MAX]))
                if done == len(head) + size:
                    return False
                self._kept = _rest(_bytes_of((head, *body)), done)
            else:
                self._kept += _bytes_of((head, *body))
            self._push()
            return bool(self._kept)

    def own_kept(self) -> None:
        """Copy what is kept, so that the arrays it was posted from may change."""
        with self._posting:
            self._kept = [memoryview(bytes(part)) for part in self._kept]

    @property
    def is_behind(self) -> bool:
        """Whether something that was posted is kept, because the other end does not read."""
        return bool(self._kept)

    def flush(self) -> bool:
        """Go on with what is kept; return whether the system took something."""
        with self._posting:
            return self._push() > 0

    def _push(self) -> int:
        taken = 0
        while self._kept:
            done = self._push_some(self._kept[:_IOV_MAX])
            if not done:
                break
            taken += done
            self._kept = _rest(self._kept, done)
        return taken

    def _push_some(self, parts: Sequence[bytes | memoryview | Array]) -> int:
        """Send what the system takes now; return how many bytes that is."""
        try:
            if self._gather:
                return self._sock.sendmsg(parts, (), socket.MSG_DONTWAIT)
            block = memoryview(parts[0])[:_TLS_BLOCK]
            return self._alone(partial(self._sock.send, block), wait=False) or 0
        except BlockingIOError:
            return 0
        except OSError as error:
            self._kept = []
            self._shut()
            raise ConnectionClosed(f"the connection broke while sending: {error}") from error

    def receive(self, place: Place) -> Received | None:
        """Read on; return the next frame if all of it has come."""
        if self._incoming is None:
            raw = bytearray(_HEADER.size)
            got = self._receive((raw,))
            if got is None:  # what a selector reports under TLS may be a message of the protocol
                return None
            if got == _HEADER.size:
                header = self._header(raw)
                if not header.blob and header.body <= _READ_BLOCK:  # as nearly always
                    arrays = place(header, None)
                    _check_body(header, arrays)
                    got = self._receive(arrays[:_IOV_MAX]) or 0 if header.body else 0
                    if got == header.body:
                        return header, None, arrays
                    self._incoming = self._body(header, None, arrays, got)
            if self._incoming is None:
                self._incoming = self._frame(raw, got, place)
        try:
            next(self._incoming)
        except StopIteration as whole:
            self._incoming = None
            received: Received = whole.value
            return received
        return None

    @property
    def is_receiving(self) -> bool:
        """Whether a part of a frame has come."""
        return self._incoming is not None

    def _frame(self, raw: bytearray, got: int, place: Place) -> Generator[None, None, Received]:
        """Read a frame of whose header some bytes have come; yield when the rest has not."""
        yield from self._arrive((raw,), got)
        header = self._header(raw)
        value: Any = None
        if header.blob:
            blob = bytearray(header.blob)
            yield from self._arrive((blob,), 0)
            value = loads(blob)
        arrays = place(header, value)
        _check_body(header, arrays)
        return (yield from self._body(header, value, arrays, 0))

    def _body(
        self, header: Header, value: Any, arrays: Sequence[Array], got: int
    ) -> Generator[None, None, Received]:
        yield from self._arrive(arrays, got)
        return header, value, arrays

    def _arrive(
        self, buffers: Sequence[bytearray | Array], got: int
    ) -> Generator[None, None, None]:
        """Receive into contiguous buffers; yield after a moment if more is to come."""
        parts = _rest(_bytes_of(buffers), got)
        ends = time.monotonic() + _MOMENT
        while parts:
            large = self._gather and parts[0].nbytes > _READ_BLOCK
            received = self._receive([parts[0][:_READ_BLOCK]] if large else parts[:_IOV_MAX])
            parts = _rest(parts, received or 0)
            left = ends - time.monotonic()
            if parts and (left <= 0 or (received is None and not self._poll(select.POLLIN, left))):
                yield
                ends = time.monotonic() + _MOMENT

    def _receive(self, buffers: Sequence[bytearray | memoryview | Array]) -> int | None:
        """Receive what has come; ``None`` if nothing has."""
        try:
            if self._gather:
                done: int | None = self._sock.recvmsg_into(buffers, 0, socket.MSG_DONTWAIT)[0]
            else:
                done = self._alone(partial(self._sock.recv_into, buffers[0]), wait=False)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionClosed(f"the connection broke while receiving: {error}") from error
        if done == 0:
            raise ConnectionClosed("the other end closed the connection")
        return done

    # Headers

    def _head_of(self, kind: int, blob: bytes, body: Sequence[Array]) -> tuple[bytes, int]:
        """Return what goes before the body, and the body's size."""
        if len(blob) > self._limit:
            raise ConfigError(
                f"a message of {len(blob):,} bytes is larger than clusterenv.channel.message "
                f"allows, {self._limit:,} bytes. If infos, calls or rendered frames are that "
                "large: dask.config.set({'clusterenv.channel.message': '2 GiB'})"
            )
        size = 0
        for array in body:
            size += array.nbytes
        return _HEADER.pack(kind, len(blob), size) + blob, size

    def _header(self, raw: bytearray) -> Header:
        header = Header(*_HEADER.unpack(raw))
        if header.blob > self._limit:
            raise ConnectionClosed(
                f"the other end announced a message of {header.blob:,} bytes; "
                f"{self._limit:,} are allowed (clusterenv.channel.message)"
            )
        return header

    def close(self) -> None:
        """Close the connection; a thread that waits on it is woken."""
        self._shut()
        with self._tls:
            self._sock.close()

    def _shut(self) -> None:
        self._shut_down = True
        try:
            # Not that of TLS, which would leave the bare connection behind for others to read.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            pass


def _check_body(header: Header, arrays: Sequence[Array]) -> None:
    size = 0
    for array in arrays:
        size += array.nbytes
    if size != header.body:
        raise ConnectionClosed(f"expected a body of {size} bytes, got one of {header.body}")


def _bytes_of(buffers: Sequence[bytes | bytearray | memoryview | Array]) -> list[memoryview]:
    """Return flat views of the bytes, without those that have none."""
    views = [memoryview(buffer) for buffer in buffers]
    return [view.cast("B") for view in views if view.nbytes]


def _rest(parts: list[memoryview], done: int) -> list[memoryview]:
    for position, part in enumerate(parts):
        if done < part.nbytes:
            return [part[done:], *parts[position + 1 :]]
        done -= part.nbytes
    return []
