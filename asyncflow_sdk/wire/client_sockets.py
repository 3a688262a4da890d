"""The sockets of a client, one per thread or event loop, and the watch on its server's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from typing import Any

import zmq

from ..errors import AsyncFlowError, ConfigError, ProtocolError, ServerLost
from .envelope import FRAME_BYTES, GOODBYE, ResponseEnvelope, decode_response
from .exchange import Message, RequestExchange
from .handshake import HandshakeMonitor
from .keys import RunKey
from .processes import open_pidfd
from .sockets import set_options, set_tcp, transport_of

# Plain integers: an operation on zmq's enumerations takes longer than receiving a message.
_NOBLOCK, POLLIN, _RCVMORE, _EVENTS = int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.RCVMORE), int(zmq.EVENTS)
FINAL_MESSAGES_MS = 100
"""How long messages of an ended server may still be in transit."""


class ServerWatch:
    """The server of a client. ``closed``: True once it has closed for good. ``pid``: its process,
    if it is visible here and ``watch`` was called; ``fd``: readable once it has ended, else -1;
    ``ended``: True if it had ended before."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.pid, self.fd, self.ended, self.closed = 0, -1, False, False

    def watch(self, pid: int, key: str) -> None:
        """Watch the server's process. Call at most once."""
        self.pid = pid
        if pid != os.getpid():
            try:
                fd = open_pidfd(pid, key)
                self.fd = -1 if fd is None else fd
            except ProcessLookupError:
                self.ended = True

    def close(self) -> None:
        """Record the goodbye of the server."""
        self.closed = True

    def goodbye_error(self) -> ServerLost:
        """Return the error of requests to a server closed for good."""
        return ServerLost(f"the run at {self.address} was closed by the process that served it")

    def ended_error(self) -> ServerLost:
        """Return the error of requests to a server whose process has ended."""
        return ServerLost(f"the server at {self.address} is gone: its process {self.pid} has ended")

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class ThreadSocket:
    """The socket of one thread. ``busy``: its requests in progress (2 if a signal handler makes
    one). ``partial``: True if a message was read in part. ``patient``: of its HandshakeMonitor; None
    without one.
    """

    def __init__(
        self, context: zmq.Context[Any], server: ServerWatch, key: RunKey | None, patient: bool | None
    ) -> None:
        self._server, address = server, server.address
        self.busy, self.partial = 0, False
        self.wake, self._interrupted = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), False
        self._open = [self.wake]
        self.handshake: HandshakeMonitor | None = None
        self.socket = context.socket(zmq.DEALER)
        try:
            if patient is not None:
                self.handshake = HandshakeMonitor(self.socket, address, key is not None, patient)
            connect(self.socket, address, key)
        except BaseException:
            self.close()
            raise

    def enter(self) -> None:
        """Begin a request."""
        self.clear_interrupt()
        self.busy += 1

    def leave(self, requests: int = 1) -> None:
        """End requests in progress."""
        self.busy -= requests

    def authenticated(self) -> bool:
        """Read the events of the handshake. Return True if it has succeeded."""
        if self.handshake is None or not self.handshake.read():
            return False
        self.handshake = None
        return True

    def interrupt(self) -> None:
        """Make ``wake`` readable, to end the wait of another thread."""
        self._interrupted = True
        os.eventfd_write(self.wake, 1)

    def clear_interrupt(self) -> None:
        """Undo ``interrupt``."""
        if self._interrupted:
            self._interrupted = False
            os.eventfd_read(self.wake)

    def send(self, messages: Iterable[Message]) -> None:
        """Send without waiting: a socket with a refused connection accepts no more messages, and
        the caller must read the reason. Unsent messages are dropped."""
        _send(self.socket, messages)

    def receive(self) -> tuple[ResponseEnvelope, Any]:
        """Return the next message, which must be available, and its payload frame, if any. Raises
        ProtocolError."""
        self.partial = True
        envelope, data = _receive(self.socket)
        self.partial = False
        response = decode_response(envelope)
        if response.seq == GOODBYE:
            self._server.close()
        return response, data

    def drain(self) -> None:
        """Read messages for requests no longer in progress; only a goodbye has an effect."""
        with contextlib.suppress(ProtocolError):
            while not self.socket.closed and int(self.socket.getsockopt(_EVENTS)) & POLLIN:
                self.receive()

    def close(self, linger: int = 200) -> None:
        """Close the socket. ``linger``: milliseconds for unsent messages. Idempotent."""
        if self.handshake is not None:
            self.handshake.close()
            self.handshake = None
        self.socket.close(linger=linger)
        with contextlib.suppress(IndexError):  # the end of the thread may close it at the same time
            os.close(self._open.pop())

    def __del__(self) -> None:
        if not self.socket.closed:
            self.close()


class LoopSocket:
    """The socket of an event loop. It adds its descriptor to the loop itself: zmq.asyncio takes
    several loop iterations per message."""

    def __init__(self, context: zmq.Context[Any], server: ServerWatch, key: RunKey | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._server, self._server_gone = server, False
        self._exchanges: dict[int, tuple[RequestExchange, asyncio.Future[None]]] = {}
        self.socket = context.socket(zmq.DEALER)
        connect(self.socket, server.address, key)
        self._fd = self.socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self._receive)
        if server.fd >= 0:
            self._loop.add_reader(server.fd, self._server_ended)

    async def exchange(self, exchange: RequestExchange, messages: Iterable[Message], wait_s: float) -> None:
        """Send, and continue the exchange at each answer until its reply, or for ``wait_s``."""
        if self._server_gone:
            raise self._server.ended_error()
        future: asyncio.Future[None] = self._loop.create_future()
        self._exchanges[exchange.seq] = exchange, future
        timer = self._loop.call_later(max(wait_s, 0.0), _resolve, future)
        try:
            self.send(messages)
            await future
        finally:
            timer.cancel()
            self._exchanges.pop(exchange.seq, None)

    def send(self, messages: Iterable[Message]) -> None:
        """Send without waiting: see ``ThreadSocket.send``."""
        try:
            _send(self.socket, messages)
        finally:
            # Hazard: sending may consume the edge that reports received messages; nothing else wakes the loop.
            self._loop.call_soon(self._receive)

    def close(self) -> None:
        """Close the socket; its requests raise ServerLost. Idempotent."""
        if self.socket.closed:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            self._unwatch()
            self._fail(ServerLost(f"this connection to {self._server.address} is closed"))
        self.socket.close(linger=200)

    def _receive(self) -> None:
        while not self.socket.closed and int(self.socket.getsockopt(_EVENTS)) & POLLIN:
            envelope, data = _receive(self.socket)
            try:
                response = decode_response(envelope)
            except ProtocolError as error:
                self._fail(error)
                continue
            if response.seq == GOODBYE:
                self._server.close()
                self._fail(self._server.goodbye_error())
            elif response.seq in self._exchanges:
                self._continue(*self._exchanges[response.seq], response, data)

    def _continue(
        self, exchange: RequestExchange, future: asyncio.Future[None], response: ResponseEnvelope, data: Any
    ) -> None:
        try:
            messages = exchange.receive(response, data)
        except ProtocolError as error:
            if not future.done():
                future.set_exception(error)
            return
        _send(self.socket, messages)
        if exchange.reply is not None:
            _resolve(future)

    def _server_ended(self) -> None:
        self._unwatch()
        self._server_gone = True
        self._loop.call_later(FINAL_MESSAGES_MS / 1000, lambda: self._fail(self._server.ended_error()))

    def _unwatch(self) -> None:
        if self._server.fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._server.fd)

    def _fail(self, error: AsyncFlowError) -> None:
        for _, future in self._exchanges.values():
            if not future.done():
                future.set_exception(error)


def connect(socket: Any, address: str, key: RunKey | None) -> None:
    """Set the options of a client's socket, and connect it. Raises ConfigError."""
    final = {zmq.LINGER: 200}  # milliseconds, for the last confirmation
    unlimited = {zmq.SNDHWM: 0, zmq.RCVHWM: 0}  # no drops: at most two requests are in progress
    set_options(socket, final | unlimited | {zmq.MAXMSGSIZE: FRAME_BYTES})
    if transport_of(address) == "tcp":
        set_tcp(socket, address)
        # milliseconds; the kernel's default for a connection is minutes
        set_options(socket, {zmq.CONNECT_TIMEOUT: 3000, zmq.RECONNECT_IVL_MAX: 1000})
    if key is not None:
        own = {zmq.CURVE_PUBLICKEY: key.public.encode(), zmq.CURVE_SECRETKEY: key.secret.encode()}
        set_options(socket, {zmq.CURVE_SERVERKEY: key.server.encode()} | own)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot connect to {address}: {error}") from None


def _receive(socket: zmq.Socket[Any]) -> tuple[bytes, Any]:
    envelope, data = socket.recv(_NOBLOCK), None
    while socket.getsockopt(_RCVMORE):
        data = socket.recv(_NOBLOCK, copy=False)
    return envelope, data


def _send(socket: zmq.Socket[Any], messages: Iterable[Message]) -> None:
    with contextlib.suppress(zmq.Again):
        for envelope, data in messages:
            if data is None:
                socket.send(envelope, _NOBLOCK)
            else:
                socket.send_multipart((envelope, data), _NOBLOCK, copy=True)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
