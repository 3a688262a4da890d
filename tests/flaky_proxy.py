"""A TCP proxy that cuts its connections, so that requests and answers are really lost."""

import contextlib
import random
import socket
import threading


class FlakyProxy:
    """Forwards to ``port``; each connection is cut after a random number of ``pieces``, in either direction. ``halt``
    stops it, or only what it brings back, without a word until ``resume``. ``there`` and ``back`` count the bytes that
    it passed on; ``halt_after`` (of those) makes it halt by itself."""

    def __init__(self, port: int, seed: int = 0, pieces: tuple[int, int] = (4, 16)) -> None:
        self._target, self._numbers, self._pieces = port, random.Random(seed), pieces
        self._there, self._back = threading.Event(), threading.Event()
        self.resume()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = self.there = self.back = 0
        self.halt_after: dict[str, int] = {}  # "there" stops all, "back" what it brings back
        self.steady = False
        threading.Thread(target=self._accept, daemon=True).start()

    def halt(self, *, there: bool = True) -> None:
        self._back.clear()
        if there:
            self._there.clear()

    def resume(self) -> None:
        self._there.set()
        self._back.set()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", self._target))
                except ConnectionError:  # nobody serves there now
                    here.close()
                    continue
                left = [self._numbers.randint(*self._pieces)]
                for source, sink, moving in ((here, there, self._there), (there, here, self._back)):
                    threading.Thread(target=self._forward, args=(source, sink, moving, left), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, moving: threading.Event, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                moving.wait()
                left[0] -= 1
                if left[0] <= 0 and not self.steady:
                    self.cuts += 1
                    break  # this piece is lost
                sink.sendall(data)
                if moving is self._there:
                    self.there += len(data)
                else:
                    self.back += len(data)
                if self.there + self.back >= self.halt_after.get("there", 1 << 60):
                    self.halt_after.clear()
                    self.halt()
                if self.there + self.back >= self.halt_after.get("back", 1 << 60):
                    self.halt_after.clear()
                    self.halt(there=False)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
