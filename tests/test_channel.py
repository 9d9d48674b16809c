"""Frames over real sockets, plain and under TLS."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from compare import assert_same
from distributed.security import Security

from clusterenv.channel import Channel, Listener
from clusterenv.errors import ChannelClosed


@pytest.fixture(params=["plain", "tls"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    server = client = None
    if request.param == "tls":
        security = Security.temporary()
        server = security.get_listen_args("worker")["ssl_context"]
        client = security.get_connection_args("client")["ssl_context"]
    listener = Listener("127.0.0.1", server)
    accepted: list[Channel] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept(5)))
    thread.start()
    head = Channel.connect("127.0.0.1", listener.port, listener.token, client, 5)
    thread.join()
    listener.close()
    yield head, accepted[0]
    head.close()
    accepted[0].close()


def test_a_frame_arrives_as_it_was_sent(ends: tuple[Channel, Channel]) -> None:
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


def test_bodies_larger_than_the_sockets_buffers_arrive_whole(ends: tuple[Channel, Channel]) -> None:
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


def test_many_columns_fit_into_one_frame(ends: tuple[Channel, Channel]) -> None:
    head, shard = ends
    arrays = [np.full(3, k, np.int32) for k in range(400)]
    head.send(1, b"", arrays)
    into = [np.empty(3, np.int32) for _ in arrays]
    shard.recv_body(shard.recv_header(), into)
    assert [int(array[0]) for array in into] == list(range(400))


def test_a_body_of_unexpected_size_is_refused(ends: tuple[Channel, Channel]) -> None:
    head, shard = ends
    head.send(1, b"", [np.zeros(4)])
    with pytest.raises(ChannelClosed, match="expected a body of 16 bytes, got one of 32"):
        shard.recv_body(shard.recv_header(), [np.zeros(2)])


def test_the_other_end_closing_is_noticed_at_once(ends: tuple[Channel, Channel]) -> None:
    head, shard = ends
    closer = threading.Timer(0.1, shard.close)
    closer.start()
    began = time.monotonic()
    with pytest.raises(ChannelClosed):
        head.recv_header()
    assert time.monotonic() - began < 2
    closer.join()


def test_a_stranger_is_turned_away_and_the_head_still_served() -> None:
    listener = Listener("127.0.0.1")
    accepted: list[Channel] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept(10)))
    thread.start()
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(b"x" * 32)
        assert stranger.recv(1) == b""  # closed without an answer
    head = Channel.connect("127.0.0.1", listener.port, listener.token, None, 5)
    thread.join()
    head.close()
    accepted[0].close()
    listener.close()


def test_a_client_with_another_certificate_is_refused() -> None:
    ours, theirs = Security.temporary(), Security.temporary()
    listener = Listener("127.0.0.1", ours.get_listen_args("worker")["ssl_context"])
    refused: list[Exception] = []

    def accept() -> None:
        try:
            listener.accept(1.5)
        except ChannelClosed as error:
            refused.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    context = theirs.get_connection_args("client")["ssl_context"]
    with pytest.raises((OSError, ChannelClosed)):
        Channel.connect("127.0.0.1", listener.port, listener.token, context, 5).recv_header()
    thread.join()
    listener.close()
    assert "did not connect within 1.5 s" in str(refused[0])


def test_ports_can_be_restricted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="no free port for a channel"):
            Listener("127.0.0.1", ports=(port, port))
    listener = Listener("127.0.0.1", ports=(port, port))
    assert listener.port == port
    listener.close()
