"""What is said over tcp is believed by neither end before it was looked at; nobody waits for ever for a silent one."""

import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tcp_ends import in_thread, numbers, service_of, tcp, through
from waiting import until

from asyncflow_sdk.errors import (
    AsyncFlowError,
    DeadlineExceeded,
    DigestMismatch,
    ProtocolError,
    VersionGone,
    WireError,
)
from asyncflow_sdk.interfaces.weights import Host, WeightReceiver
from asyncflow_sdk.testing.ends import Ends, Sent
from asyncflow_sdk.weights.service import Service, ServiceClient
from asyncflow_sdk.weights.tcp_messages import Get, Got, TcpWhere, encode


@contextlib.contextmanager
def a_version() -> Iterator[tuple[Ends, Sent]]:
    with tcp() as ends:
        sent = ends.publish(3, {"w": numbers(0, 1 << 20)})
        ends.keep(3)
        yield ends, sent


@contextlib.contextmanager
def a_caller(where: bytes) -> Iterator[ServiceClient]:
    client = ServiceClient(msgspec.msgpack.decode(where, type=TcpWhere).service)
    try:
        yield client
    finally:
        client.close()


def ask(sent: Sent, **changes: Any) -> bytes:
    return encode(msgspec.structs.replace(Get(3, sent.manifest.root, 0, 1), **changes))


def test_requests_that_ask_for_what_is_not_there() -> None:
    with a_version() as (ends, sent), a_caller(sent.where) as caller:
        count = len(list(sent.manifest.buckets()))
        cases: list[tuple[type[Exception], dict[str, Any]]] = [
            (ProtocolError, {"first": count}),
            (ProtocolError, {"first": -1}),
            (ProtocolError, {"first": -1, "count": 2}),
            (ProtocolError, {"count": 0}),
            (ProtocolError, {"count": -1}),
            (ProtocolError, {"count": count + 1}),
            (ProtocolError, {"first": 1 << 62, "count": 1 << 62}),
            (VersionGone, {"version": 4}),
            (VersionGone, {"version": -1}),
            (VersionGone, {"root": "another"}),
        ]
        for error, changes in cases:
            with pytest.raises(error):
                caller.call(ask(sent, **changes), 30.0)
        for base in (
            {"base": 3, "base_root": sent.manifest.root},
            {"base": 3},
            {"base": 99, "base_root": "x" * 9999},
        ):
            body, frames = caller.call(ask(sent, **base), 30.0)
            assert len(msgspec.msgpack.decode(body, type=Got).kinds) == len(frames) == 1
        # and after all of it, everybody is served
        sent.check(ends.fetch(ends.receiver(), sent))


def test_requests_that_are_none() -> None:
    random = np.random.default_rng(0)
    with a_version() as (ends, sent), a_caller(sent.where) as caller:
        good = ask(sent)
        noise = [random.bytes(int(n)) for n in random.integers(0, 200, 50)]
        noise += [good[:n] for n in range(len(good))] + [b"\x91" * 100_000, encode([1, "", "", 1]), encode({})]
        for body in noise:
            with pytest.raises(AsyncFlowError):
                caller.call(body, 30.0)
        with pytest.raises(ProtocolError, match="too large"):
            caller.call(b"x" * (2 << 20), 30.0)
        sent.check(ends.fetch(ends.receiver(), sent))


# ---- a publisher that is none


class Liar:
    """Answers what it is told to."""

    def __init__(self, says: Callable[[Get], tuple[bytes, list[Any]] | None]) -> None:
        self._says = says
        self.asked = 0
        self.service = Service(Host(directory=None, name="liar"), self)

    def request(self, peer: str, ticket: int, body: bytes, frames: Any) -> None:
        self.asked += 1
        said = self._says(msgspec.msgpack.decode(body, type=Get))
        if said is not None:
            self.service.answer(ticket, *said)

    def gone(self, peer: str) -> None:
        pass


@contextlib.contextmanager
def a_liar(says: Any) -> Iterator[tuple[Liar, bytes]]:
    liar = Liar(says)
    try:
        yield liar, encode(TcpWhere(liar.service.where, 3))
    finally:
        liar.service.close()


BUCKET = b"x" * (1 << 16)
BOMB = struct.pack("<BBxxII", 1, 2, 1 << 16, 1000) + b"\xff" * 100


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (lambda get: (b"", []), ProtocolError),
        (lambda get: (b"\xc1", [BUCKET]), ProtocolError),
        (lambda get: (encode(Got(b"")), []), ProtocolError),
        (lambda get: (encode(Got(b"\0")), []), ProtocolError),
        (lambda get: (encode(Got(b"\0" * 300)), [BUCKET] * 300), ProtocolError),
        (lambda get: (encode(Got(b"\0")), [BUCKET] * 4), ProtocolError),
        (lambda get: (encode(Got(b"\0")), [BUCKET[:-1]]), ProtocolError),
        (lambda get: (encode(Got(b"\0")), [b""]), ProtocolError),
        (lambda get: (encode(Got(b"\7")), [BUCKET]), ProtocolError),
        (lambda get: (encode(Got(b"\1")), [BOMB]), ProtocolError),  # a delta nobody asked for
        (lambda get: (encode(Got(b"\0")), [BUCKET]), DigestMismatch),
    ],
)
def test_answers_that_are_none(says: Any, error: type[Exception]) -> None:
    with a_version() as (ends, sent), a_liar(says) as (liar, where):
        receiver = ends.receiver()
        with pytest.raises(error) as caught:
            ends.fetch(receiver, sent, where=where)
        if error is ProtocolError:
            assert f"version 3 from its publisher at {liar.service.address}" in str(caught.value)
        # then the right one is fetched by the same receiver
        sent.check(ends.fetch(receiver, sent))


def test_a_liar_about_deltas_is_asked_for_the_whole_once() -> None:
    def says(get: Get) -> tuple[bytes, list[Any]]:
        return encode(Got(b"\1" * get.count)), [BOMB] * get.count

    with a_version() as (ends, sent), a_liar(says) as (liar, where):
        receiver: Any = ends.receiver()
        base = ends.fetch(receiver, sent)
        weights = sent.chunks[0].copy()
        weights[:: 1 << 15] += np.uint8(1)
        new = ends.publish(4, {"w": weights})
        with pytest.raises(ProtocolError, match="of kind 1 for bucket"):  # in place of the whole one
            ends.fetch(receiver, new, base=base, where=where)
        assert liar.asked <= 3 * 16


def test_an_answer_that_is_too_large_is_not_taken() -> None:
    with a_version() as (ends, sent), a_liar(lambda get: (encode(Got(b"\0")), [bytes(64 << 20)])) as (_, where):
        with pytest.raises(ProtocolError, match="version 3 from its publisher at .*an answer of 6710"):
            ends.fetch(ends.receiver(), sent, where=where, timeout_s=60.0)


def test_a_silent_publisher_ends_a_fetch_at_its_deadline() -> None:
    with a_version() as (ends, sent), a_liar(lambda get: None) as (liar, where):
        receiver = ends.receiver()
        with pytest.raises(DeadlineExceeded) as caught:
            ends.fetch(receiver, sent, where=where, timeout_s=0.3)
        for word in (f"version 3 from its publisher at {liar.service.address}", "0 of 16 buckets"):
            assert word in str(caught.value)
        sent.check(ends.fetch(receiver, sent))


@contextlib.contextmanager
def a_fetch_that_waits() -> Iterator[tuple[Ends, Sent, WeightReceiver, Callable[[], Any]]]:
    """For a publisher that says nothing; with its receiver, and a call that gives what came of it."""
    with a_version() as (ends, sent), a_liar(lambda get: None) as (liar, where):
        receiver = ends.receiver()
        late = in_thread(receiver.fetch, sent.manifest, where, timeout_s=3600.0)
        until(lambda: liar.asked, "it is asked")
        yield ends, sent, receiver, late


def test_a_fetch_is_interrupted_and_the_next_one_goes_on() -> None:
    with a_fetch_that_waits() as (ends, sent, receiver, late):
        # when
        receiver.interrupt()
        # then
        with pytest.raises(WireError, match="the fetch of version 3 .* was interrupted"):
            late()
        sent.check(ends.fetch(receiver, sent))


def test_a_close_ends_a_fetch_under_way_in_another_thread() -> None:
    with a_fetch_that_waits() as (_, _, receiver, late):
        # when
        receiver.close()
        # then
        with pytest.raises(WireError, match="the fetch of version 3 .* was interrupted"):
            late()


def test_a_publisher_that_goes_on_at_another_place_is_found_there() -> None:
    with a_version() as (ends, sent):
        receiver = ends.receiver()
        base = ends.fetch(receiver, sent)
        ends.trainer("close", ends.sender.close)
        with pytest.raises(
            DeadlineExceeded, match=f"version 3 from its publisher at {service_of(sent.where).address}"
        ):
            ends.fetch(receiver, sent, timeout_s=0.5)
        ends.sender = ends.trainer("another", ends.another_sender)
        new = ends.publish(4, {"w": numbers(1, 1 << 20)})
        new.check(ends.fetch(receiver, new, base=base))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "ipc:///tmp/x", "tcp://nowhere.invalid:80", "tcp://:0"])
def test_a_place_where_nobody_is(address: str) -> None:
    with a_version() as (ends, sent), pytest.raises(AsyncFlowError):
        ends.fetch(ends.receiver(), sent, where=through(sent.where, address, pid=0), timeout_s=0.3)
