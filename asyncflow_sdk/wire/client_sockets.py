"""The sockets of a client: one a thread, or one an event loop; and the process at their other end, as far as it can be seen."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import zmq

from ..errors import AsyncFlowError, ProtocolError, ServerLost
from .envelope import GOODBYE, ResponseEnvelope, decode_response
from .exchange import Message, RequestExchange
from .handshake import HandshakeMonitor
from .keys import RunKey
from .processes import watch
from .sockets import connect, transport_of

_AT_ONCE = int(zmq.NOBLOCK)
# As plain integers: an operation on zmq's enumerations takes longer than receiving a message.
READABLE, _MORE, _EVENTS = int(zmq.POLLIN), int(zmq.RCVMORE), int(zmq.EVENTS)
LAST_WORDS_MS = 100
"""How long after a server's end what it sent before may still be on its way."""


class ReceivedMessage(NamedTuple):
    """A message of the server, and the frame beside it, if any."""

    response: ResponseEnvelope
    data: Any = None


class ServerWatch:
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

    def __init__(self, context: zmq.Context[Any], address: str, key: RunKey | None, unproven: bool) -> None:
        self.busy = 0
        self.torn = self.told_goodbye = False
        self.wake, self._roused = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), False
        self._open = [self.wake]
        self.handshake: HandshakeMonitor | None = None
        self.socket = context.socket(zmq.DEALER)
        try:
            if unproven:
                self.handshake = HandshakeMonitor(
                    self.socket, address, key is not None, transport_of(address) == "ipc"
                )
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

    def send(self, messages: Iterable[Message]) -> None:
        """Never waits: a socket whose connection was refused for good takes nothing any more, and what says so has to be
        heard."""
        _send(self.socket, messages)

    def receive(self) -> ReceivedMessage:
        """The next message, which is there. Raises ProtocolError."""
        self.torn = True  # until all frames of it are here
        envelope, data = self.socket.recv(), None
        while self.socket.getsockopt(_MORE):
            data = self.socket.recv(copy=False)
        self.torn = False
        response = decode_response(envelope)
        self.told_goodbye |= response.seq == GOODBYE
        return ReceivedMessage(response, data)

    def overhear(self) -> bool:
        """Read what has come while nobody waits, answers that nobody wants any more; returns ``told_goodbye``."""
        with contextlib.suppress(ProtocolError):
            while not self.socket.closed and int(self.socket.getsockopt(_EVENTS)) & READABLE:
                self.receive()
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
        self, context: zmq.Context[Any], address: str, key: RunKey | None, server: ServerWatch, ended: Any,
        goodbye: Callable[[], AsyncFlowError],
    ) -> None:  # fmt: skip
        """``goodbye``: told that the server said it; gives what requests end with."""
        self.address, self._goodbye = address, goodbye
        self._loop = asyncio.get_running_loop()
        self._server, self._ended, self._gone = server, ended, False
        self._exchanges: dict[int, tuple[RequestExchange, asyncio.Future[None]]] = {}
        self.socket = context.socket(zmq.DEALER)
        connect(self.socket, address, key)
        self._fd = self.socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self._receive)
        if server.fd >= 0:
            self._loop.add_reader(server.fd, self._server_ended)

    async def exchange(self, exchange: RequestExchange, messages: Iterable[Message], wait_s: float) -> None:
        """Send, and go on with the exchange as answers arrive; return when its reply is there, or after ``wait_s``."""
        if self._gone:
            raise self._ended()
        future: asyncio.Future[None] = self._loop.create_future()
        self._exchanges[exchange.seq] = exchange, future
        timer = self._loop.call_later(max(wait_s, 0.0), _settle, future)
        try:
            self.send(messages)
            await future
        finally:
            timer.cancel()
            self._exchanges.pop(exchange.seq, None)

    def send(self, messages: Iterable[Message]) -> None:
        """The same as that of ``ThreadSocket``."""
        try:
            _send(self.socket, messages)
        finally:
            # Hazard: sending may take note of what has come, and then nothing wakes the loop for it.
            self._loop.call_soon(self._receive)

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
            data = None
            try:
                envelope = self.socket.recv(_AT_ONCE)
                while self.socket.getsockopt(_MORE):
                    data = self.socket.recv(_AT_ONCE, copy=False)
                response = decode_response(envelope)
            except ProtocolError as error:
                self._fail(error)
                continue
            if response.seq == GOODBYE:
                self._fail(self._goodbye())
            elif response.seq in self._exchanges:
                self._hear(*self._exchanges[response.seq], response, data)

    def _hear(
        self, exchange: RequestExchange, future: asyncio.Future[None], response: ResponseEnvelope, data: Any
    ) -> None:
        try:
            messages = exchange.hear(response, data)
        except ProtocolError as error:
            if not future.done():
                future.set_exception(error)
            return
        _send(self.socket, messages)
        if exchange.reply is not None:
            _settle(future)

    def _server_ended(self) -> None:
        self._unwatch()
        self._gone = True
        self._loop.call_later(LAST_WORDS_MS / 1000, lambda: self._fail(self._ended()))

    def _unwatch(self) -> None:
        if self._server.fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._server.fd)

    def _fail(self, error: AsyncFlowError) -> None:
        for _, future in self._exchanges.values():
            if not future.done():
                future.set_exception(error)


def _send(socket: zmq.Socket[Any], messages: Iterable[Message]) -> None:
    with contextlib.suppress(zmq.Again):
        for envelope, data in messages:
            if data is None:
                socket.send(envelope, _AT_ONCE)
            else:
                socket.send_multipart((envelope, data), _AT_ONCE, copy=True)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
