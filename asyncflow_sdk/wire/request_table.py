"""RequestTable: all sessions of a server with their requests, and the answers not yet confirmed. A
request repeated by (session, seq) is not executed again: it gets its stored answer, or waits for it.

It uses no socket, so a recorded run is replayed through it: see ``RequestTable.replay``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

from ..errors import ProtocolError, WireError
from .router_sockets import Route
from .uploads import Download

MOST_SESSIONS, HOST_SESSIONS, CONNECTION_SESSIONS = 8192, 4096, 16
"""The most sessions of a server, of a host (a process on this one), and of a connection: others find room."""
MOST_BYTES, SESSION_BYTES = 1 << 30, 64 << 20
"""The most bytes held for unconfirmed requests of all sessions, and of one."""
CHECK_BYTES = 16 << 20
REQUEST_BYTES = 1 << 10
"""Held for each unconfirmed request beside its body, later its answer."""
MAX_EARLY = 1 << 16
Maker: TypeAlias = Callable[[], tuple[bytes, Sequence[Any]]]
"""Makes an answer each time it is sent."""
MAX_CONNECTIONS = 1024
"""Connections remembered for one session."""


class RequestHandler(Protocol):
    """Executes requests. All calls come from one thread."""

    def request(self, session: str, ticket: int, body: bytes, payload: Any) -> None:
        """Execute a request. Call ``Server.answer`` now or later. ``payload``: the sink returned by
        ``sink``, filled unless it has an error; None for a request without payload."""

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        """The client cancelled a request, or will not read its answer. ``answer``: None if there
        is none yet. ``ticket`` 0 without an answer: the request has not arrived yet."""


@dataclass
class SessionState:
    """Answers are kept until the client confirms them, so a repeated request has no second effect.

    The cancellation of a request may arrive before the request, over another socket (``early``).
    The request is then executed on arrival and cancelled at once, as if both had arrived in order:
    a lease that it would return must not be lost.
    """

    TRANSIENT: ClassVar[frozenset[str]] = frozenset(
        {"makers", "downloads", "routes", "connections", "keys", "host", "sizes"}
    )

    answers: dict[int, bytes] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)  # answers rendered by Handler.make each time they are sent
    makers: dict[int, Maker] = field(default_factory=dict)  # or by a function
    downloads: dict[int, Download] = field(default_factory=dict)  # answers being sent: large, or with payload
    tickets: dict[int, int] = field(default_factory=dict)  # seq → ticket of unanswered requests
    routes: dict[int, Route | None] = field(default_factory=dict)  # seq → connection of its last message
    connections: dict[Route, None] = field(default_factory=dict)  # in the order of their first message
    keys: tuple[str, ...] = ()  # a client uses them in this order: none before the last used one is accepted
    host: str = ""  # IP address, or process of this host, at the other end of the newest connection
    sizes: dict[int, int] = field(default_factory=dict)  # seq → bytes held for an unconfirmed request
    done: int = 0
    low: int = 0  # all requests up to here were received, or are in early
    ahead: set[int] = field(default_factory=set)  # the same for requests above low
    early: set[int] = field(default_factory=set)

    @property
    def held_bytes(self) -> int:
        """Bytes held for unconfirmed requests beside the largest one: any answer may be large."""
        return sum(self.sizes.values()) - max(self.sizes.values(), default=0)

    def accept(self, keys: tuple[str, ...]) -> None:
        """Accept messages by these keys, too; by no earlier one once a later one was used."""
        self.keys += keys

    def add_connection(self, route: Route, key: str, host: str) -> None:
        """Keep a connection; above MAX_CONNECTIONS the first, which joined, and the newest. Raises
        ProtocolError for a connection of another client."""
        if self.keys:
            if key not in self.keys:
                raise ProtocolError("a message in the session of another client")
            self.keys = self.keys[self.keys.index(key) :]
        self.connections[route], self.host = None, host
        if len(self.connections) > MAX_CONNECTIONS:
            del self.connections[next(itertools.islice(self.connections, 1, None))]

    def is_known(self, seq: int) -> bool:
        """True if the request has arrived before."""
        return seq not in self.early and (seq <= self.low or seq in self.ahead)

    def receive(self, seq: int, route: Route | None, ticket: int, nbytes: int) -> bool:
        """Record the first arrival of a request. Return True if it was cancelled before."""
        self.routes[seq], self.tickets[seq], self.sizes[seq] = route, ticket, nbytes
        if seq in self.early:
            self.early.remove(seq)
            return True
        self._mark(seq)
        return False

    def answer(self, seq: int, body: bytes, made: bool, make: Maker | None) -> int:
        """Keep the answer of a request; see ``Server.answer``. Return the bytes held for it."""
        # the request of ``make`` is held until the answer is confirmed
        nbytes = len(body) + REQUEST_BYTES if make is None else self.sizes.get(seq, 0)
        self.answers[seq], self.sizes[seq] = body, nbytes
        self.tickets.pop(seq, None)
        if made:
            self.made.add(seq)
        if make is not None:
            self.makers[seq] = make
        return nbytes

    def download(self, seq: int, body: bytes, payload: Sequence[Any]) -> Download:
        """Keep an answer while it is being sent."""
        download = self.downloads[seq] = Download(body, payload)
        return download

    def reroute(self, seq: int, route: Route) -> None:
        """Answer a repeated request over the connection of its last message."""
        if seq in self.routes:
            self.routes[seq] = route

    def drop_early(self, seq: int) -> None:
        """Record the cancellation of a request that has not arrived. Raises ProtocolError above MAX_EARLY."""
        if len(self.early) >= MAX_EARLY:
            raise ProtocolError(f"{MAX_EARLY} requests were cancelled, and have not arrived")
        self.early.add(seq)
        self._mark(seq)

    def _mark(self, seq: int) -> None:
        if seq == self.low + 1 and not self.ahead:
            self.low = seq
            return
        self.ahead.add(seq)
        self._advance()

    def _advance(self) -> None:
        while self.low + 1 in self.ahead:
            self.low += 1
            self.ahead.remove(self.low)

    def confirm(self, seq: int) -> None:
        """The client has received this answer: forget it."""
        if self.forget(seq) is not None:
            self.routes.pop(seq, None)

    def forget(self, seq: int) -> bytes | None:
        """Remove and return an answer; None if there is none."""
        self.sizes.pop(seq, None)
        self.made.discard(seq)
        self.makers.pop(seq, None)
        self.downloads.pop(seq, None)
        return self.answers.pop(seq, None)

    def forget_connections(self) -> None:
        """Forget those to an earlier server, and the sizes: confirmations are not recorded."""
        self.routes = dict.fromkeys((*self.answers, *self.tickets))
        self.sizes.clear()

    def release_downloads(self, before_s: float) -> None:
        """Release downloads sent, or inactive since ``before_s``; a retry makes them again."""
        for seq in [seq for seq, each in self.downloads.items() if each.complete or each.active_s < before_s]:
            del self.downloads[seq]

    def skip_to(self, seq: int) -> None:
        """Mark all requests up to ``seq`` as received: those without effect were not recorded."""
        if seq > self.low:
            self.low = seq
            self.ahead = {s for s in self.ahead if s > seq}
            self._advance()

    def advance_done(self, done: int) -> None:
        """Forget the answers below ``done``: each has arrived, or was cancelled."""
        self.done = done
        if not self.answers:
            return
        for seq in [s for s in self.answers if s < done]:
            self.confirm(seq)


class RequestTable:
    """Not thread-safe: the server's thread owns it. ``sessions``: by name. A *ticket* is the number
    of a request in this table."""

    def __init__(self) -> None:
        self.sessions: dict[str, SessionState] = {}
        self._by_ticket: dict[int, tuple[str, int]] = {}
        self._next_ticket = 1
        self.grown = 0
        """Bytes of requests and answers since the last ``take_overfull``."""

    def begin(
        self, handler: RequestHandler, route: Route | None, name: str, seq: int, done: int, body: bytes, payload: Any
    ) -> bool:
        """Execute a request on its first arrival. ``done``: all requests below it are over. Return
        True if its cancellation arrived before it."""
        session = self.sessions[name]
        session.skip_to(min(done, seq) - 1)
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        size = len(body) + REQUEST_BYTES
        dropped = session.receive(seq, route, ticket, size)
        self.grown += size
        self._by_ticket[ticket] = (name, seq)
        handler.request(name, ticket, body, payload)
        return dropped

    def open(self, name: str, key: str) -> SessionState:
        """Add a session whose first message came by a client's public key."""
        session = self.sessions[name] = SessionState(keys=(key,))
        return session

    def answer(self, ticket: int, body: bytes, made: bool, make: Maker | None) -> tuple[SessionState | None, int]:
        """Keep the answer of a request; see ``Server.answer``. Return its session, None if the request
        was cancelled or its session ended, and its seq."""
        name, seq = self._by_ticket.pop(ticket, ("", 0))
        session = self.sessions.get(name)
        if session is not None:
            self.grown += session.answer(seq, body, made, make)
        return session, seq

    def take_overfull(self) -> list[str]:
        """Return the sessions to end because of SESSION_BYTES, and the largest ones because of MOST_BYTES."""
        self.grown = 0
        over = [name for name, session in self.sessions.items() if session.held_bytes > SESSION_BYTES]
        left = sorted((sum(self.sessions[name].sizes.values()), name) for name in self.sessions.keys() - over)
        total = sum(nbytes for nbytes, _ in left)
        while total > MOST_BYTES:
            nbytes, name = left.pop()
            total -= nbytes
            over.append(name)
        return over

    def check_room(self, name: str) -> None:
        """Raise WireError if a new session is one too many for its connection, its host or the server."""
        new, sessions = self.sessions[name], self.sessions.values()
        route = next(iter(new.connections))
        for who, count, limit in (
            ("this connection", sum(route in each.connections for each in sessions), CONNECTION_SESSIONS),
            (new.host, sum(each.host == new.host != "" for each in sessions), HOST_SESSIONS),
            ("this run", len(sessions), MOST_SESSIONS),
        ):
            if count > limit:
                raise WireError(
                    f"{who} has {count - 1} sessions, the most it can have: close unneeded clients; queue.status() and"
                    " `asyncflow top` list them"
                )

    def numbers(self, ticket: int) -> tuple[int, int]:
        """Return the seq of an unanswered request, and ``done`` of its session."""
        name, seq = self._by_ticket[ticket]
        return seq, self.sessions[name].done

    def drop(self, handler: RequestHandler, name: str, seq: int) -> None:
        """Cancel a request. Notify the handler unless the answer has arrived."""
        session = self.sessions.get(name)
        if session is None:  # the handler ended it when it executed the request
            return
        if not session.is_known(seq):
            if seq not in session.early:
                session.drop_early(seq)
                handler.dropped(name, seq, 0, None)
            return
        session.routes.pop(seq, None)
        ticket = session.tickets.pop(seq, None)
        answer = session.forget(seq)
        if ticket is not None:
            self._by_ticket.pop(ticket, None)
            handler.dropped(name, seq, ticket, None)
        elif answer is not None:
            handler.dropped(name, seq, 0, answer)

    def forget(self, name: str) -> None:
        """Remove a session with its requests and answers."""
        session = self.sessions.pop(name, None)
        for ticket in session.tickets.values() if session else ():
            self._by_ticket.pop(ticket, None)

    # ---- replays, before the server starts

    def replay(self, handler: RequestHandler, name: str, seq: int, done: int, ticket: int, body: bytes) -> None:
        """Replay a recorded request: ``handler`` executes it."""
        session = self.sessions.setdefault(name, SessionState())
        session.advance_done(done)
        following, self._next_ticket = self._next_ticket, ticket
        self.begin(handler, None, name, seq, done, body, None)
        self._next_ticket = max(following, self._next_ticket)  # a request that waited has a lower ticket

    def replay_drop(self, handler: RequestHandler, name: str, seq: int) -> None:
        """Replay a recorded request cancellation."""
        session = self.sessions.setdefault(name, SessionState())
        if seq in session.early:  # the request arrived since, had no effect, and was cancelled
            session.early.remove(seq)
            handler.dropped(name, seq, 0, None)
        else:
            self.drop(handler, name, seq)

    def finish_replay(self) -> None:
        """Forget all connections: clients of the earlier server have to repeat their requests."""
        for session in self.sessions.values():
            session.forget_connections()
