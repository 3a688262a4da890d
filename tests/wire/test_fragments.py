"""Large requests and answers travel in fragments: whatever is lost, each arrives once and whole, and little is sent twice."""

import contextlib
import itertools
import random
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire_handlers import Parrot

from asyncflow_sdk.errors import ProtocolError
from asyncflow_sdk.wire import Server, exchange, fragments, server, transfers
from asyncflow_sdk.wire.envelope import decode_request, decode_response
from asyncflow_sdk.wire.exchange import Exchange
from asyncflow_sdk.wire.fragments import Fragments, Reassembly, end_of
from asyncflow_sdk.wire.numbering import Numbering

SIZE, WINDOW = 16, 64


@pytest.fixture(autouse=True, scope="module")
def small_fragments() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (exchange, fragments, server, transfers):
            for name, value in (("FRAGMENT_BYTES", SIZE), ("WINDOW_BYTES", WINDOW)):
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        yield


@given(sizes=st.tuples(st.integers(1, 100), st.integers(0, 100)), cuts=st.lists(st.integers(0, 100)))
def test_a_message_is_cut_and_put_together_again(sizes: tuple[int, int], cuts: list[int]) -> None:
    # given a payload of some buffers
    numbers = random.Random(sum(sizes))
    body, payload = numbers.randbytes(sizes[0]), numbers.randbytes(sizes[1])
    ends = sorted({0, *(min(cut, sizes[1]) for cut in cuts), sizes[1]})
    message = Fragments(body, [payload[a:b] for a, b in itertools.pairwise(ends)])
    assert message.sizes == sizes
    starts, start = [], 0
    while start < sum(sizes):
        starts.append(start)
        start = end_of(start, sizes)
    # when its fragments come in any order, and some twice
    got, there = Reassembly(sizes), bytearray(sizes[1])
    order = starts + starts[::2]
    numbers.shuffle(order)
    for start in order:
        data = bytes(message.read(start, end_of(start, sizes)))
        if got.add(start, data):
            there[start - sizes[0] : start - sizes[0] + len(data)] = data
    # then
    assert got.whole
    assert (got.body, bytes(there)) == (body, payload)


@pytest.mark.parametrize("start", [-16, 1, 15, 20, 32, 36, 1000])
def test_there_is_no_fragment_anywhere_else(start: int) -> None:
    with pytest.raises(ProtocolError, match="no fragment of a message of"):
        end_of(start, (17, 19))
    with pytest.raises(ProtocolError, match="a fragment of 3 bytes, where 16 are expected"):
        Reassembly((17, 19)).add(0, b"abc")


class Link:
    """A client's exchange and a server, and what is under way between them, in order. ``cut`` loses all of it."""

    def __init__(self, body: bytes, payload: bytes, answer: tuple[bytes, bytes]) -> None:
        self.parrot = Parrot()
        self.parrot.request = self._request  # type: ignore[method-assign]
        self.parrot.make = lambda _: (answer[0], [answer[1]])  # type: ignore[method-assign]
        self.server = self.parrot.server = Server([], self.parrot)
        self.server._post = self._post  # type: ignore[method-assign]
        self.numbering = Numbering("s")
        self.there: deque[Any] = deque()
        self.back: deque[Any] = deque()
        self.carried_out: list[tuple[bytes, bytes]] = []
        self.sent = {"there": 0, "back": 0}
        self.route = 0
        self.server._sessions["s"] = server.Remembered()
        self.exchange = Exchange(self.numbering, self.numbering.begin(), body, [payload])
        self.send(self.exchange.begin())

    def _request(self, session: str, ticket: int, body: bytes, payload: Any) -> None:
        self.carried_out.append((body, b"" if payload is None else payload.memory.tobytes()))
        self.server.answer(ticket, b"", made=True)

    def _post(self, route: Any, envelope: bytes, data: Any = None) -> None:
        self.sent["back"] += 0 if data is None else len(data)
        self.back.append((route, envelope, None if data is None else bytes(data)))

    def send(self, messages: Any) -> None:
        for envelope, data in messages:
            self.sent["there"] += 0 if data is None else len(data)
            self.there.append((envelope, data))

    def deliver(self) -> None:
        if self.there:
            envelope, data = self.there.popleft()
            with contextlib.suppress(ProtocolError):
                self.server._accept(self.route, decode_request(envelope), data)  # type: ignore[arg-type]
            self.server._flush()

    def bring_back(self) -> None:
        if self.back:
            route, envelope, data = self.back.popleft()
            if route == self.route and self.exchange.reply is None:
                self.send(self.exchange.hear(decode_response(envelope), data))

    def cut(self) -> None:
        self.there.clear()
        self.back.clear()
        self.route += 1

    def silence(self) -> None:
        if self.exchange.reply is None:
            self.send(self.exchange.again())

    def release(self) -> None:
        """What a server does after a long silence."""
        self.server._uploads.sweep(time.monotonic() + 1000.0)
        for session in self.server._sessions.values():
            session.release_downloads(time.monotonic() + 1000.0)

    def settle(self) -> None:
        for _ in range(2000):
            while (self.there or self.back) and self.exchange.reply is None:
                self.deliver()
                self.bring_back()
            if self.exchange.reply is not None:
                return
            self.silence()
        raise AssertionError("no end of it")


MESSAGES = st.tuples(st.integers(1, 60), st.integers(0, 400)).map(
    lambda sizes: (random.Random(sizes[0]).randbytes(sizes[0]), random.Random(sizes[1]).randbytes(sizes[1]))
)
STEPS = st.lists(st.sampled_from(["deliver"] * 6 + ["bring_back"] * 6 + ["cut", "silence", "release"]), max_size=300)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(request=MESSAGES, answer=MESSAGES, steps=STEPS)
def test_whatever_is_lost_a_request_is_carried_out_once_and_both_ways_arrive_whole(
    request: tuple[bytes, bytes], answer: tuple[bytes, bytes], steps: list[str]
) -> None:
    # given
    link = Link(*request, answer)
    # when messages are delivered and lost in any order, and the server gives up what it waits for
    for step in steps:
        getattr(link, step)()
    link.settle()
    # then
    reply = link.exchange.reply
    assert reply is not None
    assert (reply.body, b"" if reply.payload is None else reply.payload.tobytes()) == answer
    assert link.carried_out == [request]
    link.numbering.answered(1)
    link.server._accept(0, decode_request(link.numbering.frame(0, b"")), None)  # type: ignore[arg-type]
    assert len(link.server._uploads) == link.server._uploads.nbytes == 0
    assert not link.server._sessions["s"].downloads
    link.server.stop()


def test_a_silence_costs_a_question_and_a_cut_connection_what_was_under_way() -> None:
    # given a large request and a large answer
    request, answer = (b"b", bytes(100 * SIZE)), (b"a", bytes(100 * SIZE))
    link = Link(*request, answer)
    # when all is late, again and again
    for number in range(1000):
        if not number % 3:
            link.silence()
        link.deliver() if number % 2 else link.bring_back()
    link.settle()
    # then nothing was sent twice
    assert link.sent == {"there": len(b"".join(request)), "back": len(b"".join(answer))}
    link.server.stop()
    # and when connections are cut
    link, cuts = Link(*request, answer), 0
    while link.exchange.reply is None:
        for _ in range(40):
            link.deliver()
            link.bring_back()
        if link.exchange.reply is None:
            link.cut()
            cuts += 1
            link.silence()
    # then a window for each is the most
    assert cuts > 3
    assert sum(link.sent.values()) <= len(b"".join(request + answer)) + cuts * (WINDOW + SIZE)
    link.server.stop()
