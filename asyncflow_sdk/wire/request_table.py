"""RequestTable: all sessions of a server with their requests, and the answers not yet confirmed. A request repeated
by (session, seq) is not executed again: it gets its stored answer, or waits for it.

It uses no socket, so a recorded run is replayed through it: see ``RequestTable.replay``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

from ..errors import ProtocolError, WireError
from .pieces import Download
from .router_sockets import Route

MOST_SESSIONS, HOST_SESSIONS, CONNECTION_SESSIONS = 8192, 4096, 16
"""The most sessions of a server, of a host (a process on this one), and of a connection: others find room."""
MOST_BYTES, SESSION_BYTES = 1 << 30, 64 << 20
"""The most bytes held for unconfirmed requests of all sessions, and of one."""
CHECK_BYTES = 16 << 20
REQUEST_BYTES = 1 << 10  # held for each unconfirmed request beside its body, later its answer
MAX_EARLY = 1 << 16
MAX_CONNECTIONS = 1024  # connections remembered for one session
Maker: TypeAlias = Callable[[], tuple[bytes, Sequence[Any]]]  # makes an answer each time it is sent


class RequestHandler(Protocol):
    """Executes requests. All calls come from one thread."""

    def request(self, session: str, ticket: int, body: bytes, payload: Any) -> None:
        """Execute a request. Call ``Server.answer`` now or later. ``payload``: the filled sink returned by
        ``sink``, or its error; None for a request without payload."""

    def dropped(self, session: str, seq: int, ticket: int, answer: bytes | None) -> None:
        """The client cancelled a request, or will not read its answer. ``answer``: None if there is none yet.
        ``ticket`` 0 without an answer: the request has not arrived yet."""
        return


@dataclass(eq=False)
class WireRequest:
    """A request until its answer is confirmed. ``ticket``: its number in the table. ``answer``: None until it is
    known; if ``made``, ``Handler.make`` renders it each time it is sent, or ``maker``."""

    TRANSIENT: ClassVar[frozenset[str]] = frozenset({"route", "nbytes", "maker"})

    session: str = ""
    seq: int = 0
    ticket: int = 0
    route: Route | None = None  # the connection of its last message; None: it is over, or was of an earlier server
    nbytes: int = 0  # held for it
    answer: bytes | None = None
    made: bool = False
    maker: Maker | None = None

    def keep(self, answer: bytes, made: bool, maker: Maker | None) -> int:
        """Keep the answer. Return the bytes held for it."""
        self.answer, self.made, self.maker = answer, made, maker
        if maker is None:  # else the request is held until its answer is confirmed
            self.nbytes = len(answer) + REQUEST_BYTES
        return self.nbytes

    def reroute(self, route: Route) -> None:
        """Answer a repeated request over the connection of its last message."""
        self.route = route

    def reset(self) -> None:
        """Send no answer unless the request is repeated, and count none of its bytes."""
        self.route, self.nbytes = None, 0


@dataclass
class SessionState:
    """Answers are kept until the client confirms them, so a repeated request has no second effect.

    The cancellation of a request may arrive before the request, over another socket (``early``). The request is
    then executed on arrival and cancelled at once, as if both had arrived in order: its lease must not be lost."""

    TRANSIENT: ClassVar[frozenset[str]] = frozenset({"connections", "keys", "host"})

    requests: dict[int, WireRequest] = field(default_factory=dict)  # by seq, until the answer is confirmed
    connections: dict[Route, None] = field(default_factory=dict)  # in the order of their first message
    keys: tuple[str, ...] = ()  # a client uses them in this order: none before the last used one is accepted
    host: str = ""  # IP address, or process of this host, at the other end of the newest connection
    done: int = 0
    low: int = 0  # all requests up to here were received, or are in early
    ahead: set[int] = field(default_factory=set)  # the same for requests above low
    early: set[int] = field(default_factory=set)

    def accept(self, *keys: str) -> None:
        """Accept messages by these keys, too; by no earlier one once a later one was used."""
        self.keys += keys

    def add_connection(self, route: Route, key: str, host: str) -> None:
        """Keep a connection, also the first above MAX_CONNECTIONS. Raises ProtocolError for another client's."""
        if self.keys:
            if key not in self.keys:
                raise ProtocolError("a message in the session of another client")
            self.keys = self.keys[self.keys.index(key) :]
        self.connections[route], self.host = None, host
        if len(self.connections) > MAX_CONNECTIONS:
            del self.connections[next(itertools.islice(self.connections, 1, None))]

    def is_known(self, seq: int) -> bool:
        """True if the request has arrived before."""
        return (seq <= self.low or seq in self.ahead) and seq not in self.early

    def receive(self, request: WireRequest) -> bool:
        """Record the first arrival of a request. Return True if it was cancelled before."""
        self.requests[request.seq] = request
        if request.seq in self.early:
            self.early.remove(request.seq)
            return True
        self.mark(request.seq)
        return False

    def mark(self, seq: int) -> None:
        """Record the arrival of a request, or its early cancellation."""
        if seq == self.low + 1 and not self.ahead:
            self.low = seq
        else:
            self.ahead.add(seq)
            self.skip_to(self.low)

    def skip_to(self, seq: int) -> None:
        """Mark all requests up to ``seq`` as received: requests without effect were not recorded."""
        if seq > self.low:
            self.low, self.ahead = seq, {s for s in self.ahead if s > seq}
        while self.low + 1 in self.ahead:
            self.low += 1
            self.ahead.remove(self.low)

    def advance(self, done: int) -> list[int]:
        """Record the end of all requests below ``done``. Return the first of the kept ones."""
        self.done, over = done, list[int]()
        for seq in self.requests:  # in the order of their arrival, which is nearly that of their numbers
            if seq >= done:
                break
            over.append(seq)
        return over


class RequestTable:
    """Owned by the server's thread. ``sessions``: by name. A *ticket* is the number of a request in this table."""

    TRANSIENT: ClassVar[frozenset[str]] = frozenset({"downloads"})

    def __init__(self) -> None:
        self.sessions: dict[str, SessionState] = {}
        self._by_ticket: dict[int, WireRequest] = {}  # those without an answer
        self._next_ticket = 1
        self.grown = 0
        """Bytes of requests and answers since the last ``take_overfull``."""
        self.downloads: dict[WireRequest, Download] = {}
        """Answers being sent: large, or with payload."""

    def execute(
        self, handler: RequestHandler, route: Route, name: str, seq: int, done: int, body: bytes, payload: Any
    ) -> None:
        """Execute a request on its first arrival. ``done``: all requests below it are over."""
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        request = WireRequest(name, seq, ticket, route, len(body) + REQUEST_BYTES)
        self.grown += request.nbytes
        if self._execute(handler, request, done, body, payload):
            self.drop(handler, name, seq)

    def _execute(self, handler: RequestHandler, request: WireRequest, done: int, body: bytes, payload: Any) -> bool:
        """Return True if the cancellation of the request arrived before it."""
        session = self.sessions[request.session]
        if done - 1 > session.low:
            session.skip_to(min(done, request.seq) - 1)
        dropped = session.receive(request)
        self._by_ticket[request.ticket] = request
        handler.request(request.session, request.ticket, body, payload)
        return dropped

    def confirm(self, session: SessionState, settled: Iterable[int], done: int) -> None:
        """Forget the answers received by the client: ``settled``, and all below ``done``."""
        for seq in (*settled, *session.advance(done)) if done > session.done else settled:
            if (request := session.requests.get(seq)) is not None and request.answer is not None:
                del session.requests[seq]
                self._end(request)

    def _end(self, request: WireRequest) -> None:
        request.reset()
        if self.downloads:
            self.downloads.pop(request, None)

    def answer(self, ticket: int, body: bytes, made: bool, make: Maker | None) -> WireRequest | None:
        """Keep an answer; see ``Server.answer``. Return the request; None if it or its session has ended."""
        request = self._by_ticket.pop(ticket, None)
        if request is not None:
            self.grown += request.keep(body, made, make)
        return request

    def release_downloads(self, before_s: float) -> None:
        """Release downloads sent, or inactive since ``before_s``; a retry makes them again."""
        for request, download in list(self.downloads.items()):
            if download.complete or download.active_s < before_s:
                del self.downloads[request]

    def take_overfull(self) -> list[str]:
        """Return the sessions to end because of SESSION_BYTES, and the largest ones because of MOST_BYTES."""
        self.grown = 0
        sizes = {name: [each.nbytes for each in state.requests.values()] for name, state in self.sessions.items()}
        # beside the largest request of a session: any answer may be large
        over = [name for name, each in sizes.items() if sum(each) - max(each, default=0) > SESSION_BYTES]
        left = sorted((sum(sizes[name]), name) for name in sizes.keys() - over)
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
        request = self._by_ticket[ticket]
        return request.seq, self.sessions[request.session].done

    def drop(self, handler: RequestHandler, name: str, seq: int) -> None:
        """Cancel a request. Notify the handler unless the answer has arrived."""
        session = self.sessions.get(name)
        if session is None:  # the handler ended it when it executed the request
            return
        if not session.is_known(seq):
            if len(session.early) >= MAX_EARLY and seq not in session.early:
                raise ProtocolError(f"{MAX_EARLY} requests were cancelled, and have not arrived")
            if seq not in session.early:
                session.early.add(seq)
                session.mark(seq)
                handler.dropped(name, seq, 0, None)
        elif (request := session.requests.pop(seq, None)) is not None:
            self._end(request)
            self._by_ticket.pop(request.ticket, None)
            handler.dropped(name, seq, request.ticket if request.answer is None else 0, request.answer)

    def forget(self, name: str) -> None:
        """Remove a session with its requests and answers."""
        session = self.sessions.pop(name, None)
        for request in session.requests.values() if session else ():  # queued answers are still sent
            self._by_ticket.pop(request.ticket, None)
            self.downloads.pop(request, None)

    # ---- replays, before the server starts

    def replay(self, handler: RequestHandler, name: str, seq: int, done: int, ticket: int, body: bytes) -> None:
        """Replay a recorded request: ``handler`` executes it."""
        self.confirm(self.sessions.setdefault(name, SessionState()), (), done)
        self._next_ticket = max(self._next_ticket, ticket + 1)  # a request that waited has a lower ticket
        self._execute(handler, WireRequest(name, seq, ticket), done, body, None)

    def finish_replay(self) -> None:
        """Count no answers of the replay: their clients may have confirmed them, which is not recorded."""
        for session in self.sessions.values():
            for request in session.requests.values():
                request.reset()

    def replay_drop(self, handler: RequestHandler, name: str, seq: int) -> None:
        """Replay a recorded request cancellation."""
        session = self.sessions.setdefault(name, SessionState())
        if seq in session.early:  # the request arrived since, had no effect, and was cancelled
            session.early.remove(seq)
            handler.dropped(name, seq, 0, None)
        else:
            self.drop(handler, name, seq)
