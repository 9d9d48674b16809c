"""Clients with the token are admitted, and no others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from distributed.security import Security

from clusterenv.errors import ConfigError, ConnectionClosed
from clusterenv.transport.connection import BlockingConnection
from clusterenv.transport.endpoint import Endpoint, Listener, connect


class Meeting:
    """A listener that accepts in a thread, and what it admitted."""

    def __init__(self, listener: Listener, timeout: float) -> None:
        self.endpoint = listener.endpoint
        self.error: ConnectionClosed | None = None
        self._admitted: list[BlockingConnection] = []
        self._listener = listener
        self._timeout = timeout
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        try:
            self._admitted.append(self._listener.accept(self._timeout))
        except ConnectionClosed as error:
            self.error = error

    def join(self) -> None:
        self._thread.join()

    def admitted(self) -> BlockingConnection:
        self.join()
        (connection,) = self._admitted
        return connection

    def close(self) -> None:
        self._listener.close()
        self.join()
        for connection in self._admitted:
            connection.close()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting(Listener("127.0.0.1"), 10)
    yield meeting
    meeting.close()


def dial(endpoint: Endpoint) -> BlockingConnection:
    return BlockingConnection(connect(endpoint, None, 5))


def family(connection: BlockingConnection) -> socket.AddressFamily:
    with socket.socket(fileno=os.dup(connection._socket.fileno())) as same:
        return same.family


def assert_connected(head: BlockingConnection, shard: BlockingConnection) -> None:
    shard.send(5, b"", [])
    assert head.recv_header().kind == 5


def knock(meeting: Meeting, way: str) -> socket.socket:
    if way == "tcp":
        return socket.create_connection(("127.0.0.1", meeting.endpoint.port))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(meeting.endpoint.local)
    return sock


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_a_stranger_is_turned_away_and_the_head_still_served(meeting: Meeting, way: str) -> None:
    with knock(meeting, way) as stranger:
        stranger.sendall(b"x" * 32)
        assert stranger.recv(1) == b""  # closed without an answer
    head = dial(meeting.endpoint)
    assert_connected(head, meeting.admitted())
    head.close()


def test_processes_of_one_machine_need_no_tcp(meeting: Meeting) -> None:
    head = dial(meeting.endpoint)
    assert family(head) == family(meeting.admitted()) == socket.AF_UNIX
    head.close()


def test_a_head_elsewhere_does_not_find_the_name_and_comes_by_tcp(meeting: Meeting) -> None:
    head = dial(meeting.endpoint._replace(local=b"\0clusterenv-elsewhere"))
    assert family(head) == family(meeting.admitted()) == socket.AF_INET
    assert_connected(head, meeting.admitted())
    head.close()


_OTHER_USER = """
import os, socket, sys
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(5)
sock.connect(b"\\0" + sys.argv[1].encode())
try:
    sock.sendall(bytes.fromhex(sys.argv[2]))
    print(sock.recv(1))
except ConnectionError:
    print(b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_turned_away_even_with_the_token(meeting: Meeting) -> None:
    at = meeting.endpoint
    assert at.local is not None
    arguments = [at.local[1:].decode(), at.token.hex()]
    answer = subprocess.run(
        [sys.executable, "-c", _OTHER_USER, *arguments], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "b''\n"
    head = dial(at)
    assert_connected(head, meeting.admitted())
    head.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_name_that_another_user_took_is_not_trusted() -> None:
    listener = Listener("127.0.0.1", local=False)
    name = f"clusterenv-taken-{os.getpid()}"
    taker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, socket, sys\n"
            "os.setuid(65534)\n"
            "sock = socket.socket(socket.AF_UNIX)\n"
            f"sock.bind(b'\\0{name}')\n"
            "sock.listen()\n"
            "print('listening', flush=True)\n"
            "print(sock.accept()[0].recv(1))\n",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert taker.stdout is not None
    assert taker.stdout.readline() == "listening\n"
    meeting = Meeting(listener, 10)
    head = dial(listener.endpoint._replace(local=b"\0" + name.encode()))
    assert family(meeting.admitted()) == socket.AF_INET
    assert taker.communicate()[0] == "b''\n"  # it was told nothing
    head.close()
    meeting.close()


def test_a_closed_listener_ends_the_wait_at_once(meeting: Meeting) -> None:
    time.sleep(0.1)
    began = time.monotonic()
    meeting.close()
    assert time.monotonic() - began < 2
    assert "the listener was closed" in str(meeting.error)


def test_a_client_with_another_certificate_is_refused() -> None:
    ours, theirs = Security.temporary(), Security.temporary()
    server = ours.get_listen_args("worker")["ssl_context"]
    meeting = Meeting(Listener("127.0.0.1", server, local=False), 1.5)
    context = theirs.get_connection_args("client")["ssl_context"]
    with pytest.raises((OSError, ConnectionClosed)):
        BlockingConnection(connect(meeting.endpoint, context, 5)).recv_header()
    meeting.join()
    meeting.close()
    assert "did not connect within 1.5 s" in str(meeting.error)


def test_ports_in_the_wrong_order_are_named() -> None:
    with pytest.raises(ConfigError, match=r"channel.ports is \[9100, 9000\]"):
        Listener("127.0.0.1", ports=(9100, 9000))


def test_ports_can_be_restricted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="no free port for a connection"):
            Listener("127.0.0.1", ports=(port, port))
    listener = Listener("127.0.0.1", ports=(port, port))
    assert listener.endpoint.port == port
    listener.close()
