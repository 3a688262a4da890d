"""The asking end: a session whose requests can be repeated without a second effect.

``ask`` serves threads (each owns a socket), ``aask`` serves an event loop (one socket a loop). A request is
sent again while no answer comes, so an answer lost with a connection is not lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
from typing import Any

import zmq
import zmq.asyncio

from ..errors import AsyncFlowError, ServerLost
from .envelope import MAX_BYTES, PROTOCOL, Request, decode_response, encode

RESEND_S = 5.0
GRACE_S = 15.0
"""How much longer than its own deadline a request waits for the server's word on it."""


class Client:
    """One session with the server at ``address``. Thread-safe; refuses to work after a bare fork."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.session = secrets.token_hex(12)
        self._pid = os.getpid()
        self._context: zmq.Context[Any] = zmq.Context.instance()
        self._lock = threading.Lock()
        self._seq = 0
        self._open: set[int] = set()
        self._dropped: list[int] = []
        self._local = threading.local()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._loops: dict[asyncio.AbstractEventLoop, _LoopSocket] = {}
        self.closed = False

    def ask(self, body: bytes, timeout_s: float) -> bytes:
        """Send and wait. Raises ServerLost when no answer comes in ``timeout_s`` and a grace."""
        seq, socket = self._begin(), self._socket()
        try:
            until = time.monotonic() + timeout_s + GRACE_S
            while True:
                socket.send(self._frame(seq, body))
                resend = min(until, time.monotonic() + RESEND_S)
                while (left := resend - time.monotonic()) > 0:
                    if not socket.poll(int(left * 1000) + 1):
                        continue
                    response = decode_response(socket.recv())
                    if response.seq == seq:
                        return response.body
                if time.monotonic() >= until:
                    raise ServerLost(
                        f"{self.address} gave no answer in {timeout_s + GRACE_S:.0f} s; is its run still alive?"
                    )
        except BaseException:
            self._drop(seq)
            with contextlib.suppress(zmq.ZMQError, ServerLost):
                socket.send(self._frame(0, b""), zmq.NOBLOCK)
            raise
        finally:
            self._finish(seq)

    async def aask(self, body: bytes, timeout_s: float) -> bytes:
        """The same on the running event loop. Cancelling it takes the request back."""
        seq, channel = self._begin(), self._loop_socket()
        try:
            until = time.monotonic() + timeout_s + GRACE_S
            future = channel.expect(seq)
            while True:
                await channel.socket.send(self._frame(seq, body))
                left = min(RESEND_S, until - time.monotonic())
                done, _ = await asyncio.wait([future], timeout=max(left, 0.0))
                if done:
                    return future.result()
                if time.monotonic() >= until:
                    raise ServerLost(
                        f"{self.address} gave no answer in {timeout_s + GRACE_S:.0f} s; is its run still alive?"
                    )
        except BaseException:
            self._drop(seq)
            with contextlib.suppress(zmq.ZMQError):
                channel.socket.send(self._frame(0, b""), zmq.NOBLOCK)
            raise
        finally:
            channel.waiting.pop(seq, None)
            self._finish(seq)

    def close(self) -> None:
        """Close this client's sockets. No request may be under way."""
        self.closed = True
        if os.getpid() == self._pid:
            for socket in self._sockets:
                socket.close(linger=200)
            for channel in self._loops.values():
                channel.close()
        self._sockets.clear()
        self._loops.clear()

    async def aclose_loop(self) -> None:
        """Close what belongs to the running event loop, before the loop ends."""
        channel = self._loops.pop(asyncio.get_running_loop(), None)
        if channel is not None:
            channel.close()
            await asyncio.gather(channel.task, return_exceptions=True)

    def _lost(self, timeout_s: float) -> ServerLost:
        return ServerLost(
            f"{self.address} gave no answer in {timeout_s + GRACE_S:.0f} s; does its process still live?"
        )

    def _begin(self) -> int:
        if self.closed:
            raise ServerLost(f"this connection to {self.address} is closed")
        if os.getpid() != self._pid:
            raise AsyncFlowError("a connection cannot be used in a child made by fork(); connect again in the child")
        with self._lock:
            self._seq += 1
            self._open.add(self._seq)
            return self._seq

    def _finish(self, seq: int) -> None:
        with self._lock:
            self._open.discard(seq)

    def _drop(self, seq: int) -> None:
        with self._lock:
            self._dropped.append(seq)

    def _frame(self, seq: int, body: bytes) -> bytes:
        with self._lock:
            dropped, self._dropped = tuple(self._dropped), []
            done = min(self._open, default=self._seq + 1)
        return encode(Request(PROTOCOL, self.session, seq, done, dropped, body))

    def _socket(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] | None = getattr(self._local, "socket", None)
        if socket is None or socket.closed:
            socket = self._context.socket(zmq.DEALER)
            _configure(socket)
            socket.connect(self.address)
            self._local.socket = socket
            with self._lock:
                self._sockets.append(socket)
        return socket

    def _loop_socket(self) -> _LoopSocket:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops[loop] = _LoopSocket(zmq.asyncio.Context.shadow(self._context), self.address)
        return self._loops[loop]


class _LoopSocket:
    """One socket and one receiving task of an event loop."""

    def __init__(self, context: Any, address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        _configure(self.socket)
        self.socket.connect(address)
        self.waiting: dict[int, asyncio.Future[bytes]] = {}
        self.task = asyncio.get_running_loop().create_task(self._receive(), name="asyncflow-receive")

    def expect(self, seq: int) -> asyncio.Future[bytes]:
        self.waiting[seq] = asyncio.get_running_loop().create_future()
        return self.waiting[seq]

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self.task.cancel()
        self.socket.close(linger=200)

    async def _receive(self) -> None:
        while True:
            response = decode_response(await self.socket.recv())
            future = self.waiting.get(response.seq)
            if future is not None and not future.done():
                future.set_result(response.body)


def _configure(socket: Any) -> None:
    socket.linger = 200  # milliseconds: a last acknowledgement leaves, a dead server holds up nothing
    socket.maxmsgsize = MAX_BYTES
    socket.sndhwm = socket.rcvhwm = 0  # a requester has a request or two under way; nothing is dropped
