"""Ends of the tcp transport, a proxy between them, and ``where`` with some of its fields changed."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from children import hear, say

from asyncflow_sdk.testing.ends import Ends
from asyncflow_sdk.weights import transport_named


@contextlib.contextmanager
def tcp(**options: Any) -> Iterator[Ends]:
    with Ends(lambda: transport_named("tcp", **options), lambda: transport_named("tcp")) as ends:
        ends.random = np.random.default_rng(0)
        yield ends


def numbers(seed: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class Proxy:
    """Forwards to a port of this host. ``back`` counts the bytes that it brought from there. Before it has brought ``most`` it
    holds its connections up until ``resume``, or for ever after ``hold_those``. ``spoil`` changes the next bytes, once."""

    def __init__(self, target: int) -> None:
        self._target, self.most, self.back = target, float("inf"), 0
        self.spoil: Callable[[bytes], bytes] | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.held, self._resumed = threading.Event(), threading.Event()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_those(self) -> None:
        """Connections that are made from now on are not held up."""
        self.most = float("inf")

    def resume(self) -> None:
        self.most = float("inf")
        self._resumed.set()

    def cut(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.resume()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._target))
                self._open += [here, there]
                for source, sink in ((here, there), (there, here)):
                    threading.Thread(target=self._forward, args=(source, sink, source is there), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                if back and self.back + len(data) > self.most:
                    self.held.set()
                    self._resumed.wait()
                if back:
                    self.back += len(data)
                    spoil, self.spoil = self.spoil, None
                    data = spoil(data) if spoil is not None else data
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def bulk_of(where: bytes) -> Any:
    """Where whole buckets are read: a socket file, or a port of an insecure publisher."""
    host, port, _ = msgspec.msgpack.decode(where)[3]
    return host if host.startswith("/") else port


def with_bulk(where: bytes, **fields: Any) -> bytes:
    """The same version, with another ``host``, ``port`` or ``token`` where whole buckets are read."""
    value = msgspec.msgpack.decode(where)
    value[3] = [fields.get(name, old) for name, old in zip(("host", "port", "token"), value[3], strict=True)]
    return msgspec.msgpack.encode(value)


def with_service(where: bytes, **fields: Any) -> bytes:
    """The same version, with another ``address``, ``key`` or ``pid`` of its publisher's service, which is asked for all of it."""
    value = msgspec.msgpack.decode(where)
    service = dict(zip(("address", "key", "pid", "pid_key"), msgspec.msgpack.decode(value[0]), strict=True))
    value[0], value[3] = msgspec.msgpack.encode(list((service | fields).values())), None
    return msgspec.msgpack.encode(value)


def address_of(where: bytes) -> str:
    """Of the publisher's service."""
    return str(msgspec.msgpack.decode(msgspec.msgpack.decode(where)[0])[0])


def publish_half(nbytes: int) -> None:
    """In a process: publish a version; write half of another; stay until killed."""
    with tcp(delta_bytes=0) as ends:
        for version in (1, 2):
            weights = {f"w{number}": numbers(number + 9 * version, nbytes // 3) for number in range(3)}
            manifest, _ = ends.write(version, weights)
            if version == 1:
                say([msgspec.msgpack.encode(manifest).hex(), ends.send(manifest).hex()])
                ends.keep(1)
            else:
                say("half")
            hear()
