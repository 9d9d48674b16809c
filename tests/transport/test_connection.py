"""Frames over real sockets: TCP, TLS and those of one machine."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from compare import assert_same
from distributed.security import Security

from clusterenv.errors import ConnectionClosed
from clusterenv.transport.connection import Connection, Header
from clusterenv.transport.endpoint import Listener, reach


@pytest.fixture(params=["plain", "tls", "local"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Connection, Connection]]:
    server = client = None
    if request.param == "tls":
        security = Security.temporary()
        server = security.get_listen_args("worker")["ssl_context"]
        client = security.get_connection_args("client")["ssl_context"]
    listener = Listener("127.0.0.1", server, local=request.param == "local")
    accepted: list[Connection] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept(5)))
    thread.start()
    head = reach(listener.endpoint, client, 5)
    thread.join()
    listener.close()
    yield head, accepted[0]
    head.close()
    accepted[0].close()


def anywhere(header: Header, _blob: Any) -> list[Any]:
    return [np.empty(header.body, np.uint8)]


def test_a_frame_arrives_as_it_was_sent(ends: tuple[Connection, Connection]) -> None:
    head, shard = ends
    arrays = [np.arange(6.0).reshape(2, 3), np.zeros((0, 4)), np.array([True, False])]
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


def test_bodies_larger_than_the_sockets_buffers_arrive_whole(
    ends: tuple[Connection, Connection],
) -> None:
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


def test_many_columns_fit_into_one_frame(ends: tuple[Connection, Connection]) -> None:
    head, shard = ends
    arrays = [np.full(3, k, np.int32) for k in range(400)]
    head.send(1, b"", arrays)
    into = [np.empty(3, np.int32) for _ in arrays]
    shard.recv_body(shard.recv_header(), into)
    assert [int(array[0]) for array in into] == list(range(400))


def test_a_body_of_unexpected_size_is_refused(ends: tuple[Connection, Connection]) -> None:
    head, shard = ends
    head.send(1, b"", [np.zeros(4)])
    with pytest.raises(ConnectionClosed, match="expected a body of 16 bytes, got one of 32"):
        shard.recv_body(shard.recv_header(), [np.zeros(2)])


def test_a_process_of_this_machine_that_does_not_read_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clusterenv.transport.connection._SEND_SECONDS", 1.0)
    ours, theirs = map(Connection, socket.socketpair())
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


def test_a_thread_that_serves_many_waits_for_none(ends: tuple[Connection, Connection]) -> None:
    """Frames in both directions, larger than what lies between; one thread for both ends."""
    head, shard = ends
    sent = [np.random.default_rng(k).integers(0, 255, 9_000_001, np.uint8) for k in range(2)]
    assert head.post(5, b"\x80\x05K\x2a.", sent[:1])
    assert head.post(6)
    assert shard.post(7, b"", sent[1:])
    got: list[tuple[int, Any]] = []

    def reading(connection: Connection, frames: int) -> Iterator[None]:
        for _ in range(frames):
            while (received := connection.receive(anywhere)) is None:
                yield
            header, blob, (body,) = received
            got.append((header.kind, blob))
            assert header.kind == 6 or (body == sent[header.kind == 7]).all()

    readers = [reading(shard, 2), reading(head, 1)]
    while readers:
        readers = [each for each in readers if next(each, "over") is None]
        for connection in ends:
            if connection.is_behind:
                connection.flush()
    assert sorted(got) == [(5, 42), (6, None), (7, None)]
    assert not head.flush()


def test_the_end_of_a_connection_ends_what_was_on_its_way(
    ends: tuple[Connection, Connection],
) -> None:
    head, shard = ends
    head.post(5, b"", [np.zeros(9_000_001, np.uint8)])
    assert shard.receive(anywhere) is None
    head.close()
    with pytest.raises(ConnectionClosed):
        list(iter(lambda: shard.receive(anywhere), "a frame"))
    with pytest.raises(ConnectionClosed):
        list(iter(lambda: shard.post(5, b"", [np.zeros(9_000_001, np.uint8)]), None))


def test_after_a_send_that_failed_nothing_is_read_that_was_not_sent(
    ends: tuple[Connection, Connection],
) -> None:
    """Under TLS, the bytes of a connection that broke are encrypted, and look like a body."""
    head, shard = ends
    body = np.full(200_000, 7, np.uint8)
    got = np.zeros_like(body)
    head.post(9, b"x" * 100)  # which the other end never reads, so it ends with a reset
    shard._kept = [memoryview(struct.pack("<IIQ", 3, 0, len(body)) + bytes(body[:1000]))]
    shard.flush()
    while not got.any():
        assert head.receive(lambda header, blob: [got]) is None
    shard._kept += [memoryview(body[1000:]).cast("B")]  # the rest, and not a word more
    shard.flush()
    os.close(shard._sock.detach())
    with pytest.raises(ConnectionClosed):
        list(iter(lambda: head.post(1, b"ticket"), None))
    try:
        while head.receive(anywhere) is None:
            pass
    except ConnectionClosed:
        assert set(np.unique(got)) <= {0, 7}
    else:
        assert (got == 7).all()


def test_the_other_end_closing_is_noticed_at_once(ends: tuple[Connection, Connection]) -> None:
    head, shard = ends
    closer = threading.Timer(0.1, shard.close)
    closer.start()
    began = time.monotonic()
    with pytest.raises(ConnectionClosed):
        head.recv_header()
    assert time.monotonic() - began < 2
    closer.join()
