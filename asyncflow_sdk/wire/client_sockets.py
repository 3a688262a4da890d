"""The sockets of a client, one per thread or event loop, and the watch on its server's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import AccessDenied, AsyncFlowError, ConfigError, ServerLost
from .envelope import FRAME_BYTES, GOODBYE, ResponseEnvelope, decode_response
from .exchange import Message, RequestExchange
from .keys import RunKey
from .processes import open_pidfd
from .sockets import set_options, set_tcp, transport_of

# Plain integers: an operation on zmq's enumerations takes longer than receiving a message.
_NOBLOCK, POLLIN, _RCVMORE, _EVENTS = int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.RCVMORE), int(zmq.EVENTS)
FINAL_MESSAGES_MS = 100  # how long messages of an ended server may still be in transit
_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_MAX_FAILURES = 3
"""Connections cut during the handshake in a row before access counts as denied: a wrong key gives no reason."""


class ServerWatch:
    """The server of a client. ``closed``: True once it has closed for good. ``pid``: its process, if it is visible
    here and ``watch`` was called; ``fd``: readable once it has ended, else -1."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.pid, self.fd, self.closed = 0, -1, False

    def watch(self, pid: int, key: str) -> None:
        """Watch the server's process. Call at most once."""
        self.pid = pid
        if pid != os.getpid():
            try:
                self.fd = open_pidfd(pid, key)
            except ProcessLookupError:
                self.fd = os.eventfd(1, os.EFD_CLOEXEC)  # readable, too

    def goodbye(self) -> ServerLost:
        """Record the end of the server for good. Return the error of its requests."""
        self.closed = True
        return ServerLost(f"the run at {self.address} was closed by the process that served it")

    def ended_error(self) -> ServerLost:
        """Return the error of requests to a server whose process has ended."""
        return ServerLost(f"the server at {self.address} is gone: its process {self.pid} has ended")

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Channel:
    """A connection to the server, for one thread or event loop."""

    def __init__(self, context: zmq.Context[Any], server: ServerWatch) -> None:
        self._server = server
        self.socket, self._begun = context.socket(zmq.DEALER), 0

    def send(self, messages: Iterable[Message]) -> None:
        """Send without waiting, or drop: a socket with a refused connection accepts none, and has the reason."""
        for envelope, data in messages:
            try:
                if data is None:
                    self.socket.send(envelope, _NOBLOCK)
                else:
                    self.socket.send_multipart((envelope, data), _NOBLOCK, copy=True)
            except zmq.Again:
                return

    def has_message(self) -> bool:
        """True if ``receive`` has something to return."""
        return not self.socket.closed and bool(int(self.socket.getsockopt(_EVENTS)) & POLLIN)

    def receive(self) -> tuple[ResponseEnvelope, Any]:
        """Return the next message and its payload. Raises zmq.Again, ProtocolError, ServerLost for a goodbye."""
        socket, data = self.socket, None
        while socket.getsockopt(_RCVMORE):  # a signal interrupted the last call in the middle of a message
            socket.recv(_NOBLOCK)
        begun = self._begun = self._begun + 1
        envelope = socket.recv(_NOBLOCK)
        while socket.getsockopt(_RCVMORE):
            data = socket.recv(_NOBLOCK, copy=False)
        if begun != self._begun:  # a signal handler's request discarded the rest: it comes again
            raise zmq.Again
        response = decode_response(envelope)
        if response.seq == GOODBYE:
            raise self._server.goodbye()
        return response, data


class ThreadSocket(Channel):
    """The socket of one thread. ``busy``: its requests in progress (2 if a signal handler makes one). ``monitor``:
    readable when ``authenticated`` has events; None after the handshake. ``failures``: connections cut during the
    handshake, in a row. ``patient``: accept any number of them, because a server short of descriptors cuts
    connections, too; None: do not monitor."""

    def __init__(
        self, context: zmq.Context[Any], server: ServerWatch, key: RunKey | None, patient: bool | None
    ) -> None:
        super().__init__(context, server)
        self.busy, self.failures, self._patient, self._keyed = 0, 0, patient, key is not None
        self.wake, self._interrupted = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), False
        self._open = [self.wake]
        self.monitor: Any = None
        try:
            if patient is not None:
                self.monitor = self.socket.get_monitor_socket(_HANDSHAKE)
            connect(self.socket, server.address, key)
        except BaseException:
            self.close()
            raise

    def enter(self) -> None:
        """Begin a request."""
        if self._interrupted:
            self.clear_interrupt()
        self.busy += 1

    def leave(self) -> None:
        """End a request."""
        self.busy -= 1

    def authenticated(self) -> bool:
        """Process the events of the handshake. Return True if it has succeeded. Raises AccessDenied."""
        address = self._server.address
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._end_monitor()
                return True
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise AccessDenied(f"the server at {address} does not accept this key; ask for its run.key")
            self.failures += 1
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL or (self.failures >= _MAX_FAILURES and not self._patient):
                why = "needs a key; pass key=, the path of a copy of the run's run.key, and not insecure=True"
                if self._keyed:
                    why = (
                        "has no keys, or others than this key is for: is it the run.key of that run? If the run is"
                        " served without keys, connect with insecure=True and without a key"
                    )
                raise AccessDenied(f"the server at {address} {why}")
        return False

    def _end_monitor(self) -> None:
        if self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.monitor, self.failures = None, 0

    def interrupt(self) -> None:
        """Make ``wake`` readable, to end the wait of another thread."""
        self._interrupted = True
        os.eventfd_write(self.wake, 1)

    def clear_interrupt(self) -> None:
        """Undo ``interrupt``."""
        self._interrupted = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)

    def drain(self) -> None:
        """Read messages for requests no longer in progress; only a goodbye has an effect."""
        with contextlib.suppress(AsyncFlowError, zmq.Again):
            while self.has_message():
                self.receive()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._end_monitor()
        self.socket.close(linger=200)
        with contextlib.suppress(IndexError):  # the end of the thread may close it at the same time
            os.close(self._open.pop())

    def __del__(self) -> None:
        if not self.socket.closed:
            self.close()


class LoopSocket(Channel):
    """The socket of an event loop. It watches its descriptor: zmq.asyncio takes several iterations per message."""

    def __init__(self, context: zmq.Context[Any], server: ServerWatch, key: RunKey | None) -> None:
        super().__init__(context, server)
        self._loop = asyncio.get_running_loop()
        self._server_gone = False
        self._exchanges: dict[int, tuple[RequestExchange, asyncio.Future[None]]] = {}
        connect(self.socket, server.address, key)
        self._fd = self.socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self._receive)
        if server.fd >= 0:
            self._loop.add_reader(server.fd, self._server_ended)

    async def exchange(self, exchange: RequestExchange, messages: Iterable[Message]) -> None:
        """Send, and continue the exchange at each answer until its reply, or until ``left_s`` has passed."""
        if self._server_gone:
            raise self._server.ended_error()
        future: asyncio.Future[None] = self._loop.create_future()
        self._exchanges[exchange.seq] = exchange, future
        timer = self._loop.call_later(max(exchange.left_s, 0.0), _resolve, future)
        try:
            self.send(messages)
            await future
        finally:
            timer.cancel()
            self._exchanges.pop(exchange.seq, None)

    def send(self, messages: Iterable[Message]) -> None:
        """See ``Channel.send``."""
        try:
            super().send(messages)
        finally:
            # Hazard: sending may consume the edge that reports received messages; nothing else wakes the loop.
            self._loop.call_soon(self._receive)

    def close(self) -> None:
        """Close the socket; its requests raise ServerLost. Idempotent."""
        if self.socket.closed:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.remove_reader(self._fd)
            self._unwatch()
            self._fail(ServerLost(f"this connection to {self._server.address} is closed"))
        self.socket.close(linger=200)

    def _receive(self) -> None:
        while self.has_message():
            try:
                response, data = self.receive()
            except zmq.Again:  # only the rest of an interrupted message was there
                return
            except AsyncFlowError as error:
                self._fail(error)
                continue
            exchange, future = self._exchanges.get(response.seq, (None, None))
            if exchange is None or future is None:
                continue
            try:
                super().send(exchange.receive(response, data))
            except AsyncFlowError as error:
                if not future.done():
                    future.set_exception(error)
            if exchange.reply is not None:
                _resolve(future)

    def _server_ended(self) -> None:
        self._unwatch()
        self._server_gone = True
        self._loop.call_later(FINAL_MESSAGES_MS / 1000, lambda: self._fail(self._server.ended_error()))

    def _unwatch(self) -> None:
        if self._server.fd >= 0:
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


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
