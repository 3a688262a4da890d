"""Whole buckets over sockets of their own: they are what was published, or the service is asked, or the error says who."""

from __future__ import annotations

import contextlib
import queue
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tcp_ends import in_thread, numbers, tcp

from asyncflow_sdk.errors import DeadlineExceeded, DigestMismatch, ServerLost, VersionGone, WireError
from asyncflow_sdk.interfaces.weights import Host
from asyncflow_sdk.testing.ends import Ends
from asyncflow_sdk.weights.bulk import BulkServer, BulkWhere, Channel, _open
from asyncflow_sdk.weights.tcp import TcpTransport
from asyncflow_sdk.weights.tcp_messages import TcpWhere

MODEL = 9 << 20


@pytest.fixture(params=[False, True], ids=["socket file", "insecure tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with tcp(insecure=request.param) as ends:
        yield ends


def place_of(where: bytes) -> TcpWhere:
    return msgspec.msgpack.decode(where, type=TcpWhere)


def elsewhere(where: bytes, **changes: Any) -> bytes:
    """The same version, with another place of its bulk."""
    place = place_of(where)
    assert place.bulk is not None
    return msgspec.msgpack.encode(msgspec.structs.replace(place, bulk=msgspec.structs.replace(place.bulk, **changes)))


def counted(ends: Ends) -> list[int]:
    """How many requests for buckets come to the service, in a list of one."""
    count, request = [0], ends.sender.request

    def counting(*arguments: Any) -> None:
        count[0] += 1
        request(*arguments)

    ends.sender.request = counting
    return count


def test_a_whole_version_needs_no_message(ends: Ends) -> None:
    messages = counted(ends)
    sent = ends.publish(1, {"w": numbers(0, MODEL), "b": numbers(1, 70)})
    fetched = ends.fetch(ends.receiver(), sent)
    sent.check(fetched)
    assert (fetched.encoding, fetched.moved) == ("full", sent.manifest.nbytes)
    assert messages == [0]


def test_what_differs_comes_in_messages(ends: Ends) -> None:
    weights = {"w": numbers(0, MODEL)}
    receiver = ends.receiver()
    base = ends.fetch(receiver, ends.publish(1, weights))
    messages = counted(ends)
    weights["w"][::9000] ^= 1
    sent = ends.publish(2, weights)
    ends.keep(1, 2)
    fetched = ends.fetch(receiver, sent, base=base)
    sent.check(fetched)
    assert fetched.encoding == "delta"
    assert messages[0] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "127.0.0.1", "port": 1},
        {"host": "127.0.0.1", "port": 1 << 40},
        {"host": "no.such.host"},
        {"host": "\0"},
        {"host": "/\0"},
        {"host": "/no/such/file"},
        {"host": "/" + 200 * "x"},
    ],
)
def test_where_it_cannot_be_reached_the_service_is_asked(ends: Ends, changes: dict[str, Any]) -> None:
    messages = counted(ends)
    sent = ends.publish(1, {"w": numbers(0, MODEL)})
    sent.check(ends.fetch(ends.receiver(), sent, where=elsewhere(sent.where, **changes)))
    assert messages[0] > 0


def test_who_does_not_know_the_token_is_cut_off(ends: Ends) -> None:
    sent = ends.publish(1, {"w": numbers(0, MODEL)})
    with pytest.raises(ServerLost, match=r"version 1 from its publisher at tcp://127\.0\.0\.1:\d+: its connection"):
        ends.fetch(ends.receiver(), sent, where=elsewhere(sent.where, token=bytes(32)))


def test_a_version_that_is_gone_is_told_by_the_service(ends: Ends) -> None:
    sent = ends.publish(1, {"w": numbers(0, MODEL)})
    ends.publish(2, {"w": numbers(1, MODEL)})
    ends.keep(2)
    with pytest.raises(VersionGone, match="version 1 is no longer kept by its publisher"):
        ends.fetch(ends.receiver(), sent)


def test_a_byte_that_changed_on_its_way_is_found(ends: Ends) -> None:
    sent = ends.publish(1, {"w": numbers(0, MODEL), "late": numbers(1, 1 << 20)})
    whole = ends.sender._whole

    def flipped(*arguments: Any) -> list[Any]:
        found = [np.array(each) for each in whole(*arguments)]
        found[-1][-1] ^= 1
        return found

    ends.sender._bulk._find = flipped
    with pytest.raises(DigestMismatch, match=r"version 1: bucket \d+ of chunk \d .*holds .*(w|late)"):
        ends.fetch(ends.receiver(), sent)


@pytest.mark.parametrize("options", [{}, {"listen": "tcp://0.0.0.0:0"}])
def test_with_keys_it_is_a_file_that_the_user_alone_reaches(options: dict[str, Any]) -> None:
    sender = TcpTransport(**options).sender(Host(directory=None, name="far", address="127.0.0.1"))
    try:
        path = Path(sender._bulk.where.host)
        assert path.is_socket()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    finally:
        sender.close()
    assert not path.parent.exists()


def test_a_stranger_gets_nothing(ends: Ends) -> None:
    sent = ends.publish(1, {"w": numbers(0, 1 << 20)})
    bulk = place_of(sent.where).bulk
    assert bulk is not None
    for said in (b"", b"x" * 32, b"\0" * 100_000):
        with _open(bulk, 10) as connection:
            with contextlib.suppress(OSError):  # it is cut off in the middle of its words, or after them
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    sent.check(ends.fetch(ends.receiver(), sent))


class Silent:
    """A server that says how much will come, sends half of it, and then nothing."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._taken: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()
        self.where = BulkWhere("127.0.0.1", self._listener.getsockname()[1], bytes(32))

    def taken(self) -> socket.socket:
        """A connection, once what comes of the answer was sent through it: whoever asked may not have looked yet."""
        return self._taken.get(timeout=60)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        while not self._taken.empty():
            self._taken.get().close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):  # whoever asked may have gone already: its deadline passed
                connection.sendall((1000).to_bytes(8, "little") + bytes(500))
            self._taken.put(connection)


@pytest.fixture
def silent() -> Iterator[Silent]:
    silent = Silent()
    yield silent
    silent.close()


def read(channel: Channel, timeout_s: float) -> bool:
    views = [memoryview(bytearray(1000))]
    return channel.read(1, "00" * 16, 0, views, time.monotonic() + timeout_s, lambda number, got: None)


def test_silence_ends_at_the_deadline(silent: Silent) -> None:
    channel = Channel(silent.where)
    with pytest.raises(DeadlineExceeded):
        read(channel, 0.2)
    assert channel._socket is None  # what came of that answer is in nobody's way


def test_an_end_in_the_middle_is_told(silent: Silent) -> None:
    ended = in_thread(read, Channel(silent.where), 60.0)
    with silent.taken() as connection:
        connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ServerLost, match="its connection for buckets ended"):
            ended()


def test_an_interrupt_ends_a_read_and_every_later_one(silent: Silent) -> None:
    channel = Channel(silent.where)
    ended = in_thread(read, channel, 60.0)
    with silent.taken():
        channel.interrupt()
        with pytest.raises(WireError, match="interrupted"):
            ended()
    with pytest.raises(WireError, match="interrupted"):
        read(channel, 60.0)


def test_closing_ends_its_threads_and_connections() -> None:
    before = threading.enumerate()
    server = BulkServer("127.0.0.1", lambda *arguments: [np.zeros(1000, np.uint8)], lambda *_: (0, -2))
    channels = [Channel(server.where) for _ in range(3)]
    assert all(read(channel, 30.0) for channel in channels)
    own = [each for each in threading.enumerate() if each.name.startswith("asyncflow-bulk") and each not in before]
    assert len(own) == 4
    server.close()
    server.close()
    for channel in channels:
        with pytest.raises(ServerLost):
            read(channel, 30.0)
        assert not read(channel, 30.0)  # nobody listens any more
    for thread in own:
        thread.join(60)
        assert not thread.is_alive()
