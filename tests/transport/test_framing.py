"""Headers, limits and byte views, without a socket."""

from __future__ import annotations

import numpy as np
import pytest

from clusterenv.errors import ConfigError, ConnectionClosed
from clusterenv.transport.framing import (
    HEADER_SIZE,
    Header,
    byte_views,
    check_body,
    pack,
    remaining,
    unpack,
)


def test_a_header_announces_the_sizes_of_blob_and_body() -> None:
    packed, size = pack(9, b"blob", [np.zeros(3), np.zeros(0), np.zeros((2, 2), np.uint8)], 100)
    assert unpack(packed[:HEADER_SIZE], 100) == Header(9, 4, 28)
    assert packed[HEADER_SIZE:] == b"blob"
    assert size == 28


def test_a_blob_above_the_limit_is_refused_at_both_ends() -> None:
    packed, _ = pack(1, bytes(100), (), limit=100)
    with pytest.raises(ConfigError, match=r"101 bytes.*clusterenv\.channel\.message.*100 bytes"):
        pack(1, bytes(101), (), limit=100)
    with pytest.raises(ConnectionClosed, match="announced a message of 100 bytes; 99 are allowed"):
        unpack(packed[:HEADER_SIZE], limit=99)


def test_a_body_must_fill_its_arrays() -> None:
    check_body(Header(1, 0, 32), [np.zeros(3), np.zeros(1)])
    with pytest.raises(ConnectionClosed, match="expected a body of 24 bytes, got one of 32"):
        check_body(Header(1, 0, 32), [np.zeros(3)])


@pytest.mark.parametrize("done", range(13))
def test_what_remains_begins_after_the_bytes_that_are_done(done: int) -> None:
    arrays = [np.arange(4, dtype=np.uint8), np.zeros(0), np.arange(4, dtype=np.uint16)]
    views = byte_views(arrays)
    assert [view.nbytes for view in views] == [4, 8]
    whole = b"".join(views)
    assert b"".join(remaining(views, done)) == whole[done:]


def test_views_share_memory_with_their_arrays() -> None:
    array = np.zeros((2, 3), np.int32)
    (view,) = byte_views([array])
    view[:4] = b"\1\0\0\0"
    assert array[0, 0] == 1
