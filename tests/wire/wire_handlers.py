"""A real server with the plainest handler: it answers, parks, and writes down what it was told."""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from asyncflow_sdk.wire import MAX_BYTES, Client, Handler, RouterSockets, Server

PROTOCOL = 5


class MemorySink(bytearray):
    release = bytearray.clear

    def write(self, start: int, data: Any) -> None:
        self[start : start + len(data)] = bytes(data)


class Parrot(Handler):
    """Answers a request with its body and how many were carried out before it. ``park...`` waits for ``let_go``."""

    def __init__(self) -> None:
        self.carried_out: list[bytes] = []
        self.payloads: list[bytes] = []
        self.parked: dict[bytes, int] = {}
        self.dropped_ones: list[tuple[int, bytes | None]] = []
        self.gone_ones: list[str] = []
        self.wants: float | None = None

    def sink(self, session: str, body: bytes, nbytes: int) -> MemorySink:
        return MemorySink(nbytes)

    def request(self, session: str, ticket: int, body: bytes, payload: MemorySink | None) -> None:
        self.carried_out.append(body)
        self.payloads.append(bytes(payload or b""))
        if body.startswith(b"park"):
            self.parked[body] = ticket
        elif body.startswith(b"large"):
            self.server.answer(ticket, bytes(int(body[5:] or 100_000)))
        else:
            self.server.answer(ticket, body + b" %d" % (len(self.carried_out) - 1))

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        if ticket or answer is not None:
            self.dropped_ones.append((ticket, answer))

    def gone(self, session: str, reason: str) -> None:
        self.gone_ones.append(session)

    def idle(self) -> float | None:
        return self.wants

    def let_go(self, body: bytes) -> None:
        self.server.call(lambda: self.server.answer(self.parked[body], body + b" at last"))


def client_of(address: str, resend_s: float = 0.1) -> Client:
    """A client without a key, over tcp too, which repeats itself soon."""
    client = Client(address, insecure=address.startswith("tcp:"))
    client.resend_s = resend_s
    return client


@contextlib.contextmanager
def serving(*addresses: str, **options: Any) -> Iterator[Parrot]:
    parrot, max_bytes = Parrot(), options.pop("max_bytes", MAX_BYTES)
    parrot.server = Server(RouterSockets(list(addresses), **options), parrot, max_bytes)
    parrot.server.start()
    try:
        yield parrot
    finally:
        parrot.server.stop()


class Raw(contextlib.AbstractContextManager["Raw"]):
    """A bare DEALER: sends whatever frames it is given."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def hear(self) -> tuple[int, bytes]:
        return self.hear_message()[0]

    def hear_message(self) -> tuple[tuple[int, bytes], list[Any]]:
        assert self.socket.poll(30_000), "the server said nothing"
        protocol, seq, body, *part = msgspec.msgpack.decode(self.socket.recv_multipart()[0])
        assert protocol == PROTOCOL
        return (seq, body), part

    def silent(self, milliseconds: int = 100) -> bool:
        return not self.socket.poll(milliseconds)

    def __exit__(self, *exc: object) -> None:
        self.socket.close()


def frame(
    seq: int, body: bytes, session: str = "s", done: int = 1, *, settled: Any = (), dropped: Any = (),
    protocol: int = PROTOCOL, part: Any = None,
) -> bytes:  # fmt: skip
    """A request as it travels. ``part``: what part of a message is beside it."""
    return msgspec.msgpack.encode((protocol, session, seq, done, settled, dropped, body, *([part] if part else [])))
