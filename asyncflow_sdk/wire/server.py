"""The serving end: one thread owns a ROUTER socket; requests come in order, answers go out whenever they are known.

A request repeated by (session, seq) is not carried out again: it gets the answer it had, or waits for it.
Garbage is counted and dropped; the server and its other sessions go on. A message past the size limit cuts
only the connection that it came over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq

from ..errors import ConfigError, ProtocolError
from .envelope import MAX_BYTES, PROTOCOL, Request, Response, decode_request, encode
from .processes import watch

MAX_WAIT_S = 3600.0
"""The longest sleep between two rounds, whatever deadline comes next: a deadline may be infinite."""


_log = logging.getLogger(__name__)


class Handler(Protocol):
    """What a server calls, always from its one thread."""

    def request(self, session: str, ticket: int, body: bytes) -> None:
        """Carry out a request; ``Server.answer`` may be called now or later."""

    def dropped(self, session: str, ticket: int, answer: bytes | None) -> None:
        """Nobody waits for a request any more, nor read its answer. ``answer``: what it was; None if there was
        none yet."""

    def gone(self, session: str, reason: str) -> None:
        """The process of a session ended."""

    def idle(self) -> float | None:
        """Called after every round; returns seconds until it wants to be called again, None for never."""


@dataclass
class _Session:
    """Answers a session may still ask for again, and where to send them; and which requests have come at all.

    A request may be dropped over one socket before it comes over another (``early``): then it is carried out when
    it comes and taken back at once, as if it had come in order. What it gives back must not be lost with it.
    """

    answers: dict[int, bytes] = field(default_factory=dict)
    tickets: dict[int, int] = field(default_factory=dict)  # seq → ticket, unanswered
    routes: dict[int, bytes] = field(default_factory=dict)  # seq → socket it came from last
    done: int = 0
    low: int = 0  # every request up to here has come, or is in early
    ahead: set[int] = field(default_factory=set)  # those beyond of which that is so
    early: set[int] = field(default_factory=set)

    def has(self, seq: int) -> bool:
        """Whether a request has come before."""
        return seq not in self.early and (seq <= self.low or seq in self.ahead)

    def come(self, seq: int) -> bool:
        """A request comes for the first time. Returns whether it was dropped already."""
        if seq in self.early:
            self.early.remove(seq)
            return True
        self._pass(seq)
        return False

    def drop_early(self, seq: int) -> None:
        if seq not in self.early:
            self.early.add(seq)
            self._pass(seq)

    def _pass(self, seq: int) -> None:
        self.ahead.add(seq)
        while self.low + 1 in self.ahead:
            self.low += 1
            self.ahead.remove(self.low)

    def settle(self, seq: int) -> None:
        """Its answer arrived."""
        if self.answers.pop(seq, None) is not None:
            del self.routes[seq]

    def raise_done(self, done: int) -> None:
        """Every answer below has arrived, or is taken back."""
        self.done = done
        for seq in [s for s in self.answers if s < done]:
            self.settle(seq)


class Server:
    """Binds to ``addresses`` (inproc, ipc, tcp on loopback) and runs ``handler`` in a thread."""

    def __init__(self, addresses: list[str], handler: Handler) -> None:
        self._handler = handler
        self._sessions: dict[str, _Session] = {}
        self._by_ticket: dict[int, tuple[str, int]] = {}
        self._next_ticket = 1
        self._pidfds: dict[int, str] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self.garbage = 0
        self._context: zmq.Context[Any] = zmq.Context.instance()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 200  # milliseconds: last answers leave
        self._router.maxmsgsize = MAX_BYTES
        self._router.sndhwm = self._router.rcvhwm = 0  # bounded by one request a client thread, not by drops
        try:
            self.addresses = [self._bind(address) for address in addresses]
        except BaseException:
            self._router.close()
            raise
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_out, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="asyncflow-server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the server's thread. From any thread."""
        self._calls.append(function)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_in, b"\0")

    def stop(self) -> None:
        """Finish the round under way, close the socket, end the thread. From any other thread."""
        if self._thread.is_alive():
            self.call(self._stop)
            self._thread.join()

    def answer(self, ticket: int, body: bytes) -> None:
        """Answer a request. In the server's thread; a ticket nobody waits for any more is ignored."""
        session_id, seq = self._by_ticket.pop(ticket, ("", 0))
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.tickets.pop(seq, None)
        session.answers[seq] = body
        self._send(session.routes[seq], seq, body)

    def watch(self, session: str, pid: int, key: str) -> None:
        """Call ``gone`` when the process of a session ends. Processes of other hosts cannot be watched."""
        if pid == os.getpid():
            return
        try:
            fd = watch(pid, key)
        except ProcessLookupError:
            self.call(lambda: self._handler.gone(session, f"process {pid} ended"))
            return
        if fd is not None:
            self._pidfds[fd] = session
            self._poller.register(fd, zmq.POLLIN)

    def forget(self, session: str) -> None:
        """A session ended: what it may ask for again is dropped, and its process no longer watched for it."""
        known = self._sessions.pop(session, None)
        for ticket in known.tickets.values() if known else ():
            self._by_ticket.pop(ticket, None)
        for fd in [fd for fd, watched in self._pidfds.items() if watched == session]:
            self._unwatch(fd)

    def _bind(self, address: str) -> str:
        transport, _, rest = address.partition("://")
        if transport not in ("inproc", "ipc", "tcp"):
            raise ConfigError(f"cannot listen on {address}: known transports are inproc, ipc and tcp")
        if transport == "tcp" and rest.rsplit(":", 1)[0] not in ("127.0.0.1", "localhost", "[::1]"):
            raise ConfigError(f"{address} is not on loopback; only 127.0.0.1 is served without keys")
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from None
        return self._router.get_string(zmq.LAST_ENDPOINT) if address.startswith("tcp") else address

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                timeout = self._idle()
                wait_s = MAX_WAIT_S if timeout is None else min(max(0.0, timeout), MAX_WAIT_S)
                ready = dict(self._poller.poll(int(wait_s * 1000) + 1))
                for fd in [f for f in ready if f in self._pidfds]:
                    session = self._unwatch(fd)
                    try:
                        self._handler.gone(session, "its process ended")
                    except Exception:  # one session's end must not be everybody's
                        _log.exception("the server failed at the end of a session")
                if self._wake_out in ready:
                    self._run_calls()
                if self._router in ready:
                    self._receive()
            self._idle()
        finally:
            self._router.close()
            for fd in (*self._pidfds, self._wake_out, self._wake_in):
                os.close(fd)

    def _idle(self) -> float | None:
        try:
            return self._handler.idle()
        except Exception:
            _log.exception("the server failed between requests")
            return 1.0

    def _run_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_out, 4096)
        while self._calls:
            self._calls.popleft()()

    def _unwatch(self, fd: int) -> str:
        session = self._pidfds.pop(fd)
        self._poller.unregister(fd)
        os.close(fd)
        return session

    def _receive(self) -> None:
        """All requests that have come, but not for ever: deaths and deadlines get their turn."""
        for _ in range(64):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"a request of {len(frames) - 1} frames")
                request = decode_request(frames[1])
            except ProtocolError:
                self.garbage += 1
                continue
            self._accept(frames[0], request)

    def _accept(self, route: bytes, request: Request) -> None:
        session = self._sessions.setdefault(request.session, _Session())
        for seq in request.dropped:
            self._drop(request.session, session, seq)
        for seq in request.settled:
            session.settle(seq)
        if request.done > session.done:
            session.raise_done(request.done)
        if not request.body:
            return
        seq = request.seq
        if session.has(seq):
            if seq in session.routes:
                session.routes[seq] = route
            if seq in session.answers:
                self._send(route, seq, session.answers[seq])
            return
        dropped = session.come(seq)
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        session.routes[seq], session.tickets[seq] = route, ticket
        self._by_ticket[ticket] = (request.session, seq)
        self._handler.request(request.session, ticket, request.body)
        if dropped:
            self._drop(request.session, session, seq)

    def _drop(self, session_id: str, session: _Session, seq: int) -> None:
        if not session.has(seq):
            session.drop_early(seq)
            return
        session.routes.pop(seq, None)
        ticket = session.tickets.pop(seq, None)
        answer = session.answers.pop(seq, None)
        if ticket is not None:
            self._by_ticket.pop(ticket, None)
            self._handler.dropped(session_id, ticket, None)
        elif answer is not None:
            self._handler.dropped(session_id, 0, answer)

    def _send(self, route: bytes, seq: int, body: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # its client is gone; the answer stays for a retry
            self._router.send_multipart([route, encode(Response(PROTOCOL, seq, body))], zmq.NOBLOCK)
