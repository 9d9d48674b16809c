"""Requests and answers of ``ClusterEnv`` over real sockets, without a cluster."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
import pytest

from clusterenv.data.pickling import dumps
from clusterenv.errors import ConfigError, EnvError, WorkerLost
from clusterenv.head.vector.exchange import Exchange, Request
from clusterenv.transport.connection import BlockingConnection, NonBlockingConnection
from clusterenv.transport.heartbeat import Heartbeat
from clusterenv.transport.messages import Failure, MessageKind


class End:
    """What an exchange knows of a shard, and the shard's own end."""

    def __init__(self, index: int) -> None:
        self.index = index
        ours, self.socket = socket.socketpair()
        self.connection = NonBlockingConnection(ours, limit=1000)
        self.shard = BlockingConnection(self.socket)
        self.heartbeat = Heartbeat(time.monotonic())

    def __str__(self) -> str:
        return f"shard {self.index}"

    def close(self) -> None:
        self.connection.close()
        self.shard.close()


class Ends:
    """Stands in for a fleet: two shards, of which a lost one is replaced at once."""

    def __init__(self) -> None:
        self.handles = [End(0), End(1)]
        self.replaced: list[tuple[End, WorkerLost, bool]] = []
        self.failed: list[BaseException] = []

    def gone(self) -> list[End]:
        return []

    def lost(self, handle: End) -> WorkerLost:
        return WorkerLost(f"{handle} is gone")

    def recover(self, handle: End, error: WorkerLost, end_process: bool) -> End:
        self.replaced.append((handle, error, end_process))
        self.handles[handle.index] = End(handle.index)
        return self.handles[handle.index]

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)


@pytest.fixture
def ends() -> Iterator[Any]:
    ends = Ends()
    yield ends
    for end in [*ends.handles, *(end for end, _, _ in ends.replaced)]:
        end.close()


@pytest.fixture
def exchange(ends: Any) -> Iterator[Exchange]:
    with dask.config.set({"clusterenv.timeout.step": "1s", "clusterenv.timeout.call": "60s"}):
        exchange = Exchange(ends, ends.recover, ends.fail)
    yield exchange
    exchange.close()


def request(kind: int, into: Any, again: Any, blob: bytes = b"", body: Any = ()) -> Request:
    def complete(handle: Any, blob: Any) -> Any:
        return handle.index, blob, into.copy()

    return Request(kind, complete, again, [into], blob, body)


def ask(
    exchange: Exchange, shard: int, into: Any, kind: MessageKind = MessageKind.STEP, body: Any = ()
) -> Any:
    """Send a request that is made again if the shard is lost; return how often it was made."""
    made: list[int] = []

    def send() -> None:
        made.append(shard)
        exchange.send(shard, request(kind, into, send, body=body))

    send()
    return made


def raw(blob: Any, body: Any) -> bytes:
    """A whole answer as it travels."""
    pickled = dumps(blob)
    return (
        struct.pack("<IIQ", MessageKind.RESULT, len(pickled), body.nbytes)
        + pickled
        + body.tobytes()
    )


ANSWER = np.arange(100_000, dtype=np.int64)
IN_HEADER, IN_BLOB, IN_BODY = 7, 18, 5_000


# A reset that has not begun to answer has a longer deadline.
STOPS = [(MessageKind.STEP, 0)]
STOPS += [
    (kind, cut)
    for kind in (MessageKind.STEP, MessageKind.RESET)
    for cut in (IN_HEADER, IN_BLOB, IN_BODY)
]


@pytest.mark.parametrize(("kind", "cut"), STOPS)
def test_a_shard_that_stops_within_an_answer_is_lost_after_the_deadline(
    exchange: Exchange, ends: Any, kind: MessageKind, cut: int
) -> None:
    into = np.zeros_like(ANSWER)
    made = ask(exchange, 0, into, kind)
    stopped = ends.handles[0]
    stopped.socket.sendall(raw("infos", ANSWER)[:cut])
    with pytest.raises(TimeoutError):
        exchange.recv(0.1)
    assert not ends.replaced
    while not ends.replaced:
        with pytest.raises(TimeoutError):
            exchange.recv(0.2)
    ((lost, error, end_process),) = ends.replaced
    assert lost is stopped
    assert end_process
    assert "has not answered for 1 s" in str(error)
    assert made == [0, 0]
    ends.handles[0].socket.sendall(raw("again", ANSWER))
    index, blob, got = exchange.recv(10)
    assert (index, blob) == (0, "again")
    assert (got == ANSWER).all()
    assert exchange.outstanding == 0
    assert not ends.failed


def test_a_shard_that_reads_nothing_keeps_no_sender_waiting_and_is_lost_after_the_deadline(
    exchange: Exchange, ends: Any
) -> None:
    into = np.zeros(1)
    large = np.zeros(20_000_000, np.uint8)
    made = [ask(exchange, 0, into, body=[large]) for _ in range(3)]
    while not ends.replaced:
        with pytest.raises(TimeoutError):
            exchange.recv(0.2)
    assert made == [[0, 0], [0, 0], [0, 0]]


def test_a_request_whose_shard_is_lost_while_it_is_sent_is_made_again(
    exchange: Exchange, ends: Any
) -> None:
    lost = ends.handles[0]

    def read_some() -> None:
        for _ in range(8):
            lost.socket.recv(1 << 20, socket.MSG_WAITALL)
        lost.socket.shutdown(socket.SHUT_RDWR)

    reading = threading.Thread(target=read_some)
    reading.start()
    made = ask(exchange, 0, np.zeros(1), body=[np.zeros(20_000_000, np.uint8)])
    reading.join()
    while not ends.replaced:
        with pytest.raises(TimeoutError):
            exchange.recv(0.05)
    assert made == [0, 0]
    assert len(exchange._unanswered[0]) == 1


def test_a_shard_that_is_late_is_noticed_while_others_answer(exchange: Exchange, ends: Any) -> None:
    into = np.zeros(1)
    ask(exchange, 0, into)
    while not ends.replaced:
        ask(exchange, 1, into)
        ends.handles[1].socket.sendall(raw(None, into))
        assert exchange.recv(10)[0] == 1


def test_an_answer_that_goes_on_arriving_is_not_late(exchange: Exchange, ends: Any) -> None:
    into = np.zeros_like(ANSWER)
    ask(exchange, 0, into)
    frame = raw(None, ANSWER)
    for begin in range(0, len(frame) - 8, len(frame) // 10):
        ends.handles[0].socket.sendall(frame[begin : begin + len(frame) // 10])
        with pytest.raises(TimeoutError):
            exchange.recv(0.25)
        if begin + 2 * (len(frame) // 10) >= len(frame):
            break
    ends.handles[0].socket.sendall(frame[begin + len(frame) // 10 :])
    assert (exchange.recv(10)[2] == ANSWER).all()
    assert not ends.replaced


def test_what_was_sent_may_change_afterwards(exchange: Exchange, ends: Any) -> None:
    actions = np.ones(20_000_000, np.uint8)
    ask(exchange, 0, np.zeros(1), body=[actions])
    actions[:] = 2
    with pytest.raises(TimeoutError):
        exchange.recv(0)
    got = np.empty_like(actions)

    def serve() -> None:
        shard = ends.handles[0].shard
        shard.recv_body(shard.recv_header(), [got])
        ends.handles[0].socket.sendall(raw(None, np.zeros(1)))

    serving = threading.Thread(target=serve)
    serving.start()
    exchange.recv(10)
    serving.join()
    assert (got == 1).all()


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ((MessageKind.RESULT, 1001, 8), "announced a message of 1,001 bytes"),
        ((MessageKind.RESULT, 0, 1 << 40), "expected a body of 8 bytes"),
        ((MessageKind.FAILED, 0, 8), "expected a body of 0 bytes"),
        ((MessageKind.FRAGMENT, 0, 8), "without a request for it"),
    ],
)
def test_a_header_that_claims_what_cannot_be_breaks_the_connection(
    exchange: Exchange, ends: Any, header: tuple[int, int, int], match: str
) -> None:
    ask(exchange, 0, np.zeros(1))
    ends.handles[0].socket.sendall(struct.pack("<IIQ", *header))
    while not ends.replaced:
        with pytest.raises(TimeoutError):
            exchange.recv(0.05)
    _, error, _ = ends.replaced[0]
    with pytest.raises(ConnectionError, match=match):
        raise error.__cause__  # type: ignore[misc]


def test_an_answer_that_nothing_asked_for_breaks_the_connection(
    exchange: Exchange, ends: Any
) -> None:
    ends.handles[0].socket.sendall(raw(None, np.zeros(1)))
    with pytest.raises(TimeoutError):
        exchange.recv(0.1)
    assert "without a request for it" in str(ends.replaced[0][1].__cause__)


def test_a_failure_is_raised_after_everything_was_closed(exchange: Exchange, ends: Any) -> None:
    ask(exchange, 0, np.zeros(1))
    failure = Failure(3, "step", None, "Traceback: broken")
    ends.handles[0].shard.send(MessageKind.FAILED, dumps(failure))
    with pytest.raises(EnvError, match="environment 3"):
        exchange.recv(10)
    assert isinstance(ends.failed[0], EnvError)
    assert exchange.outstanding == 0


def test_a_message_that_is_too_large_is_refused_where_it_is_sent(
    exchange: Exchange, ends: Any
) -> None:
    with pytest.raises(ConfigError, match=r"clusterenv\.channel\.message allows, 1,000 bytes"):
        exchange.send(0, request(MessageKind.CALL, np.zeros(1), exchange.close, bytes(1001)))
    assert len(ends.failed) == 1
