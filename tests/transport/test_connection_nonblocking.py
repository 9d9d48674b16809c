"""Messages piece by piece, by a thread that waits for no peer: TCP, TLS and Unix sockets."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sockets import KINDS, connected

from clusterenv.errors import ConnectionClosed
from clusterenv.transport.connection import NonBlockingConnection
from clusterenv.transport.framing import Header
from clusterenv.transport.messages import FragmentMeta, MessageKind

Ends = tuple[NonBlockingConnection, NonBlockingConnection]
LARGE = 9_000_001  # bytes; more than what a socket holds


@pytest.fixture(params=KINDS)
def sockets(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    with connected(request.param) as pair:
        yield pair


@pytest.fixture
def ends(sockets: tuple[socket.socket, socket.socket]) -> Iterator[Ends]:
    head, shard = map(NonBlockingConnection, sockets)
    yield head, shard
    head.close()
    shard.close()


def anywhere(header: Header, _blob: Any) -> list[Any]:
    return [np.empty(header.body, np.uint8)]


def test_both_directions_of_one_thread_make_progress(ends: Ends) -> None:
    """Messages in both directions, larger than the sockets' buffers; one thread for both ends."""
    head, shard = ends
    sent = [np.random.default_rng(k).integers(0, 255, LARGE, np.uint8) for k in range(2)]
    assert head.send(5, b"\x80\x05K\x2a.", sent[:1])
    assert head.has_unsent
    assert head.send(6)
    assert shard.send(7, b"", sent[1:])
    got: list[tuple[int, Any]] = []

    def reading(connection: NonBlockingConnection, messages: int) -> Iterator[None]:
        for _ in range(messages):
            while (message := connection.receive(anywhere)) is None:
                yield
            got.append((message.kind, message.blob))
            assert message.kind == 6 or (message.body[0] == sent[message.kind == 7]).all()

    readers = [reading(shard, 2), reading(head, 1)]
    while readers:
        readers = [each for each in readers if next(each, "over") is None]
        for connection in ends:
            if connection.has_unsent:
                connection.flush()
    assert sorted(got) == [(5, 42), (6, None), (7, None)]
    assert not head.flush()
    assert not head.has_unsent


def test_a_body_is_received_into_the_arrays_that_are_given(ends: Ends) -> None:
    head, shard = ends
    into = [np.zeros(0), np.zeros((2, 3)), np.zeros(4, np.bool_)]
    shard.send(11, b"", [np.zeros(0), np.arange(6.0).reshape(2, 3), np.ones(4, np.bool_)])
    while (message := head.receive(lambda header, blob: into)) is None:
        pass
    assert message.body is into
    assert into[1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert into[2].all()


@pytest.mark.parametrize("copy", [True, False])
def test_what_is_queued_is_copied_only_if_asked(ends: Ends, copy: bool) -> None:
    head, shard = ends
    body = np.ones(LARGE, np.uint8)
    assert head.send(5, b"", [body], copy=copy)
    body[-1] = 2
    while (message := shard.receive(anywhere)) is None:
        head.flush()
    assert message.body[0][-1] == (1 if copy else 2)


def test_the_end_of_a_connection_ends_what_was_on_its_way(ends: Ends) -> None:
    head, shard = ends
    head.send(5, b"", [np.zeros(LARGE, np.uint8)])
    assert shard.receive(anywhere) is None
    assert shard.is_receiving
    head.close()
    with pytest.raises(ConnectionClosed):
        list(iter(lambda: shard.receive(anywhere), "a message"))
    with pytest.raises(ConnectionClosed):
        list(iter(lambda: shard.send(5, b"", [np.zeros(LARGE, np.uint8)]), None))


def test_a_broken_connection_has_nothing_left_to_send(ends: Ends) -> None:
    head, shard = ends
    assert head.send(5, b"", [np.zeros(LARGE, np.uint8)])
    shard.close()
    with pytest.raises(ConnectionClosed):
        list(iter(head.flush, None))
    assert not head.has_unsent


def test_after_a_send_that_failed_nothing_is_read_that_was_not_sent(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    """Under TLS, the bytes of a connection that broke are encrypted, and look like a body."""
    ours, theirs = sockets
    head = NonBlockingConnection(ours)
    body = np.full(200_000, 7, np.uint8)
    got = np.zeros_like(body)
    head.send(9, b"x" * 100)  # which the other end never reads, so it ends with a reset
    theirs.setblocking(True)
    theirs.sendall(struct.pack("<IIQ", 3, 0, len(body)) + bytes(body[:1000]))
    while not got.any():
        assert head.receive(lambda header, blob: [got]) is None
    theirs.sendall(body[1000:])  # the rest, and nothing more
    os.close(theirs.detach())
    with pytest.raises(ConnectionClosed):
        list(iter(lambda: head.send(1, b"credit"), None))
    try:
        while head.receive(anywhere) is None:
            pass
    except ConnectionClosed:
        assert set(np.unique(got)) <= {0, 7}
    else:
        assert (got == 7).all()
    head.close()


class Loaded:
    """Tells when it is unpickled."""

    seen = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Loaded.count, ()

    @staticmethod
    def count() -> None:
        Loaded.seen += 1


@pytest.mark.parametrize("kind", [MessageKind.SCHEMA, MessageKind.FRAGMENT])
def test_messages_with_rows_are_not_unpickled(ends: Ends, kind: MessageKind) -> None:
    head, shard = ends
    blob = pickle.dumps([Loaded()] * 50)
    shard.send(kind, blob, [np.zeros(5, np.uint8)])
    while (message := head.receive(anywhere)) is None:
        pass
    assert (message.blob, Loaded.seen) == (blob, 0)
    with pytest.raises(ValueError, match=r"."):
        FragmentMeta.unpack(message.blob)
