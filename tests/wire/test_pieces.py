"""Large requests and answers in pieces: each arrives once and complete over lossy connections, with few repeats."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from flaky_proxy import FlakyProxy
from waiting import in_thread, until
from wire_handlers import MemorySink, Parrot, Raw, client_of, frame, serving

from asyncflow_sdk.wire import Client, pieces

pytestmark = pytest.mark.fast
MB = 1 << 20


@pytest.fixture
def parrot() -> Iterator[Parrot]:
    with serving("tcp://127.0.0.1:0", insecure=True) as parrot:
        yield parrot


def port_of(parrot: Parrot) -> int:
    return int(parrot.server.addresses[0].rsplit(":", 1)[1])


def joined(address: str, resend_s: float = 0.1) -> Client:
    """A client whose session the server knows, as large requests need."""
    client = client_of(address, resend_s)
    client.request(b"join", 60)
    return client


@pytest.mark.parametrize("sizes", [(0, 3 * MB), (10, MB), (MB + 1, 0), (2 * MB, 2 * MB + 7)])
def test_a_message_is_cut_and_put_together_again(parrot: Parrot, sizes: tuple[int, int]) -> None:
    # given a payload of some buffers
    numbers = random.Random(sum(sizes))
    body, payload = b"body" + numbers.randbytes(sizes[0]), numbers.randbytes(sizes[1])
    cuts = sorted({0, sizes[1], *(numbers.randint(0, sizes[1]) for _ in range(3))})
    client = joined(parrot.server.addresses[0])
    # when
    reply = client.exchange(body, 60, [payload[a:b] for a, b in itertools.pairwise(cuts)])
    # then
    assert (parrot.carried_out, parrot.payloads) == ([b"join", body], [b"", payload])
    assert bytes(reply.body) == body + b" 1"
    client.close()


def test_over_a_connection_that_is_cut_all_is_carried_out_once_and_arrives_whole(parrot: Parrot) -> None:
    # given requests and answers of several pieces, of which now and then some are lost
    proxy = FlakyProxy(port_of(parrot), pieces=(30, 120))
    client = joined(proxy.address)
    numbers = random.Random(1)
    bodies = [numbers.randbytes(3 * MB) for _ in range(4)]
    payloads = [numbers.randbytes(5 * MB) for _ in range(4)]
    # when
    replies = [client.exchange(body, 60, [payload]) for body, payload in zip(bodies, payloads, strict=True)]
    # then
    assert proxy.cuts > 0
    assert (parrot.carried_out, parrot.payloads) == ([b"join", *bodies], [b"", *payloads])
    assert [bytes(reply.body) for reply in replies] == [body + b" %d" % at for at, body in enumerate(bodies, 1)]
    # and what arrived is not sent again: for each cut a window at most
    assert proxy.there + proxy.back <= 4 * (3 + 5 + 3) * MB + proxy.cuts * 9 * MB
    proxy.steady = True
    client.close()
    proxy.close()


def test_a_silence_costs_a_question_and_no_piece(parrot: Parrot) -> None:
    # given a large request, whose connection stands still in the middle of it for many times as long as a client waits
    proxy = FlakyProxy(port_of(parrot))
    proxy.steady = True
    proxy.halt_after["there"] = 2 * MB
    client = joined(proxy.address, resend_s=0.01)
    asking = in_thread(lambda: client.exchange(b"with", 60, [bytes(6 * MB)]))
    until(lambda: proxy.there + proxy.back >= 2 * MB, "the first pieces")
    asked = parrot.server.garbage
    # when others go on meanwhile, and it comes to life again
    with Raw(parrot.server.addresses[0]) as raw:
        for number in range(1, 200):
            raw.send(frame(number, b"beside"))
            raw.hear()
    proxy.resume()
    # then
    assert bytes(asking().body).startswith(b"with")
    assert proxy.there < 6.5 * MB
    assert parrot.server.garbage == asked == 0
    client.close()
    proxy.close()


def test_an_upload_lives_by_its_pieces_and_not_by_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    # given an upload that waited, and has begun
    now, route, all_uploads = [0.0], (Any, b""), pieces.Uploads(100 * MB)
    monkeypatch.setattr(pieces, "time", SimpleNamespace(monotonic=lambda: now[0]))
    upload = all_uploads.offer("s", 1, (MB, MB))
    for now[0] in (50.0, 100.0):
        upload.hear(route, 0)
        all_uploads.sweep(now[0])
    assert list(all_uploads.admit()) == [upload]
    upload.ask()
    # when one piece arrives, and after it only offers, and the same piece again
    for now[0] in (150.0, 200.0):
        upload.hear(route, 1)
        upload.add(0, bytes(MB), lambda *call: MemorySink(MB))
        all_uploads.sweep(now[0])
        assert list(all_uploads.by_session) == ["s"]
    # then it is released a while after the first of these
    all_uploads.sweep(150.0 + pieces.SILENCE_S + 1)
    assert not all_uploads.by_session


def test_an_upload_waits_for_the_memory_of_its_body(parrot: Parrot, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a server without memory for a body
    tried = threading.Event()

    def fail(upload: pieces.Upload) -> None:
        tried.set()
        raise MemoryError

    address = parrot.server.addresses[0]
    client, other = joined(address), client_of(address)
    with monkeypatch.context() as short:
        short.setattr(pieces.Upload, "begin", fail)
        answer = in_thread(client.exchange, bytes(3 * MB), 60)
        assert tried.wait(60)
        # then others go on, and it is executed once there is memory
        assert other.request(b"x", 60) == b"x 1"
    assert bytes(answer().body) == bytes(3 * MB) + b" 2"
    for each in (client, other):
        each.close()


def test_for_an_answer_sent_before_a_question_gets_its_offer(parrot: Parrot) -> None:
    with Raw(parrot.server.addresses[0]) as raw:
        # given an answer of three pieces that the server has sent and released
        raw.send(frame(1, b"join"))
        raw.hear()
        raw.send(frame(2, b"large %d" % (3 * MB)))
        for _ in range(3):
            assert raw.hear() == (2, b"")
        released = threading.Event()

        def release() -> None:
            parrot.server.requests.release_downloads(float("inf"))
            released.set()

        parrot.server.call(release)
        assert released.wait(60)
        # when the client asks after a silence
        raw.send(frame(2, b"", part=(3, (), 7)))
        # then it is told the sizes, and gets the pieces that it asks for, and no others
        assert raw.hear_message()[1][0] == [1, [3 * MB, 0], 7]
        raw.send(frame(2, b"", part=(3, (2 * MB,))))
        raw.send(frame(3, b"after"))
        assert raw.hear_message()[1][0] == [2, 2 * MB, [3 * MB, 0]]
        assert raw.hear() == (3, b"after 2")


@pytest.mark.parametrize("start", [-MB, 1, 20, MB, 2 * MB, 1 << 40])
def test_there_is_no_piece_anywhere_else(parrot: Parrot, start: int) -> None:
    sizes = (10, MB + 10)  # of a body of one piece, and a payload of two

    def piece(start: int) -> bytes:
        return frame(2, b"", part=(2, start, sizes))

    with Raw(parrot.server.addresses[0]) as raw:
        # given a request that was offered
        raw.send(frame(1, b"join"))
        raw.send(frame(2, b"", part=(1, sizes, 0)))
        # when a piece lies elsewhere, or has another size than the one in its place
        raw.send(piece(start), bytes(10))
        raw.send(piece(0), b"abc")
        raw.send(frame(3, b"hello"))
        # then these are garbage, and the session goes on
        while raw.hear() != (3, b"hello 1"):
            pass
    assert parrot.server.garbage == 2
    assert parrot.carried_out == [b"join", b"hello"]
