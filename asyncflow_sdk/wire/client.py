"""Client: a session with a server. A repeated request has no second effect.

    client = Client("ipc:///run/x/queue")
    answer = client.request(body, timeout_s=30.0)            # threads: one socket each
    reply = await client.aexchange(body, timeout_s=30.0)     # event loops: one socket each

A request without an answer is sent again, of a large one only the lost pieces: see ``exchange``."""

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
from .client_sockets import FINAL_MESSAGES_MS, POLLIN, LoopSocket, ServerWatch, ThreadSocket
from .envelope import MAX_BYTES
from .exchange import Message, RequestExchange, SequenceNumbers, WireReply
from .keys import RunKey
from .sockets import context_of, transport_of

RESEND_S = 5.0
GRACE_S = 15.0  # how much longer than its own deadline a request waits for the server's answer
_ENVELOPE_BYTES = 64 << 10  # allowance for the envelope around a call


class _OwnSocket(threading.local):
    """The socket of the current thread."""

    channel: ThreadSocket | None = None

    def replace(self, channel: ThreadSocket | None) -> ThreadSocket | None:
        """Set the socket, and return the former one."""
        former, self.channel = self.channel, channel
        return former


class Client:
    """One session with the server at ``address``. Thread-safe; unusable in a child made by fork().

    ``key``: authenticates client and server to each other over tcp. ``insecure``: tcp to a server without keys.
    Raises ConfigError for a missing or needless key; the first request raises AccessDenied for a wrong one.
    ``bulk``: most traffic is payload. ``resend_s``: the silence before a request is repeated, or its progress
    queried. ``max_bytes``: largest request. ``interrupts``: calls of ``interrupt``."""

    def __init__(
        self, address: str, key: RunKey | None = None, *, insecure: bool = False, bulk: bool = False
    ) -> None:
        transport = transport_of(address)
        tcp = transport == "tcp"
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
        self.session, self.resend_s, self.max_bytes = secrets.token_hex(12), RESEND_S, MAX_BYTES
        self._pid = os.getpid()
        self._context = context_of(bulk)
        self.interrupts = 0
        self._lock = threading.RLock()
        self._numbers = SequenceNumbers(self.session)
        self._local = _OwnSocket()
        self._sockets: weakref.WeakSet[ThreadSocket] = weakref.WeakSet()  # a thread's socket ends with it
        self._loops: dict[asyncio.AbstractEventLoop, LoopSocket] = {}
        self._accepted = transport == "inproc"
        self._patient = transport == "ipc"  # make connections cut during the handshake again, whatever their number
        self._server = ServerWatch(address)
        self.closed = False

    @property
    def server_closed(self) -> bool:
        """True once the server has closed for good."""
        return self._server.closed

    def check(self) -> None:
        """Raises ServerLost once this client is closed, or the server for good; AsyncFlowError in a forked child."""
        if os.getpid() != self._pid:
            raise AsyncFlowError("a connection cannot be used in a child made by fork(); connect again in the child")
        if self.closed:
            raise ServerLost(f"this connection to {self.address} is closed")
        if self._server.closed:
            raise self._server.goodbye()

    def limit(self, max_bytes: int) -> None:
        """Set the server's limit of a request."""
        self.max_bytes = max_bytes

    def check_size(self, nbytes: int) -> None:
        """Raises ProtocolError for a request above ``max_bytes``, the server's limit."""
        size = nbytes + _ENVELOPE_BYTES
        if size > self.max_bytes:
            limit = f"this server takes at most {self.max_bytes}"
            raise ProtocolError(f"a call of {size} bytes is too large; {limit}: send fewer rows at a time")

    def use_key(self, key: RunKey) -> None:
        """Use another key for the next connections, and for this thread's. Call while no request is in progress."""
        with self._lock:
            self.key, self._accepted = key, False
            if (channel := self._local.replace(None)) is not None:
                self._sockets.discard(channel)
                channel.close()

    def watch(self, pid: int, key: str) -> None:
        """End requests with ServerLost when the server's process ends, if it is visible here. Call at most once."""
        self._server.watch(pid, key)

    def request(self, body: bytes, timeout_s: float, grace_s: float | None = None) -> bytes:
        """Return the body of the answer: see ``exchange``."""
        return self.exchange(body, timeout_s, grace_s=grace_s).body

    def exchange(
        self,
        body: bytes,
        timeout_s: float,
        payload: Sequence[Any] = (),
        *,
        grace_s: float | None = None,
        since: int | None = None,
        max_answer_bytes: int | None = None,
    ) -> WireReply:
        """Send a request with payload, and wait for the answer. ``payload``: contiguous buffers, which must not
        change before the call ends. ``since``: value of ``interrupts`` when the enclosing operation began.

        Raises ServerLost without an answer after ``timeout_s`` + ``grace_s`` (default ``GRACE_S``), when the server
        closes for good or its process ends, and on ``close``; WireError if interrupted since ``since``; ProtocolError
        for a request above ``max_bytes``, and for an answer in pieces above ``max_answer_bytes``; AccessDenied."""
        waits = (timeout_s, GRACE_S if grace_s is None else grace_s, self.resend_s)
        exchange = RequestExchange(self._numbers, body, payload, waits, max_answer_bytes)
        self.check_size(exchange.nbytes)
        with self._lock:
            self.check()
            if since is not None and since != self.interrupts:
                raise self._interrupted_error()
            if (channel := self._local.channel) is None:
                self._check_goodbyes()
                patient = None if self._accepted else self._patient
                channel = ThreadSocket(self._context, self._server, self.key, patient)
                self._local.replace(channel)
                self._sockets.add(channel)
            channel.enter()
        try:
            channel.send(exchange.begin())
            while exchange.reply is None:
                if (left_s := exchange.left_s) <= 0:
                    channel.send(self._resend(exchange, channel.failures))
                elif self._wait(channel, left_s):
                    with contextlib.suppress(zmq.Again):  # a signal handler's request has read it
                        response, data = channel.receive()
                        if response.seq == exchange.seq:
                            channel.send(exchange.receive(response, data))
            self._numbers.settle(exchange.seq)
            return exchange.reply
        except BaseException:
            cancellation = exchange.drop()
            with contextlib.suppress(zmq.ZMQError):
                channel.send(cancellation)
            raise
        finally:
            with self._lock:
                channel.leave()
                if self.closed:
                    channel.close()

    async def aexchange(self, body: bytes, timeout_s: float, payload: Sequence[Any] = ()) -> WireReply:
        """Like ``exchange``, on the running event loop. Cancelling it cancels the server's work."""
        exchange = RequestExchange(self._numbers, body, payload, (timeout_s, GRACE_S, self.resend_s))
        self.check_size(exchange.nbytes)
        self.check()
        channel = self._loop_socket()
        try:
            messages = exchange.begin()
            while True:
                await channel.exchange(exchange, messages)
                if exchange.reply is not None:
                    self._numbers.settle(exchange.seq)
                    return exchange.reply
                messages = self._resend(exchange) if exchange.left_s <= 0 else []
        except BaseException:
            cancellation = exchange.drop()
            with contextlib.suppress(zmq.ZMQError):
                channel.send(cancellation)
            raise

    def _resend(self, exchange: RequestExchange, failures: int = 0) -> list[Message]:
        """Return the messages to send after a silence. ``failures``: connections cut during the handshake."""
        self._check_goodbyes()
        if (messages := exchange.resend()) is not None:
            return messages
        if failures:
            why = (
                f"its server cut {failures} connections during the handshake: is it short of file descriptors? See"
                " its log and its events. Close clients, or raise its limit (ulimit -n)"
            )
        elif self._server.fd >= 0:
            why = f"its process {self._server.pid} lives; is it frozen, or out of time?"
        else:
            network = ", and does the network reach it" if transport_of(self.address) == "tcp" else ""
            why = f"does its process still live{network}?"
        raise ServerLost(f"{self.address} gave no answer in {time.monotonic() - exchange.began:.1f} s; {why}")

    def interrupt(self) -> None:
        """Raise WireError in the requests of all threads, later also in those with an earlier ``since``."""
        with self._lock:
            self.interrupts += 1
            for channel in list(self._sockets):
                if channel.busy:
                    channel.interrupt()

    def close(self) -> None:
        """Close the sockets. Idempotent. A request in another thread raises ServerLost, and that thread closes its
        socket: closing a socket in use by another thread crashes the process."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            if os.getpid() != self._pid:
                return
            for channel in list(self._sockets):
                if channel.busy:
                    channel.interrupt()
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
        """Close the socket of the running event loop. Call before the loop ends."""
        channel = self._loops.pop(asyncio.get_running_loop(), None)
        if channel is not None:
            channel.close()

    def _wait(self, channel: ThreadSocket, seconds: float) -> bool:
        """Return True if a message arrives within ``seconds``."""
        watched: list[tuple[Any, int]] = [(channel.socket, POLLIN), (channel.wake, POLLIN)]
        if self._server.fd >= 0:
            watched.append((self._server.fd, POLLIN))
        if channel.monitor is not None:
            watched.append((channel.monitor, POLLIN))
        ready = dict(zmq.zmq_poll(watched, int(seconds * 1000) + 1))
        if channel.monitor is not None and channel.monitor in ready and channel.authenticated():
            self._accepted = True
        if channel.wake in ready:
            channel.clear_interrupt()
            self.check()
            raise self._interrupted_error()
        if channel.socket in ready:
            return True
        if self._server.fd in ready and not channel.socket.poll(FINAL_MESSAGES_MS):
            raise self._server.ended_error()
        return False

    def _check_goodbyes(self) -> None:
        """Like ``check``, after reading idle threads' sockets: newer connections get no goodbye."""
        with self._lock:  # so that no thread begins to use an idle socket
            for channel in list(self._sockets):
                if not channel.busy:
                    channel.drain()
        self.check()

    def _interrupted_error(self) -> WireError:
        return WireError(f"a request to {self.address} was interrupted")

    def _loop_socket(self) -> LoopSocket:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._check_goodbyes()
            for ended in [each for each in list(self._loops) if each.is_closed()]:  # other threads change the dict
                if (theirs := self._loops.pop(ended, None)) is not None:
                    theirs.close()
            self._loops[loop] = LoopSocket(self._context, self._server, self.key)
        return self._loops[loop]
