"""RequestTable: all sessions of a server with their requests. A request repeated by (session, seq)
is not executed again: it gets its stored answer, or waits for it.

It uses no socket, so a recorded run is replayed through it: see ``RequestTable.replay``.
"""

from __future__ import annotations

from typing import Any

from ..errors import WireError
from .handler import RequestHandler
from .router_sockets import Route
from .session_state import REQUEST_BYTES, SessionState

MOST_SESSIONS, HOST_SESSIONS, CONNECTION_SESSIONS = 8192, 4096, 16
"""The most sessions of a server, of a host (a process on this one), and of a connection: others find room."""
MOST_BYTES, SESSION_BYTES = 1 << 30, 64 << 20
"""The most bytes held for unconfirmed requests of all sessions, and of one."""
CHECK_BYTES = 16 << 20


class RequestTable:
    """Not thread-safe: the server's thread owns it. ``sessions``: by name. A *ticket* is the number
    of a request in this table."""

    def __init__(self) -> None:
        self.sessions: dict[str, SessionState] = {}
        self._by_ticket: dict[int, tuple[str, int]] = {}
        self._next_ticket = 1
        self.grown = 0
        """Bytes of requests since the last ``take_overfull``."""

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

    def take(self, ticket: int) -> tuple[SessionState | None, int]:
        """Remove a ticket about to be answered. Return its session, None if the request was
        cancelled or its session ended, and its seq."""
        name, seq = self._by_ticket.pop(ticket, ("", 0))
        session = self.sessions.get(name)
        if session is not None:
            session.tickets.pop(seq, None)
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
