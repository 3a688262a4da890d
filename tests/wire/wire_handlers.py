"""A real server with a simple handler: it answers or parks requests, and records all calls."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

from asyncflow_sdk.wire import Client, MemorySink, Server

PROTOCOL = 3


class Parrot:
    """Answers a request with its body and how many were carried out before it. ``park...`` waits for ``let_go``."""

    def __init__(self) -> None:
        self.carried_out: list[bytes] = []
        self.payloads: list[bytes] = []
        self.parked: dict[bytes, int] = {}
        self.dropped_ones: list[tuple[int, bytes | None]] = []
        self.gone_ones: list[str] = []
        self.wants: float | None = None
        self.server: Server

    def sink(self, session: str, body: bytes, nbytes: int) -> MemorySink:
        return MemorySink(nbytes)

    def request(self, session: str, ticket: int, body: bytes, payload: MemorySink | None) -> None:
        self.carried_out.append(body)
        self.payloads.append(b"" if payload is None else payload.memory.tobytes())
        if body.startswith(b"park"):
            self.parked[body] = ticket
        elif body == b"large":
            self.server.answer(ticket, bytes(100_000))
        else:
            self.server.answer(ticket, body + b" %d" % (len(self.carried_out) - 1))

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        if ticket or answer is not None:
            self.dropped_ones.append((ticket, answer))

    def make(self, answer: bytes) -> tuple[bytes, Sequence[Any]]:
        return answer, ()

    def gone(self, session: str, reason: str) -> None:
        self.gone_ones.append(session)

    def idle(self) -> float | None:
        return self.wants

    def settle(self) -> bool:
        return True

    def let_go(self, body: bytes) -> None:
        self.server.call(lambda: self.server.answer(self.parked[body], body + b" at last"))


def client_of(address: str, resend_s: float = 0.1) -> Client:
    """Return a client without a key, also over tcp, that repeats requests soon."""
    return Client(address, insecure=address.startswith("tcp:"), resend_s=resend_s)


@contextlib.contextmanager
def serving(*addresses: str, **options: Any) -> Iterator[Parrot]:
    parrot = Parrot()
    parrot.server = Server(list(addresses), parrot, **options)
    parrot.server.start()
    try:
        yield parrot
    finally:
        parrot.server.stop()


class Raw:
    """A bare DEALER socket for arbitrary frames."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def hear(self) -> tuple[int, bytes]:
        """Return seq and body of the next response."""
        assert self.socket.poll(30_000), "the server sent nothing"
        protocol, seq, body, *_ = msgspec.msgpack.decode(self.socket.recv())
        assert protocol == PROTOCOL
        return seq, body

    def silent(self, milliseconds: int = 100) -> bool:
        return not self.socket.poll(milliseconds)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()


def frame(seq: int, body: bytes, session: str = "s", done: int = 1, **more: Any) -> bytes:
    """Encode a request. ``more``: settled, dropped, protocol, part."""
    start = (
        more.get("protocol", PROTOCOL),
        session,
        seq,
        done,
        more.get("settled", ()),
        more.get("dropped", ()),
        body,
    )
    return msgspec.msgpack.encode((*start, more["part"]) if "part" in more else start)
