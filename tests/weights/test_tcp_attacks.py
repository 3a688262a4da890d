"""What comes over tcp is verified before it is used; a silent peer, a stranger or garbage ends nobody but itself."""

import contextlib
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from flaky_proxy import WHOLE, FlakyProxy
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_ends import address_of, numbers, tcp, with_service
from waiting import in_thread

from asyncflow_sdk.errors import (
    AccessDenied,
    AsyncFlowError,
    DeadlineExceeded,
    ServerLost,
    VersionGone,
    WireError,
)
from asyncflow_sdk.testing.transport_harness import Sent, TransportHarness
from asyncflow_sdk.wire import Client, Handler, RouterSockets, Server, generate_keys

pytestmark = pytest.mark.fast
NBYTES = 9 << 20


@contextlib.contextmanager
def a_version(nbytes: int = NBYTES, **options: Any) -> Iterator[tuple[TransportHarness, Sent]]:
    with tcp(**options) as ends:
        sent = ends.publish(3, {"w": numbers(0, nbytes)})
        ends.keep(3)
        yield ends, sent


# ---- who is let in


@pytest.mark.parametrize("options", [{}, {"listen": "tcp://0.0.0.0:0"}])
def test_a_key_is_needed_unless_the_publisher_is_insecure(options: dict[str, Any]) -> None:
    with a_version(1 << 16, **options) as (ends, sent):
        sent.check(ends.fetch(ends.receiver(), sent, where=with_service(sent.where)))
        for key in (None, generate_keys()[1]):
            with pytest.raises((AccessDenied, ServerLost, DeadlineExceeded)):
                ends.fetch(ends.receiver(), sent, where=with_service(sent.where, key=key), timeout_s=1.0)
    with a_version(1 << 16, insecure=True) as (ends, sent):
        sent.check(ends.fetch(ends.receiver(), sent, where=with_service(sent.where)))


# ---- places


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "ipc:///tmp/x", "tcp://nowhere.invalid:80", "tcp://:0"])
def test_a_place_where_nobody_is(address: str) -> None:
    with a_version(1 << 16) as (ends, sent), pytest.raises(AsyncFlowError):
        ends.fetch(ends.receiver(), sent, where=with_service(sent.where, address=address, pid=0), timeout_s=0.3)


def test_a_publisher_that_goes_on_at_another_place_is_found_there() -> None:
    with a_version() as (ends, sent):
        receiver = ends.receiver()
        base = ends.fetch(receiver, sent)
        ends.trainer("close", ends.sender.close)
        with pytest.raises(DeadlineExceeded, match=f"version 3 from its publisher at {address_of(sent.where)}"):
            ends.fetch(receiver, sent, timeout_s=0.5)
        ends.sender = ends.trainer("another", ends.another_sender)
        new = ends.publish(4, {"w": numbers(1, NBYTES)})
        new.check(ends.fetch(receiver, new, base=base))


# ---- silence and damage on the way


class Silence:
    """A fetch through a proxy that holds up its connections."""

    def __init__(self, ends: TransportHarness, sent: Sent, proxy: FlakyProxy) -> None:
        self.ends, self.sent, self.proxy, self.receiver = ends, sent, proxy, ends.receiver()
        self.where = with_service(sent.where, address=proxy.address)

    def fetching(self, timeout_s: float = 3600.0) -> Any:
        return in_thread(self.receiver.fetch, self.sent.manifest, self.where, timeout_s=timeout_s)

    def begin(self) -> Any:
        late = self.fetching()
        assert self.proxy.held.wait(60)
        return late


@pytest.fixture
def silence() -> Iterator[Silence]:
    with (
        a_version(insecure=True) as (ends, sent),
        FlakyProxy(int(address_of(sent.where).rpartition(":")[2]), pieces=WHOLE) as proxy,
    ):
        proxy.most = 1 << 20
        yield Silence(ends, sent, proxy)


def test_silence_ends_a_fetch_at_its_deadline(silence: Silence) -> None:
    timeout_s = 0.1
    while not silence.proxy.held.is_set():  # on a busy machine nothing may have come until then
        late = silence.fetching(timeout_s := 10 * timeout_s)()
    assert isinstance(late, DeadlineExceeded), late
    assert "version 3 from its publisher at tcp://127.0.0.1:" in str(late)
    assert "buckets are" in str(late)
    silence.sent.check(silence.ends.fetch(silence.receiver, silence.sent))


def test_a_fetch_is_interrupted_and_the_next_one_goes_on(silence: Silence) -> None:
    late = silence.begin()
    silence.receiver.interrupt()
    error = late()
    assert isinstance(error, WireError), error
    assert "the fetch of version 3" in str(error)
    assert "was interrupted" in str(error)
    silence.sent.check(silence.ends.fetch(silence.receiver, silence.sent))


def test_a_close_ends_a_fetch_under_way_in_another_thread(silence: Silence) -> None:
    late = silence.begin()
    silence.receiver.close()
    assert isinstance(late(), WireError)


def test_a_connection_that_ends_in_the_middle_is_an_error_or_made_again(silence: Silence) -> None:
    late = silence.begin()
    silence.proxy.resume()
    silence.proxy.cut()
    outcome = late()
    if isinstance(outcome, Exception):
        assert isinstance(outcome, ServerLost), outcome
    else:
        silence.sent.check(outcome)
    silence.sent.check(silence.ends.fetch(silence.receiver, silence.sent))


# ---- requests that are none


@contextlib.contextmanager
def asking(where: bytes) -> Iterator[Any]:
    """A call that sends a request to the service of an insecure publisher; returns the name of the error, or ""."""
    client = Client(address_of(where), None, insecure=True, bulk=True)
    client.max_bytes = 1 << 20

    def ask(body: bytes) -> str:
        reply = client.exchange(msgspec.msgpack.encode([body]), 60.0, ())
        return str(msgspec.msgpack.decode(reply.body)[1])

    try:
        yield ask
    finally:
        client.close()


def test_requests_for_what_is_not_there_and_requests_that_are_none() -> None:
    random = np.random.default_rng(0)
    with a_version(1 << 20, insecure=True) as (ends, sent), asking(sent.where) as ask:
        root, count = sent.manifest.root, len(list(sent.manifest.buckets()))
        for error, get in (
            ("ProtocolError", [3, root, count, 1]), ("ProtocolError", [3, root, -1, 1]), ("ProtocolError", [3, root, -1, 2]),
            ("ProtocolError", [3, root, 0, 0]), ("ProtocolError", [3, root, 0, -1]), ("ProtocolError", [3, root, 0, count + 1]),
            ("ProtocolError", [3, root, 1 << 62, 1 << 62]), ("VersionGone", [4, root, 0, 1]), ("VersionGone", [-1, root, 0, 1]),
            ("VersionGone", [3, "another", 0, 1]), ("", [3, root, 0, 1, 3, root]), ("", [3, root, 0, 1, 99, "x" * 9999]),
        ):  # fmt: skip
            assert ask(msgspec.msgpack.encode(get)) == error, get
        good = msgspec.msgpack.encode([3, root, 0, 1])
        noise = [random.bytes(int(n)) for n in random.integers(0, 200, 30)]
        for body in (*noise, *(good[:n] for n in range(len(good))), b"\x91" * 100_000, b"\x80"):
            assert ask(body) == "ProtocolError"
        with socket.create_connection(("127.0.0.1", int(address_of(sent.where).rpartition(":")[2])), 60) as stranger:
            stranger.sendall(random.bytes(4096))
        # and after all of it, everybody is served
        sent.check(ends.fetch(ends.receiver(), sent))


# ---- a publisher that is none


class Liar(Handler):
    """Answers each request for buckets with ``kinds`` and ``frames``."""

    def __init__(self, kinds: bytes, frames: list[bytes]) -> None:
        self.say(kinds, frames)
        self._server = Server(RouterSockets(["tcp://127.0.0.1:0"], insecure=True, bulk=True), self, 1 << 20)
        self.address = self._server.addresses[0]
        self._server.start()

    def say(self, kinds: bytes, frames: list[bytes]) -> None:
        said = [msgspec.msgpack.encode([kinds, [len(frame) for frame in frames]]), "", ""]
        self._said, self._frames = msgspec.msgpack.encode(said), frames

    def request(self, session: str, ticket: int, body: bytes, payload: Any) -> None:
        asks = msgspec.msgpack.decode(body)[0] is not None
        plain = msgspec.msgpack.encode([b"", "", ""])
        self._server.answer(
            ticket, self._said if asks else plain, make=(lambda: (self._said, self._frames)) if asks else None
        )

    def close(self) -> None:
        self._server.stop()


BUCKET = b"x" * (1 << 16)


@pytest.mark.parametrize(
    ("kinds", "frames", "error"),
    [
        (b"", [], "ProtocolError"), (b"\0", [], "ProtocolError"), (b"\0" * 300, [BUCKET] * 300, "ProtocolError"),
        (b"\0", [BUCKET] * 4, "ProtocolError"), (b"\0", [BUCKET[:-1]], "ProtocolError"), (b"\0", [b""], "ProtocolError"),
        (b"\7", [BUCKET], "ProtocolError"), (b"\1", [b"\1\2" + b"\xff" * 100], "ProtocolError"),
        (b"\0", [bytes(64 << 20)], "ProtocolError"), (b"\0", [BUCKET], "DigestMismatch"),
    ],
)  # fmt: skip
def test_answers_that_are_none(kinds: bytes, frames: list[bytes], error: str) -> None:
    liar = Liar(kinds, frames)
    try:
        with a_version(1 << 20, insecure=True) as (ends, sent):
            receiver = ends.receiver()
            with pytest.raises(AsyncFlowError) as caught:
                ends.fetch(receiver, sent, where=with_service(sent.where, address=liar.address, pid=0))
            assert type(caught.value).__name__ == error, caught.value
            # then the right one is fetched by the same receiver
            sent.check(ends.fetch(receiver, sent))
    finally:
        liar.close()


def test_a_version_that_is_gone_is_an_error_of_the_service() -> None:
    with a_version() as (ends, sent):
        ends.publish(4, {"w": numbers(1, NBYTES)})
        ends.keep(4)
        with pytest.raises(VersionGone, match="version 3 is no longer kept by its publisher"):
            ends.fetch(ends.receiver(), sent)


# ---- deltas that were made to harm

ELEMENTS = 32_000


class Deltas:
    """A replica on version 1, version 2, which differs in a few of its numbers, and a liar who sends the delta between them."""

    def __init__(self, ends: TransportHarness, liar: Liar) -> None:
        weights = np.random.default_rng(1).integers(0, 1 << 16, ELEMENTS, np.uint16)
        self._ends, self._liar, self._receiver = ends, liar, ends.receiver()
        old = ends.publish(1, {"w": weights.view(np.float16)})
        self.base = ends.fetch(self._receiver, old)
        weights[::50] += np.uint16(1)
        self._new = ends.publish(2, {"w": weights.view(np.float16)})
        ends.keep(1, 2)
        get = [2, self._new.manifest.root, 0, 1, 1, old.manifest.root]
        client = Client(address_of(old.where), None, insecure=True, bulk=True)
        client.max_bytes = 1 << 20
        asked = msgspec.msgpack.encode([msgspec.msgpack.encode(get)])
        self.code = bytes(client.exchange(asked, 60.0, ()).payload)
        client.close()

    def fetch(self, code: bytes) -> Exception | None:
        """The error of a fetch for which this code is sent; without one it has the right bytes."""
        self._liar.say(b"\1", [code])
        where = with_service(self._new.where, address=self._liar.address, pid=0)
        try:
            fetched = self._ends.fetch(self._receiver, self._new, where=where, base=self.base)
        except AsyncFlowError as error:
            return error
        self._new.check(fetched)
        return None


@pytest.fixture(scope="module")
def deltas() -> Iterator[Deltas]:
    liar = Liar(b"", [])
    with tcp(insecure=True) as ends:
        yield Deltas(ends, liar)
    liar.close()


def test_the_delta_itself_is_right(deltas: Deltas) -> None:
    assert len(deltas.code) < ELEMENTS // 10
    assert deltas.fetch(deltas.code) is None


@settings(max_examples=40)
@given(data=st.data())
def test_a_delta_that_was_tampered_with_is_never_loaded(deltas: Deltas, data: st.DataObject) -> None:
    bad = bytearray(deltas.code)
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, min(len(bad) - 1, 100)))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(bad)))
    for broken in (bytes(bad), bytes(bad[:cut]), data.draw(st.binary(max_size=400))):
        deltas.fetch(broken)
    assert deltas.fetch(deltas.code) is None


def packed(stream: bytes) -> bytes:
    made = zstandard.ZstdCompressor().compress(stream)
    return struct.pack("<I", len(made)) + made


BOMB = packed(b"\0" * (256 << 20))


@pytest.mark.parametrize(
    ("count", "streams"),
    [
        (1000, BOMB * 3),
        (0, BOMB),
        (1000, struct.pack("<I", 0xFFFFFFFF) + b"x"),
        (2, packed(b"\xff" * 2) + packed(b"\0" * 2) * 2),  # two that are passed over and no word
        (1, packed(b"\xff" * 8 + b"\xfe") + packed(b"\0") * 2),  # beyond the end
    ],
)
def test_a_delta_made_to_harm_takes_no_memory(count: int, streams: bytes, deltas: Deltas) -> None:
    code = struct.pack("<BBxxII", 1, 2, 2 * ELEMENTS, count) + streams
    tracemalloc.start()
    try:
        assert deltas.fetch(code) is not None
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert deltas.fetch(deltas.code) is None
