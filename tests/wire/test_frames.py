"""Invalid messages end neither the server nor its other sessions."""

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from waiting import in_thread, until
from wire_handlers import PROTOCOL, Parrot, Raw, client_of, frame, serving

from asyncflow_sdk.errors import ProtocolError
from asyncflow_sdk.wire import generate_keys

pytestmark = pytest.mark.fast

GOOD = frame(1, b"hello")
BAD = {
    "nothing": b"",
    "noise": bytes(range(256)),
    "truncated": GOOD[:-1],
    "begun": GOOD[:3],
    "two in one": GOOD + GOOD,
    "no session": msgspec.msgpack.encode((PROTOCOL, "", 1, 1, (), (), b"x")),
    "long session": msgspec.msgpack.encode((PROTOCOL, "s" * 65, 1, 1, (), (), b"x")),
    "too few": msgspec.msgpack.encode((PROTOCOL, "s", 1)),
    "text for a number": msgspec.msgpack.encode((PROTOCOL, "s", "1", 1, (), (), b"x")),
    "a number too large": msgspec.msgpack.encode((PROTOCOL, "s", 1, 1, ("x",), (), b"x")),
    "a map": msgspec.msgpack.encode({"protocol": PROTOCOL}),
    "deep": b"\x91" * 5000,
    "deep behind a good beginning": GOOD[:1].replace(b"\x98", b"\x99") + GOOD[1:] + b"\x91" * 100_000,
    "text that is none": GOOD.replace(b"\xa1s", b"\xa1\xff"),
}
MAX_BYTES = 1 << 20
FRAME_BYTES = 2 << 20


@pytest.fixture(params=["ipc", "tcp"])
def parrot(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Parrot]:
    with serving(
        {"ipc": f"ipc://{tmp_path}/s", "tcp": "tcp://127.0.0.1:0"}[request.param],
        max_bytes=MAX_BYTES,
        insecure=request.param == "tcp",
    ) as parrot:
        yield parrot


def test_garbage_is_counted_and_nothing_else(parrot: Parrot) -> None:
    # given a session with a parked request
    address = parrot.server.addresses[0]
    client = client_of(address)
    waiting = in_thread(lambda: client.request(b"park", 30))
    until(lambda: parrot.parked, "the parked request")
    # when others send garbage, and messages of too many frames
    with Raw(address) as raw:
        for bad in BAD.values():
            raw.send(bad)
        raw.send(*[GOOD] * 3)
        raw.send(*[GOOD] * 5000)
        # then it is counted, the same socket may still speak, and the parked request is answered
        raw.send(GOOD)
        assert raw.hear() == (1, b"hello 1")
    assert parrot.server.garbage == len(BAD) + 2
    parrot.let_go(b"park")
    assert waiting() == b"park at last"
    assert client.request(b"more", 1) == b"more 2"
    client.close()


def test_noise_of_any_length(parrot: Parrot) -> None:
    # given
    numbers = random.Random(0)
    with Raw(parrot.server.addresses[0]) as raw:
        # when
        for _ in range(500):
            raw.send(*[numbers.randbytes(numbers.choice([0, 1, 7, 300])) for _ in range(numbers.randint(1, 3))])
        raw.send(GOOD)
        # then
        assert raw.hear() == (1, b"hello 0")
    assert parrot.server.garbage == 500


def test_hostile_numbers_harm_only_their_own_session(parrot: Parrot) -> None:
    # given requests that are well formed and make no sense
    big = 2**62
    with Raw(parrot.server.addresses[0]) as raw:
        raw.send(frame(-5, b"x", "bad", done=-7))
        raw.send(frame(3, b"x", "bad", done=big, settled=(big, -1, 3), dropped=(big, -1, 3)))
        raw.send(frame(4, b"x", "bad", done=1))
        raw.send(frame(big + 1, b"still there", "bad"))
        raw.send(frame(-1, b"x", "bad", dropped=(-1,)))
        raw.send(frame(1, b"hello", "good"))
        # then
        while not raw.hear()[1].startswith(b"hello"):
            pass
    assert parrot.server.garbage == 2


def test_a_session_that_the_handler_never_hears_of_is_not_kept(parrot: Parrot) -> None:
    with Raw(parrot.server.addresses[0]) as raw:
        # given requests without a number, and one whose cancellations are refused
        for seq in (0, -1):
            raw.send(frame(seq, b"x", f"body {seq}"))
            raw.send(frame(seq, b"", f"piece {seq}", part=(2, 0, (1, 0))), b"x")
        raw.send(frame(1, b"x", "cancelled", dropped=tuple(range(2, 70_000))))
        raw.send(frame(1, b"", "greedy", part=(3, (0,) * 17, 0)))  # more pieces than anybody has under way
        # when
        raw.send(frame(1, b"hello", "good"))
        # then
        assert raw.hear() == (1, b"hello 0")
    assert list(parrot.server.requests.sessions) == ["good"]
    assert parrot.server.garbage == 6


def test_an_oversized_message_cuts_only_its_own_connection(parrot: Parrot) -> None:
    # given another session with a parked request
    address = parrot.server.addresses[0]
    client = client_of(address)
    waiting = in_thread(lambda: client.request(b"park", 30))
    until(lambda: parrot.parked, "the parked request")
    # when
    with Raw(address) as raw:
        raw.send(frame(1, bytes(FRAME_BYTES)))
        assert raw.silent()
    # then nothing of it was carried out and the other session goes on
    parrot.let_go(b"park")
    assert waiting() == b"park at last"
    assert parrot.carried_out == [b"park"]
    client.close()


@pytest.mark.parametrize("mechanism", [b"NULL", b"CURVE"])
def test_a_frame_is_bounded_before_its_sender_has_proven_anything(mechanism: bytes) -> None:
    # given connections that go as far as the greeting
    keys = generate_keys()[0] if mechanism == b"CURVE" else None
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
    with serving("tcp://127.0.0.1:0", keys=keys, insecure=keys is None) as parrot, contextlib.ExitStack() as held:
        host, port = parrot.server.addresses[0].removeprefix("tcp://").split(":")

        def connect(announced: int) -> socket.socket:
            raw = held.enter_context(socket.create_connection((host, int(port)), 60))
            raw.sendall(greeting + struct.pack(">BQ", 6, announced))
            return raw

        # when one announces a frame that is larger than any
        for announced in (FRAME_BYTES + 1, (1 << 30) - 1, (1 << 63) - 1):
            raw = connect(announced)
            # then it is cut off at once
            with contextlib.suppress(ConnectionError):
                while raw.recv(1000):
                    pass
        # and of the largest that is taken, the bytes that came are held, and no more
        before = resident()
        for _ in range(6):
            with contextlib.suppress(ConnectionError):
                connect(FRAME_BYTES).sendall(bytes(FRAME_BYTES - 1))
        assert resident() - before < 6 * (16 << 20)


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_message_that_is_larger_than_a_call_may_be_is_garbage(parrot: Parrot) -> None:
    with Raw(parrot.server.addresses[0]) as raw:
        raw.send(GOOD, bytes(MAX_BYTES))
        raw.send(GOOD)
        assert raw.hear() == (1, b"hello 0")
    assert parrot.server.garbage == 1


def test_a_call_that_no_server_would_take_is_refused_before_it_is_sent(parrot: Parrot) -> None:
    client = client_of(parrot.server.addresses[0])
    client.max_bytes = MAX_BYTES
    with pytest.raises(ProtocolError, match="too large; this server takes at most"):
        client.request(bytes(MAX_BYTES), 1)
    with pytest.raises(ProtocolError, match="too large; this server takes at most"):
        client.exchange(b"x", 1, [bytes(MAX_BYTES // 2)] * 2)
    assert client.request(b"small", 1) == b"small 0"
    client.close()


@pytest.mark.parametrize("sends", [msgspec.msgpack.encode((PROTOCOL + 1, "s", 9, "in", "no", "known", "form")), None])
def test_a_request_of_another_protocol_is_told_so_in_a_form_that_any_client_reads(
    parrot: Parrot, sends: bytes | None
) -> None:
    # given a request of another version, in the form of this one or of one that is not known yet
    with Raw(parrot.server.addresses[0]) as raw:
        # when
        raw.send(sends or frame(9, b"hello", protocol=PROTOCOL + 1))
        # then
        seq, body = raw.hear()
        assert seq == 9
        assert f"this server speaks protocol {PROTOCOL}, you {PROTOCOL + 1}; install the same" in body.decode()
    assert parrot.server.garbage == 1


def test_a_client_that_meets_a_server_of_another_protocol_raises_what_it_says(tmp_path: Path) -> None:
    # given
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.linger = 0
    router.bind(f"ipc://{tmp_path}/s")
    client = client_of(f"ipc://{tmp_path}/s")
    asking = in_thread(lambda: client.request(b"x", 30))
    # when
    route, _ = router.recv_multipart()
    router.send_multipart([route, msgspec.msgpack.encode((PROTOCOL + 1, 1, b"this server speaks another protocol"))])
    # then
    with pytest.raises(ProtocolError, match=f"speaks {PROTOCOL}. this server speaks another protocol"):
        raise asking()
    client.close()
    router.close()


def test_an_answer_may_be_larger_than_any_request(parrot: Parrot) -> None:
    # given
    client = client_of(parrot.server.addresses[0])
    waiting = in_thread(lambda: client.request(b"park", 30))
    until(lambda: parrot.parked, "the parked request")
    # when
    large = bytes(MAX_BYTES + 1)
    parrot.server.call(lambda: parrot.server.answer(parrot.parked[b"park"], large))
    # then
    assert waiting() == large
    client.close()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request", GOOD, msgspec.msgpack.encode((PROTOCOL + 1, 1, b"x"))]
)
def test_a_server_that_answers_nonsense_fails_the_request(tmp_path: Path, answer: bytes) -> None:
    # given a server of something else
    address = f"ipc://{tmp_path}/s"
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.linger = 0
    router.bind(address)
    client = client_of(address)
    asking = in_thread(lambda: client.request(b"x", 30))
    # when
    route, _ = router.recv_multipart()
    router.send_multipart([route, answer])
    # then
    assert isinstance(asking(), ProtocolError)
    client.close()
    router.close()
