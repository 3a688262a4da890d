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
import weakref
from typing import Any

import zmq
import zmq.asyncio

from ..errors import AsyncFlowError, ProtocolError, ServerLost
from .envelope import decode_response
from .numbering import Numbering

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
        self._numbering = Numbering(self.session)
        self._local = threading.local()
        self._sockets: weakref.WeakSet[_ThreadSocket] = weakref.WeakSet()  # a thread's own goes with its thread
        self._loops: dict[asyncio.AbstractEventLoop, _LoopSocket] = {}
        self.closed = False

    def check(self) -> None:
        """Raises unless requests can be made: ServerLost once closed, AsyncFlowError in a forked child."""
        if os.getpid() != self._pid:
            raise AsyncFlowError("a connection cannot be used in a child made by fork(); connect again in the child")
        if self.closed:
            raise ServerLost(f"this connection to {self.address} is closed")

    def ask(self, body: bytes, timeout_s: float) -> bytes:
        """Send and wait. Raises ServerLost when no answer comes in ``timeout_s`` and a grace, or on close."""
        with self._lock:
            self.check()
            channel = self._thread_socket()
            channel.busy += 1
        seq, socket = self._numbering.begin(), channel.socket
        try:
            until = time.monotonic() + timeout_s + GRACE_S
            while True:
                socket.send(self._numbering.frame(seq, body))
                resend = min(until, time.monotonic() + RESEND_S)
                while (left := resend - time.monotonic()) > 0:
                    if not socket.poll(int(left * 1000) + 1):
                        continue
                    response = decode_response(socket.recv())
                    if response.seq == seq:
                        self._numbering.answered(seq)
                        return response.body
                self.check()
                if time.monotonic() >= until:
                    raise self._lost(timeout_s)
        except BaseException:
            self._numbering.drop(seq)
            with contextlib.suppress(zmq.ZMQError):
                socket.send(self._numbering.frame(0, b""), zmq.NOBLOCK)
            raise
        finally:
            with self._lock:
                channel.busy -= 1
                if self.closed:
                    channel.close()

    async def aask(self, body: bytes, timeout_s: float) -> bytes:
        """The same on the running event loop. Cancelling it takes the request back."""
        self.check()
        channel = self._loop_socket()
        seq = self._numbering.begin()
        try:
            until = time.monotonic() + timeout_s + GRACE_S
            future = channel.expect(seq)
            while True:
                await channel.socket.send(self._numbering.frame(seq, body))
                left = min(RESEND_S, until - time.monotonic())
                done, _ = await asyncio.wait([future], timeout=max(left, 0.0))
                if done:
                    answer = future.result()
                    self._numbering.answered(seq)
                    return answer
                if time.monotonic() >= until:
                    raise self._lost(timeout_s)
        except BaseException:
            self._numbering.drop(seq)
            with contextlib.suppress(zmq.ZMQError):
                channel.socket.send(self._numbering.frame(0, b""), zmq.NOBLOCK)
            raise
        finally:
            channel.waiting.pop(seq, None)

    def close(self) -> None:
        """Close this client's sockets. Idempotent. A request under way in another thread ends with ServerLost,
        and closes its socket itself: a socket closed under a thread that uses it takes the process down."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            if os.getpid() != self._pid:
                return
            for channel in list(self._sockets):
                if not channel.busy:
                    channel.close()
        here = asyncio._get_running_loop()
        for loop, loop_channel in self._loops.items():
            if loop.is_running() and loop is not here:
                loop.call_soon_threadsafe(loop_channel.close)
            else:
                loop_channel.close()
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

    def _thread_socket(self) -> _ThreadSocket:
        channel: _ThreadSocket | None = getattr(self._local, "channel", None)
        if channel is None:
            channel = self._local.channel = _ThreadSocket(self._context, self.address)
            self._sockets.add(channel)
        return channel

    def _loop_socket(self) -> _LoopSocket:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            for ended in [known for known in self._loops if known.is_closed()]:
                self._loops.pop(ended).close()
            self._loops[loop] = _LoopSocket(zmq.asyncio.Context.shadow(self._context), self.address)
        return self._loops[loop]


class _ThreadSocket:
    """The socket of one thread. ``busy``: requests under way on it (two, when a signal handler asks)."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.busy = 0
        self.socket = context.socket(zmq.DEALER)
        _configure(self.socket)
        self.socket.connect(address)

    def close(self) -> None:
        self.socket.close(linger=200)

    def __del__(self) -> None:
        if not self.socket.closed:
            self.close()


class _LoopSocket:
    """One socket and one receiving task of an event loop."""

    def __init__(self, context: Any, address: str) -> None:
        self.address = address
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
            self._fail(ServerLost(f"this connection to {self.address} is closed"))
        self.socket.close(linger=200)

    async def _receive(self) -> None:
        while True:
            try:
                response = decode_response(await self.socket.recv())
            except ProtocolError as error:
                self._fail(error)
                continue
            future = self.waiting.get(response.seq)
            if future is not None and not future.done():
                future.set_result(response.body)

    def _fail(self, error: AsyncFlowError) -> None:
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(error)


def _configure(socket: Any) -> None:
    socket.linger = 200  # milliseconds: a last acknowledgement leaves, a dead server holds up nothing
    socket.sndhwm = socket.rcvhwm = 0  # a requester has a request or two under way; nothing is dropped
