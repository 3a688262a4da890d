"""The asking end: a session whose requests can be repeated without a second effect.

``ask`` serves threads (each owns a socket), ``arequest`` serves an event loop (one socket a loop). A request is
sent again while no answer comes, so an answer lost with a connection is not lost; of a large one only what is missing
(see ``exchange``). Nobody waits for a server that has said goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import zmq

from ..errors import AsyncFlowError, ConfigError, ProtocolError, ServerLost, WireError
from .client_sockets import LAST_WORDS_MS, READABLE, LoopSocket, ServerWatch, ThreadSocket
from .envelope import MAX_BYTES
from .exchange import Message, RequestExchange, WireReply
from .fragments import nbytes_of
from .keys import RunKey
from .sequence_numbers import SequenceNumbers
from .sockets import context_of, transport_of

RESEND_S = 5.0
GRACE_S = 15.0
"""How much longer than its own deadline a request waits for the server's word on it."""
SLOWEST_BYTES_PER_S = 10e6
"""How fast payload is counted on to travel: a request may take so much longer than its deadline."""
_ENVELOPE_BYTES = 64 << 10
"""Room for what goes around a call."""


class Client:
    """One session with the server at ``address``. Thread-safe; refuses to work after a bare fork.

    ``key``: proves to a server over tcp who asks, and knows it by its own. Raises ConfigError where a key
    is missing or has no use; the first request raises AccessDenied when server and key do not fit each other.
    ``insecure``: tcp to a server that has no keys. ``bulk``: most of what comes is payload.
    ``resend_s``: after so long a silence a request is sent again, or asked after; None: ``RESEND_S``.
    """

    def __init__(
        self,
        address: str,
        key: RunKey | None = None,
        *,
        insecure: bool = False,
        bulk: bool = False,
        resend_s: float | None = None,
    ) -> None:
        tcp = transport_of(address) == "tcp"
        if key is not None and not tcp:
            raise ConfigError(f"{address} is on this host and takes no key; only tcp addresses do")
        if key is not None and insecure:
            raise ConfigError(f"{address}: give key= or insecure=True, which uses no key")
        if key is None and tcp and not insecure:
            raise ConfigError(
                f"{address} needs a key, and this user has none for it on this host; pass key=, a copy of the run's"
                " run.key, or insecure=True if it is served without keys"
            )
        self.address, self.key, self.insecure = address, key, insecure
        self.session = secrets.token_hex(12)
        self._own_resend_s = resend_s
        self._pid = os.getpid()
        self._context = context_of(bulk)
        self.interrupts = 0
        self._lock = threading.Lock()
        self._numbers = SequenceNumbers(self.session)
        self._local = threading.local()
        self._sockets: weakref.WeakSet[ThreadSocket] = weakref.WeakSet()  # a thread's own goes with its thread
        self._loops: dict[asyncio.AbstractEventLoop, LoopSocket] = {}
        self._let_in = transport_of(address) == "inproc"
        self._server = ServerWatch()
        self.max_bytes = MAX_BYTES
        self.closed = False
        self.over = False
        """The server has said goodbye: it closed for good, and all requests end with ServerLost."""

    @property
    def _resend_s(self) -> float:
        return RESEND_S if self._own_resend_s is None else self._own_resend_s

    def check(self) -> None:
        """Raises unless requests can be made: ServerLost once closed, here or for good at the server; AsyncFlowError in a
        forked child."""
        if os.getpid() != self._pid:
            raise AsyncFlowError("a connection cannot be used in a child made by fork(); connect again in the child")
        if self.closed:
            raise ServerLost(f"this connection to {self.address} is closed")
        if self.over:
            raise self._goodbye()

    def fits(self, nbytes: int) -> None:
        """Raises ProtocolError for a request of more bytes than ``max_bytes``, the most the server takes."""
        size = nbytes + _ENVELOPE_BYTES
        if size > self.max_bytes:
            raise ProtocolError(
                f"a call of {size} bytes is too large; this server takes at most {self.max_bytes}: send fewer rows"
                " at a time"
            )

    def watch(self, pid: int, key: str) -> None:
        """From now on requests end with ServerLost when this process, the server's, does; if it can be seen."""
        self._server = ServerWatch(pid, key)

    def request(self, body: bytes, timeout_s: float, grace_s: float | None = None) -> bytes:
        """Send and wait. Raises ServerLost when no answer comes in ``timeout_s`` and a grace, when the server's
        process ends or says goodbye, or on close; AccessDenied."""
        return self.exchange(body, timeout_s, grace_s=grace_s).body

    def exchange(
        self,
        body: bytes,
        timeout_s: float,
        payload: Sequence[Any] = (),
        *,
        grace_s: float | None = None,
        since: int | None = None,
        most_bytes: int | None = None,
    ) -> WireReply:
        """The same with payload: contiguous buffers, which must not change before this returns or raises. ``since``:
        what ``interrupts`` was when that began which this request belongs to. ``most_bytes``: raise ProtocolError for an
        answer in fragments that has more; None: any number."""
        self.fits(size := nbytes_of(body, payload))
        with self._lock:
            self.check()
            if since is not None and since != self.interrupts:
                raise self._interrupted()
            channel = self._thread_socket()
            channel.rest()
            channel.busy += 1
        seq, began = self._numbers.begin(), time.monotonic()
        try:
            exchange = RequestExchange(self._numbers, seq, body, payload, most_bytes)
            grace_s = GRACE_S if grace_s is None else grace_s
            until = began + _time_for(size, timeout_s, grace_s)
            channel.send(exchange.begin())
            while True:
                resend = min(until, time.monotonic() + self._resend_s)
                while (left := resend - time.monotonic()) > 0:
                    if not self._wait(channel, left):
                        continue
                    response, data = channel.receive()
                    if channel.told_goodbye:
                        raise self._goodbye()
                    if response.seq != seq:
                        continue
                    known = exchange.answer_bytes
                    channel.send(exchange.hear(response, data))
                    if exchange.reply is not None:
                        self._numbers.answered(seq)
                        return exchange.reply
                    if exchange.answer_bytes != known:
                        until = max(until, time.monotonic() + _time_for(exchange.answer_bytes, 0.0, grace_s))
                    resend = min(until, time.monotonic() + self._resend_s)
                self._overhear()
                if time.monotonic() >= until:
                    raise self._lost(began, 0 if channel.handshake is None else channel.handshake.cut)
                channel.send(exchange.again())
        except BaseException:
            self._numbers.drop(seq)
            with contextlib.suppress(AsyncFlowError, zmq.ZMQError):
                if channel.torn and channel.busy == 1:
                    channel = self._renew_thread_socket(channel)
                channel.socket.send(self._numbers.frame(0, b""), zmq.NOBLOCK)
            raise
        finally:
            with self._lock:
                channel.busy -= 1
                if self.closed:
                    channel.close()

    def send(self, body: bytes) -> None:
        """Send, and wait for no answer: whether it arrives is not known."""
        with self._lock:
            self.check()
            channel = self._thread_socket()
            seq = self._numbers.begin()
            channel.send(RequestExchange(self._numbers, seq, body).begin())
            self._numbers.drop(seq)

    async def arequest(self, body: bytes, timeout_s: float) -> bytes:
        """The same on the running event loop. Cancelling it takes the request back."""
        return (await self.aexchange(body, timeout_s)).body

    async def aexchange(self, body: bytes, timeout_s: float, payload: Sequence[Any] = ()) -> WireReply:
        """The same with payload, which must not change before this returns or raises."""
        self.fits(size := nbytes_of(body, payload))
        self.check()
        channel = self._loop_socket()
        seq, began = self._numbers.begin(), time.monotonic()
        try:
            exchange = RequestExchange(self._numbers, seq, body, payload)
            until = began + _time_for(size, timeout_s, GRACE_S)
            messages, heard, known = exchange.begin(), 0, 0
            while True:
                await channel.exchange(exchange, messages, min(self._resend_s, until - time.monotonic()))
                if exchange.reply is not None:
                    self._numbers.answered(seq)
                    return exchange.reply
                self._overhear()
                if exchange.answer_bytes != known:
                    known = exchange.answer_bytes
                    until = max(until, time.monotonic() + _time_for(known, 0.0, GRACE_S))
                if time.monotonic() >= until:
                    raise self._lost(began)
                messages = [] if exchange.heard != heard else exchange.again()
                heard = exchange.heard
        except BaseException:
            self._numbers.drop(seq)
            with contextlib.suppress(zmq.ZMQError):
                channel.send([Message(self._numbers.frame(0, b""))])
            raise

    def interrupt(self) -> None:
        """Requests under way in other threads raise WireError now, and so does each that is to belong to what was begun
        before."""
        with self._lock:
            self.interrupts += 1
            for channel in list(self._sockets):
                if channel.busy:
                    channel.rouse()

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
                if channel.busy:
                    channel.rouse()
                else:
                    channel.close()
        here = asyncio._get_running_loop()
        for loop, loop_channel in list(self._loops.items()):
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

    def _wait(self, channel: ThreadSocket, seconds: float) -> bool:
        """Whether there is something to receive within so many seconds."""
        watched: list[tuple[Any, int]] = [(channel.socket, READABLE), (channel.wake, READABLE)]
        if self._server.ended:
            raise self._ended()
        if self._server.fd >= 0:
            watched.append((self._server.fd, READABLE))
        if channel.handshake is not None:
            watched.append((channel.handshake.monitor, READABLE))
        ready = dict(zmq.zmq_poll(watched, int(seconds * 1000) + 1))
        if channel.handshake is not None and channel.handshake.monitor in ready and channel.handshake.read():
            channel.handshake, self._let_in = None, True
        if channel.wake in ready:
            channel.rest()
            self.check()
            raise self._interrupted()
        if channel.socket in ready:
            return True
        if self._server.fd in ready and not channel.socket.poll(LAST_WORDS_MS):
            raise self._ended()
        return False

    def _lost(self, began: float, cut: int = 0) -> ServerLost:
        """``cut``: connections that were cut before they were made."""
        took_s = time.monotonic() - began
        if cut:
            why = (
                f"its server cut {cut} connections as they were made: is it short of file descriptors? Its log and its"
                " events say so. Close clients, or raise its limit (ulimit -n)"
            )
        elif self._server.fd >= 0:
            why = f"its process {self._server.pid} lives; is it frozen, or out of time?"
        else:
            network = ", and does the network reach it" if transport_of(self.address) == "tcp" else ""
            why = f"does its process still live{network}?"
        return ServerLost(f"{self.address} gave no answer in {took_s:.1f} s; {why}")

    def _overhear(self) -> None:
        """Raises what ``check`` does, also for a goodbye that came over a socket on which no thread waits: a connection that
        was made after it hears none."""
        with self._lock:
            self._overhear_idle()

    def _overhear_idle(self) -> None:
        """The same, under the lock: a socket that is not busy is nobody's meanwhile."""
        self.over |= any(channel.overhear() for channel in list(self._sockets) if not channel.busy)
        self.check()

    def _goodbye(self) -> ServerLost:
        self.over = True
        return ServerLost(f"the run at {self.address} was closed by the process that served it")

    def _interrupted(self) -> WireError:
        return WireError(f"a request to {self.address} was interrupted")

    def _ended(self) -> ServerLost:
        return ServerLost(f"the server at {self.address} is gone: its process {self._server.pid} has ended")

    def _thread_socket(self) -> ThreadSocket:
        channel: ThreadSocket | None = getattr(self._local, "channel", None)
        if channel is None:
            self._overhear_idle()
            channel = self._local.channel = ThreadSocket(self._context, self.address, self.key, not self._let_in)
            self._sockets.add(channel)
        return channel

    def _renew_thread_socket(self, channel: ThreadSocket) -> ThreadSocket:
        """Another socket for this thread: of a message that was torn, the rest would be read as another."""
        with self._lock:
            self._sockets.discard(channel)
        channel.close(linger=0)
        with self._lock:
            del self._local.channel
            self.check()
            new = self._thread_socket()
            new.busy, channel.busy = 1, 0
            return new

    def _loop_socket(self) -> LoopSocket:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._overhear()
            for ended in [known for known in list(self._loops) if known.is_closed()]:  # other threads add theirs
                if (theirs := self._loops.pop(ended, None)) is not None:
                    theirs.close()
            self._loops[loop] = LoopSocket(
                self._context, self.address, self.key, self._server, self._ended, self._goodbye
            )
        return self._loops[loop]


def _time_for(nbytes: int, timeout_s: float, grace_s: float) -> float:
    """Seconds; a deadline that is not a number waits for nothing, and must not wait for ever."""
    return max(0.0, timeout_s) + grace_s + nbytes / SLOWEST_BYTES_PER_S
