"""Messages between threads that wait for each other: TCP, TLS and Unix sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from compare import assert_same
from sockets import KINDS, connected

from clusterenv.errors import ConnectionClosed
from clusterenv.transport.connection import BlockingConnection

Ends = tuple[BlockingConnection, BlockingConnection]


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with connected(request.param) as (ours, theirs):
        yield BlockingConnection(ours), BlockingConnection(theirs)


def test_a_message_arrives_as_it_was_sent(ends: Ends) -> None:
    head, shard = ends
    arrays = [np.zeros((0, 4)), np.arange(6.0).reshape(2, 3), np.array([True, False])]
    head.send(7, b"", [])
    head.send(8, b"\x80\x05K\x2a.", arrays)
    header = shard.recv_header()
    assert (header.kind, header.blob, header.body) == (7, 0, 0)
    assert shard.recv_blob(header) is None
    header = shard.recv_header()
    assert header.kind == 8
    assert shard.recv_blob(header) == 42
    into = [np.empty_like(array) for array in arrays]
    shard.recv_body(header, into)
    for got, sent in zip(into, arrays, strict=True):
        assert_same(got, sent)


def test_bodies_larger_than_the_sockets_buffers_arrive_whole(ends: Ends) -> None:
    head, shard = ends
    arrays = [np.random.default_rng(k).integers(0, 255, 3_000_001, np.uint8) for k in range(3)]
    sender = threading.Thread(target=lambda: shard.send(1, b"", arrays))
    sender.start()
    header = head.recv_header()
    into = [np.empty_like(array) for array in arrays]
    head.recv_body(header, into)
    sender.join()
    for got, sent in zip(into, arrays, strict=True):
        assert_same(got, sent)


@pytest.mark.parametrize("columns", [400, 1500])
def test_many_columns_fit_into_one_message(ends: Ends, columns: int) -> None:
    head, shard = ends
    arrays = [np.full(3, k, np.int32) for k in range(columns)]
    head.send(1, b"", arrays)
    into = [np.empty(3, np.int32) for _ in arrays]
    shard.recv_body(shard.recv_header(), into)
    assert [int(array[0]) for array in into] == list(range(columns))


def test_a_body_of_unexpected_size_is_refused(ends: Ends) -> None:
    head, shard = ends
    head.send(1, b"", [np.zeros(4)])
    with pytest.raises(ConnectionClosed, match="expected a body of 16 bytes, got one of 32"):
        shard.recv_body(shard.recv_header(), [np.zeros(2)])


def test_a_process_of_this_machine_that_does_not_read_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clusterenv.transport.stream_socket._SEND_SECONDS", 1.0)
    ours, theirs = map(BlockingConnection, socket.socketpair())
    began = time.monotonic()
    with pytest.raises(ConnectionClosed, match="broke while sending"):
        ours.send(1, b"", [np.zeros(50_000_000, np.uint8)])
    assert 0.5 < time.monotonic() - began < 10
    header = theirs.recv_header()
    with pytest.raises(ConnectionClosed):  # and not what is sent next, taken for the rest
        theirs.recv_body(header, [np.empty(header.body, np.uint8)])
    with pytest.raises(ConnectionClosed):
        ours.send(2)
    ours.close()
    theirs.close()


def test_the_other_end_closing_is_noticed_at_once(ends: Ends) -> None:
    head, shard = ends
    closer = threading.Timer(0.1, shard.close)
    closer.start()
    began = time.monotonic()
    with pytest.raises(ConnectionClosed):
        head.recv_header()
    assert time.monotonic() - began < 2
    closer.join()


def test_closing_wakes_a_thread_that_waits(ends: Ends) -> None:
    head, _ = ends
    closer = threading.Timer(0.1, head.close)
    closer.start()
    with pytest.raises(ConnectionClosed):
        head.recv_header()
    closer.join()
