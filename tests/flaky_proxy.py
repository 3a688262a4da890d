"""A proxy that cuts, holds up or changes its connections, so that requests and answers are really lost."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from struct import pack

NEVER = 1 << 60
WHOLE = (NEVER, NEVER)
"""Pieces of a connection that is never cut."""


class FlakyProxy:
    """Forwards to a TCP ``port`` or a socket file; each connection is cut after a random number of ``pieces``, in either direction.

    ``halt`` stops it, or only what it brings back, without a word until ``resume``; ``halt_after`` (bytes there and back)
    makes it halt by itself, and is empty then. ``there`` and ``back`` count the bytes that it has passed on. Connections are ``held`` up before
    they have brought ``most`` back, until ``resume``. ``spoil`` changes the next bytes that it brings back, once. ``changed``
    returns the messages to send for each message of a client of ZeroMQ without keys.
    """

    def __init__(self, port: int | str, seed: int = 0, pieces: tuple[int, int] = (4, 16)) -> None:
        self._target, self._numbers, self._pieces = port, random.Random(seed), pieces
        self._there, self._back, self._resumed = threading.Event(), threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.cuts = self.there = self.back = 0
        self.halt_after: dict[str, int] = {}  # "there" stops all, "back" what it brings back
        self.steady, self.held = False, threading.Event()
        self.most: float = NEVER
        self.spoil: Callable[[bytes], bytes] | None = None
        self.changed: Callable[[list[bytes]], Iterable[list[bytes]]] | None = None
        self._open: list[socket.socket] = []
        self._there.set()
        self._back.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def halt(self, *, there: bool = True) -> None:
        self._back.clear()
        if there:
            self._there.clear()

    def resume(self) -> None:
        self.most = NEVER
        for each in (self._there, self._back, self._resumed):
            each.set()

    def cut(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept no more connections; those that are there go on."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __enter__(self) -> FlakyProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self.resume()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                try:
                    there = self._connect()
                except ConnectionError:  # nobody serves there now
                    here.close()
                    continue
                self._open += [here, there]
                left = [self._numbers.randint(*self._pieces)]
                for source, sink, back in ((here, there, False), (there, here, True)):
                    threading.Thread(target=self._forward, args=(source, sink, back, left), daemon=True).start()

    def _connect(self) -> socket.socket:
        if isinstance(self._target, int):
            return socket.create_connection(("127.0.0.1", self._target))
        made = socket.socket(socket.AF_UNIX)
        made.connect(self._target)
        return made

    def _forward(self, source: socket.socket, sink: socket.socket, back: bool, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            received = ((data, True) for data in iter(lambda: source.recv(1 << 16), b""))
            for data, waits in self._messages(source, back) if self.changed else received:
                if waits:
                    (self._back if back else self._there).wait()
                left[0] -= 1
                if left[0] <= 0 and not self.steady:
                    self.cuts += 1
                    break  # this piece is lost
                if back and self.back + len(data) > self.most:
                    self.held.set()
                    self._resumed.wait()
                if back:
                    self.back += len(data)
                    spoil, self.spoil = self.spoil, None
                    data = spoil(data) if spoil else data
                else:
                    self.there += len(data)
                sink.sendall(data)
                for which in ("there", "back"):
                    if self.there + self.back >= self.halt_after.get(which, NEVER):
                        self.halt(there=which == "there")
                        self.halt_after.clear()
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _messages(self, source: socket.socket, back: bool) -> Iterator[tuple[bytes, bool]]:
        """Bytes of a ZMTP connection, and True if `halt` stops them: messages, changed on the way there, but not its handshake."""
        stream, message = source.makefile("rb"), list[bytes]()
        yield from ((stream.read(1), False) for _ in range(64))
        while flags := stream.read(1):
            size = stream.read(8 if flags[0] & 2 else 1)
            body = stream.read(int.from_bytes(size, "big"))
            if flags[0] & 4:
                yield flags + size + body, False
                continue
            message.append(body)
            if not flags[0] & 1:
                for parts in [message] if back else self.changed(message):
                    last = len(parts) - 1
                    frames = (pack(">BQ", 2 + (n < last), len(part)) + part for n, part in enumerate(parts))
                    yield b"".join(frames), True
                message = []
