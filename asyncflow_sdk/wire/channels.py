"""The sockets of a client: one a thread, or one an event loop; and the process at their other end, as far as it can be seen."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import zmq

from ..errors import AsyncFlowError, ProtocolError, ServerLost
from .envelope import GOODBYE, decode_response
from .handshake import Handshake
from .keys import RunKey
from .processes import watch
from .sockets import connect, transport_of

_AT_ONCE = int(zmq.NOBLOCK)
# As plain integers: an operation on zmq's enumerations takes longer than receiving a message.
READABLE, _MORE, _EVENTS = int(zmq.POLLIN), int(zmq.RCVMORE), int(zmq.EVENTS)
LAST_WORDS_MS = 100
"""How long after a server's end what it sent before may still be on its way."""


class Reply(NamedTuple):
    """``frames``: buffers that came beside the answer, valid for as long as they are referred to."""

    body: bytes
    frames: Sequence[Any] = ()


class ServerProcess:
    """The server's process, if it can be seen from here. ``fd`` is readable when it has ended, else -1; ``ended``: it had
    when it was first looked for."""

    def __init__(self, pid: int = 0, key: str = "") -> None:
        self.pid, self.fd, self.ended = pid, -1, False
        if pid != os.getpid():
            try:
                fd = watch(pid, key)
                self.fd = -1 if fd is None else fd
            except ProcessLookupError:
                self.ended = True

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class ThreadSocket:
    """The socket of one thread. ``busy``: requests under way on it (two, when a signal handler asks). ``told_goodbye``: the
    server said it here."""

    def __init__(
        self, context: zmq.Context[Any], address: str, key: RunKey | None, unproven: bool, frame_bytes: int
    ) -> None:
        self.busy = 0
        self.torn = self.told_goodbye = False
        self.wake, self._roused = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), False
        self._open = [self.wake]
        self.handshake: Handshake | None = None
        self.socket = context.socket(zmq.DEALER)
        self.socket.maxmsgsize = frame_bytes
        try:
            if unproven:
                self.handshake = Handshake(self.socket, address, key is not None, transport_of(address) == "ipc")
            connect(self.socket, address, key)
        except BaseException:
            self.close()
            raise

    def rouse(self) -> None:
        """End the wait for an answer, in another thread."""
        self._roused = True
        os.eventfd_write(self.wake, 1)

    def rest(self) -> None:
        """Forget that."""
        if self._roused:
            self._roused = False
            os.eventfd_read(self.wake)

    def send(self, envelope: bytes, frames: Sequence[Any]) -> Any:
        """Returns what tells when the payload is through; None without payload. Never waits: a socket whose
        connection was refused for good takes nothing any more, and what says so has to be heard."""
        with contextlib.suppress(zmq.Again):
            if frames:
                return self.socket.send_multipart((envelope, *frames), _AT_ONCE, copy=False, track=True)
            self.socket.send(envelope, _AT_ONCE)
        return None

    def receive(self, seq: int) -> Reply | None:
        """The next answer; None if it is one to another request than ``seq``."""
        self.torn = True  # until all frames of the answer are here
        response, frames = decode_response(self.socket.recv()), []
        while self.socket.getsockopt(_MORE):
            frames.append(self.socket.recv(copy=False))
        self.torn = False
        self.told_goodbye |= response.seq == GOODBYE
        return Reply(response.body, frames) if response.seq == seq else None

    def overhear(self) -> bool:
        """Read what has come while nobody waits, answers that nobody wants any more; returns ``told_goodbye``."""
        with contextlib.suppress(ProtocolError):
            while not self.socket.closed and int(self.socket.getsockopt(_EVENTS)) & READABLE:
                self.receive(GOODBYE)
        return self.told_goodbye

    def close(self, linger: int = 200) -> None:
        if self.handshake is not None:
            self.handshake.close()
            self.handshake = None
        self.socket.close(linger=linger)
        with contextlib.suppress(IndexError):  # a thread's end and a close may meet here
            os.close(self._open.pop())

    def __del__(self) -> None:
        if not self.socket.closed:
            self.close()


class LoopSocket:
    """The socket of an event loop, which watches it itself: what ZeroMQ has for event loops takes several turns of one for
    each message."""

    def __init__(
        self, context: zmq.Context[Any], address: str, key: RunKey | None, server: ServerProcess, ended: Any,
        goodbye: Callable[[], AsyncFlowError],
    ) -> None:  # fmt: skip
        """``goodbye``: told that the server said it; gives what requests end with."""
        self.address, self._goodbye = address, goodbye
        self._loop = asyncio.get_running_loop()
        self._server, self._ended, self._gone = server, ended, False
        self._waiting: dict[int, asyncio.Future[Reply | None]] = {}
        self.socket = context.socket(zmq.DEALER)
        connect(self.socket, address, key)
        self._fd = self.socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self._receive)
        if server.fd >= 0:
            self._loop.add_reader(server.fd, self._server_ended)

    async def exchange(
        self, seq: int, envelope: bytes, frames: Sequence[Any], wait_s: float
    ) -> tuple[Any, Reply | None]:
        """Send, if there is an envelope, and wait for the answer: what tells when the payload is through, and the answer; None if
        it has not come in time."""
        if self._gone:
            raise self._ended()
        future = self._waiting[seq] = self._loop.create_future()
        timer = self._loop.call_later(max(wait_s, 0.0), _settle, future, None)
        try:
            tracker = self.send(envelope, frames) if envelope else None
            return tracker, await future
        finally:
            timer.cancel()
            self._waiting.pop(seq, None)

    def send(self, envelope: bytes, frames: Sequence[Any] = ()) -> Any:
        """The same as that of ``ThreadSocket``."""
        try:
            if frames:
                return self.socket.send_multipart((envelope, *frames), _AT_ONCE, copy=False, track=True)
            self.socket.send(envelope, _AT_ONCE)
        except zmq.Again:
            pass
        finally:
            # Hazard: sending may take note of what has come, and then nothing wakes the loop for it.
            self._loop.call_soon(self._receive)
        return None

    def close(self) -> None:
        if self.socket.closed:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            self._unwatch()
            self._fail(ServerLost(f"this connection to {self.address} is closed"))
        self.socket.close(linger=200)

    def _receive(self) -> None:
        """All that has come."""
        while not self.socket.closed and int(self.socket.getsockopt(_EVENTS)) & READABLE:
            frames: list[Any] = []
            try:
                envelope = self.socket.recv(_AT_ONCE)
                while self.socket.getsockopt(_MORE):
                    frames.append(self.socket.recv(_AT_ONCE, copy=False))
                response = decode_response(envelope)
            except ProtocolError as error:
                self._fail(error)
            else:
                if response.seq == GOODBYE:
                    self._fail(self._goodbye())
                elif response.seq in self._waiting:
                    _settle(self._waiting[response.seq], Reply(response.body, frames))

    def _server_ended(self) -> None:
        self._unwatch()
        self._gone = True
        self._loop.call_later(LAST_WORDS_MS / 1000, lambda: self._fail(self._ended()))

    def _unwatch(self) -> None:
        if self._server.fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._server.fd)

    def _fail(self, error: AsyncFlowError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def _settle(future: asyncio.Future[Reply | None], reply: Reply | None) -> None:
    if not future.done():
        future.set_result(reply)
