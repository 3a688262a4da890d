"""SessionState: the requests that a server has received from one session, and the answers not yet
confirmed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from ..errors import ProtocolError
from .router_sockets import Route
from .uploads import Download

REQUEST_BYTES = 1 << 10
"""Held for each unconfirmed request beside its body, later its answer."""
MAX_EARLY = 1 << 16
Maker: TypeAlias = Callable[[], tuple[bytes, Sequence[Any]]]
"""Makes an answer each time it is sent."""
MAX_CONNECTIONS = 1024
"""Connections remembered for one session."""


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
