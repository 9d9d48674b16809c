"""Messages of many shards in one thread that waits for none of them: sockets, no cluster."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from clusterenv.errors import ConnectionClosed
from clusterenv.transport.connection import BlockingConnection, NonBlockingConnection
from clusterenv.transport.framing import Header, Message, pack
from clusterenv.transport.heartbeat import Heartbeat
from clusterenv.transport.messages import MessageKind
from clusterenv.transport.multiplexer import Multiplexer


class End:
    """What a multiplexer knows of a shard, and the shard's own end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.connection, self.shard = NonBlockingConnection(ours), BlockingConnection(theirs)
        self.socket = theirs
        self.heartbeat = Heartbeat(time.monotonic())


def place(_end: End, header: Header, _blob: Any) -> list[Any]:
    return [np.empty(header.body, np.uint8)]


@pytest.fixture
def ends() -> Iterator[list[Any]]:
    made = [End(), End()]
    yield made
    for end in made:
        end.connection.close()
        end.shard.close()


@pytest.fixture
def multiplexer(ends: list[Any]) -> Iterator[Multiplexer]:
    multiplexer = Multiplexer(place)
    for end in ends:
        multiplexer.add(end)
    yield multiplexer
    multiplexer.close()


def hear(multiplexer: Multiplexer, count: int) -> list[tuple[Any, Message]]:
    heard: list[Any] = []
    deadline = time.monotonic() + 30
    while len(heard) < count and time.monotonic() < deadline:
        heard += multiplexer.listen(0.5)
    return heard


def raw(kind: int, body: bytes) -> bytes:
    """A message without a blob, as it is sent."""
    return pack(kind, b"", [np.frombuffer(body, np.uint8)], limit=0)[0] + body


def test_a_message_in_part_delays_no_other_peer(multiplexer: Multiplexer, ends: list[Any]) -> None:
    frame = raw(MessageKind.FRAGMENT, b"abcdef")
    for cut in range(1, len(frame)):
        ends[0].socket.sendall(frame[:cut])
        ends[1].shard.send(MessageKind.PULL)
        ((speaker, message),) = hear(multiplexer, 1)
        assert (speaker, message.kind) == (ends[1], MessageKind.PULL)
        ends[0].socket.sendall(frame[cut:])
        ((speaker, message),) = hear(multiplexer, 1)
        assert (speaker, bytes(message.body[0])) == (ends[0], b"abcdef")


def test_a_peer_that_never_stops_sending_leaves_others_their_turn(
    multiplexer: Multiplexer, ends: list[Any]
) -> None:
    over = threading.Event()

    def pour() -> None:
        frame = np.zeros(1 << 30, np.uint8)  # longer than the test
        try:
            ends[0].shard.send(MessageKind.FRAGMENT, b"", [frame])
        except ConnectionClosed:
            over.set()

    pouring = threading.Thread(target=pour)
    pouring.start()
    for _ in range(3):
        ends[1].shard.send(MessageKind.PULL)
        speakers = [speaker for speaker, _ in hear(multiplexer, 1)]
        assert speakers == [ends[1]]
    multiplexer.remove(ends[0])
    ends[0].connection.close()
    pouring.join()
    assert over.is_set()


def test_a_peer_that_reads_late_gets_everything(multiplexer: Multiplexer, ends: list[Any]) -> None:
    sent = np.random.default_rng(0).integers(0, 255, 20_000_000, np.uint8)
    multiplexer.send(ends[0], MessageKind.WEIGHTS, b"", [sent])
    multiplexer.send(ends[0], MessageKind.CREDIT, b"")
    ends[1].shard.send(MessageKind.PULL)
    assert [speaker for speaker, _ in hear(multiplexer, 1)] == [ends[1]]
    got: list[Any] = []

    def read() -> None:
        header = ends[0].shard.recv_header()
        got.append(np.empty(header.body, np.uint8))
        ends[0].shard.recv_body(header, got)
        got.append(ends[0].shard.recv_header().kind)
        ends[0].shard.send(MessageKind.HELD)

    reading = threading.Thread(target=read)
    reading.start()
    ((speaker, message),) = hear(multiplexer, 1)
    reading.join()
    assert (speaker, message.kind) == (ends[0], MessageKind.HELD)
    assert (got[0] == sent).all()
    assert got[1] == MessageKind.CREDIT


def test_a_long_message_is_progress_and_a_backlog_that_is_not_read_is_silence(
    multiplexer: Multiplexer, ends: list[Any]
) -> None:
    frame = raw(MessageKind.FRAGMENT, bytes(1000))
    arriving, behind = ends
    for end in ends:
        end.heartbeat = Heartbeat(now=time.monotonic() - 100)
        end.heartbeat.pong(time.monotonic() - 100, steps=5, busy=True)
    multiplexer.send(behind, MessageKind.WEIGHTS, b"", [np.zeros(20_000_000, np.uint8)])
    for begin in range(0, 900, 300):
        arriving.socket.sendall(frame[begin : begin + 300])
        list(multiplexer.listen(0.1))
    now = time.monotonic()
    assert arriving.heartbeat.fault(now, silence=50, step=50) is None
    assert "has not answered" in str(behind.heartbeat.fault(now, silence=50, step=50))


def test_a_broken_connection_is_reported_and_can_be_removed(
    multiplexer: Multiplexer, ends: list[Any]
) -> None:
    ends[0].socket.sendall(raw(MessageKind.FRAGMENT, b"abcdef")[:-2])
    list(multiplexer.listen(0.1))
    ends[0].shard.close()
    ((speaker, error),) = hear(multiplexer, 1)
    assert speaker is ends[0]
    assert isinstance(error, ConnectionClosed)
    multiplexer.remove(ends[0])
    ends[1].shard.send(MessageKind.PULL)
    assert [speaker for speaker, _ in hear(multiplexer, 1)] == [ends[1]]


def test_waking_ends_the_pause(multiplexer: Multiplexer) -> None:
    for _ in range(10_000):  # more than a socket holds
        multiplexer.wake()
    assert list(multiplexer.listen(60)) == []


def test_peers_may_be_removed_and_messages_received_while_others_are_handled(
    multiplexer: Multiplexer, ends: list[Any]
) -> None:
    for end in ends:
        end.shard.send(MessageKind.PULL)
        end.shard.send(MessageKind.PONG)
    seen: list[Any] = []
    for peer, message in multiplexer.listen(1):
        seen.append((peer, message.kind))
        (other,) = (end for end in ends if end is not peer)
        seen += [(who, each.kind) for who, each in multiplexer.listen(1) if who is other]
        multiplexer.remove(other)
    assert seen == [
        (peer, MessageKind.PULL),
        (other, MessageKind.PULL),  # and neither twice nor out of order
    ]


def test_what_was_queued_before_a_peer_is_added_is_sent(ends: list[Any]) -> None:
    sent = np.random.default_rng(0).integers(0, 255, 20_000_000, np.uint8)
    assert ends[0].connection.send(MessageKind.WEIGHTS, b"", [sent])
    multiplexer = Multiplexer(place)
    multiplexer.add(ends[0])
    got = np.empty_like(sent)

    def read() -> None:
        ends[0].shard.recv_body(ends[0].shard.recv_header(), [got])
        ends[0].shard.send(MessageKind.HELD)

    reading = threading.Thread(target=read)
    reading.start()
    hear(multiplexer, 1)
    reading.join()
    assert (got == sent).all()
    multiplexer.close()
