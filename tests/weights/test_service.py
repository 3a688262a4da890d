"""Calls between the ends of a transport: answers now and later, ends seen and not seen, who is let in."""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from children import Child
from service_children import Shelf, ask, serve
from two_hosts import HERE, two_hosts
from waiting import in_thread

from asyncflow_sdk.errors import AccessDenied, AsyncFlowError, ConfigError, ProtocolError, ServerLost, WireError
from asyncflow_sdk.interfaces.weights import Host
from asyncflow_sdk.weights.service import Service, ServiceClient, Where
from asyncflow_sdk.wire import fresh_keys

HOST = Host(directory=None, name="here")


@contextlib.contextmanager
def a_shelf(host: Host = HOST, **options: Any) -> Iterator[Shelf]:
    shelf = Shelf()
    shelf.service = Service(host, shelf, **options)
    try:
        yield shelf
    finally:
        shelf.service.close()
        shelf.service.close()


@contextlib.contextmanager
def a_client(where: bytes) -> Iterator[ServiceClient]:
    client = ServiceClient(where)
    try:
        yield client
    finally:
        client.close()


def test_an_answer_at_once_and_one_later() -> None:
    with a_shelf() as shelf, a_client(shelf.service.where) as client:
        # given a call that is parked
        late = in_thread(client.call, b"wait", 30.0)
        shelf.until(lambda: shelf.parked)
        # when others are answered meanwhile
        assert client.call(b"ping", 30.0, frames=[b"-", b"pong"]).body == b"ping-pong"
        shelf.service.answer(shelf.parked[0], b"at last")
        # then
        assert late().body == b"at last"


def test_frames_come_as_they_are_and_are_let_go_once_they_arrived() -> None:
    with a_shelf() as shelf, a_client(shelf.service.where) as client:
        # when
        body, frames = client.call(b"get", 30.0)
        # then
        assert body == b"here"
        assert len(frames) == 2
        for frame, sent_one in zip(frames, (shelf.bytes, shelf.bytes[:100]), strict=True):
            assert np.array_equal(np.frombuffer(frame, np.uint8), sent_one)
        del frame, frames, sent_one
        sent, shelf.bytes = weakref.ref(shelf.bytes), np.zeros(1, np.uint8)
        client.call(b"ping", 30.0)  # which says that the answer before has arrived
        client.call(b"ping", 30.0)
        assert sent() is None


def test_what_a_handler_raises_is_raised_by_the_call_and_by_no_other() -> None:
    with a_shelf() as shelf, a_client(shelf.service.where) as client:
        with pytest.raises(ProtocolError, match="failed at this call: KeyError"):
            client.call(b"bad", 30.0)
        assert client.call(b"ping", 30.0).body == b"ping"


def test_a_call_ends_at_its_deadline_and_says_who_did_not_answer_what() -> None:
    with a_shelf() as shelf, a_client(shelf.service.where) as client:
        with pytest.raises(ServerLost, match=rf"bucket 7: {shelf.service.address} gave no answer in"):
            client.call(b"wait", 0.2, "bucket 7")
        assert client.call(b"ping", 30.0).body == b"ping"


def test_a_call_is_interrupted_and_the_client_goes_on() -> None:
    with a_shelf() as shelf, a_client(shelf.service.where) as client:
        late = in_thread(client.call, b"wait", 60.0)
        shelf.until(lambda: shelf.parked)
        # when
        client.interrupt()
        # then
        error = late()
        assert isinstance(error, WireError)
        assert "interrupted" in str(error)
        assert client.call(b"ping", 30.0).body == b"ping"
        # and one that is closed ends its calls
        late = in_thread(client.call, b"wait", 60.0)
        shelf.until(lambda: len(shelf.parked) == 2)
        client.close()
        assert isinstance(late(), ServerLost)


def test_a_client_that_closes_is_gone() -> None:
    with a_shelf() as shelf:
        client = ServiceClient(shelf.service.where)
        client.call(b"ping", 30.0)
        client.close()
        client.close()
        shelf.until(lambda: len(shelf.gone_ones) == 1)


def test_a_client_that_is_killed_is_gone() -> None:
    with a_shelf() as shelf, Child(ask, shelf.service.where.hex(), "wait", 60.0) as child:
        assert child.hear() == "ready"
        child.say("ask")
        shelf.until(lambda: shelf.parked)
        # when
        child.kill()
        # then
        shelf.until(lambda: len(shelf.gone_ones) == 1)
        shelf.service.answer(shelf.parked[0], b"to nobody")


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_service_that_is_killed_is_lost_at_once(when: str) -> None:
    with Child(serve, "127.0.0.1", False) as server:
        where = bytes.fromhex(server.hear())
        with a_client(where) as client:
            if when == "before":
                server.kill()
            else:
                assert client.call(b"ping", 30.0).body == b"ping"
                threading.Timer(0.2, server.kill).start()
            # when, with a deadline past the limit of a test
            with pytest.raises(ServerLost, match=f"bucket 7: the server at {client.address} is gone: its process"):
                client.call(b"wait", 3600.0, "bucket 7")


@pytest.mark.parametrize("options", [{}, {"listen": "tcp://0.0.0.0:0"}])
def test_a_key_is_needed_unless_the_service_is_insecure(options: dict[str, Any]) -> None:
    host = Host(directory=None, name="here", address="127.0.0.1")
    with a_shelf(host, **options) as shelf:
        found = msgspec.msgpack.decode(shelf.service.where, type=Where)
        assert found.key is not None
        assert found.key.secret not in repr(found)
        with a_client(shelf.service.where) as client:
            assert client.call(b"ping", 30.0).body == b"ping"
        # when somebody comes without it, or with another
        for key in (None, fresh_keys()[1], msgspec.structs.replace(found.key, public=fresh_keys()[1].public)):
            other = msgspec.msgpack.encode(msgspec.structs.replace(found, key=key))
            with a_client(other) as client, pytest.raises((AccessDenied, ServerLost)):
                client.call(b"ping", 2.0)
    with a_shelf(host, insecure=True, **options) as shelf, a_client(shelf.service.where) as client:
        assert msgspec.msgpack.decode(shelf.service.where, type=Where).key is None
        assert client.call(b"ping", 30.0).body == b"ping"


@pytest.mark.parametrize("insecure", [False, True])
def test_two_hosts(insecure: bool) -> None:
    with two_hosts() as hosts, Child(serve, HERE, insecure, within=hosts.here) as server:
        where = server.hear()
        assert HERE.encode() in bytes.fromhex(where)
        with Child(ask, where, "get", 30.0, within=hosts.there) as client:
            client.hear()
            client.say("ask")
            assert client.hear() == ["here", [1 << 20, 100]]
        # and one that cannot be reached any more
        with Child(ask, where, "wait", 2.0, within=hosts.there) as client:
            client.hear()
            hosts.link.say({"cut": True})
            hosts.link.hear()
            client.say("ask")
            name, message = client.hear()
        assert name == "ServerLost"
        assert f"a test: tcp://{HERE}:" in message


@pytest.mark.parametrize("where", [b"", b"\xc1", b"\x95", msgspec.msgpack.encode([1, 2]), b"\x91" * 100_000])
def test_a_place_that_is_none(where: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not say where a service is"):
        ServiceClient(where)


@pytest.mark.parametrize(
    "address", ["ipc:///tmp/x", "inproc://x", "tcp://", "tcp://nowhere", "tcp://10.0.0.1:99999999", "tcp://1.2.3.4:5"]
)
def test_an_address_that_is_none(address: str) -> None:
    where = msgspec.msgpack.encode(Where(address, None, 0, ""))
    with pytest.raises(AsyncFlowError):
        ServiceClient(where).call(b"", 0.2)


def test_an_address_that_cannot_be_listened_at() -> None:
    with (
        pytest.raises(ConfigError, match="cannot listen"),
        a_shelf(Host(directory=None, name="x", address="203.0.113.7")),
    ):
        pass
