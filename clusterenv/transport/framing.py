"""The format of a message: a header, a blob, and a body of raw array bytes.

Pure functions on bytes, shared by the blocking and the non-blocking connection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from clusterenv.data.spaces import Array
from clusterenv.errors import ConfigError, ConnectionClosed

__all__ = [
    "HEADER_SIZE",
    "MESSAGE_LIMIT",
    "Header",
    "Message",
    "Place",
    "byte_views",
    "check_body",
    "pack",
    "remaining",
    "unpack",
]

_HEADER = struct.Struct("<IIQ")
HEADER_SIZE = _HEADER.size
MESSAGE_LIMIT = 1 << 29
"""Default of ``clusterenv.channel.message``: the largest blob of a message, in bytes."""


class Header(NamedTuple):
    """The kind of a message, and the size of its blob and its body in bytes."""

    kind: int
    blob: int
    body: int


Place = Callable[[Header, Any], Sequence[Array]]
"""Returns the contiguous arrays that receive a message's body, given its header and blob.

It raises ``ConnectionClosed`` if no such message is expected.
"""


class Message(NamedTuple):
    """A message that was received."""

    kind: int
    blob: Any
    """Decoded by :func:`~clusterenv.transport.messages.decode_blob`; ``None`` if it was empty."""
    body: Sequence[Array]
    """The arrays that hold it."""


def pack(kind: int, blob: bytes, body: Sequence[Array], limit: int) -> tuple[bytes, int]:
    r"""Return the header and the blob of a message as they are sent, and the size of its body.

    Raises ``ConfigError`` if the blob has more than ``limit`` bytes.

    >>> pack(7, b"blob", [], limit=100)
    (b'\x07\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00blob', 0)
    """
    if len(blob) > limit:
        raise ConfigError(
            f"a message of {len(blob):,} bytes is larger than clusterenv.channel.message "
            f"allows, {limit:,} bytes. If infos, calls or rendered frames are that "
            "large: dask.config.set({'clusterenv.channel.message': '2 GiB'})"
        )
    size = 0
    for array in body:
        size += array.nbytes
    return _HEADER.pack(kind, len(blob), size) + blob, size


def unpack(raw: bytes | bytearray, limit: int) -> Header:
    """Return the header of a message.

    Raises ``ConnectionClosed`` if it announces a blob of more than ``limit`` bytes.

    >>> unpack(pack(7, b"blob", [], limit=100)[0][:HEADER_SIZE], limit=100)
    Header(kind=7, blob=4, body=0)
    """
    header = Header(*_HEADER.unpack(raw))
    if header.blob > limit:
        raise ConnectionClosed(
            f"the other end announced a message of {header.blob:,} bytes; "
            f"{limit:,} are allowed (clusterenv.channel.message)"
        )
    return header


def check_body(header: Header, arrays: Sequence[Array]) -> None:
    """Raise ``ConnectionClosed`` unless the body of a message fills these arrays exactly."""
    size = 0
    for array in arrays:
        size += array.nbytes
    if size != header.body:
        raise ConnectionClosed(f"expected a body of {size} bytes, got one of {header.body}")


def byte_views(buffers: Sequence[bytes | bytearray | memoryview | Array]) -> list[memoryview]:
    """Return flat views of the bytes of contiguous buffers; empty ones are left out."""
    views = [memoryview(buffer) for buffer in buffers]
    return [view.cast("B") for view in views if view.nbytes]


def remaining(views: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of byte views after the first ``done`` bytes."""
    for position, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[position + 1 :]]
        done -= view.nbytes
    return []
