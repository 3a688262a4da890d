"""What a server remembers of a session, so that a request repeated by its number has no second effect."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .router_sockets import Route
from .transfers import Download

MOST_HEARD = 1024
"""So many connections of one session are remembered."""


@dataclass
class SessionState:
    """Of one session: answers it may still ask for again, and where to send them; and which requests have come at all.

    A request may be dropped over one socket before it comes over another (``early``): then it is carried out when
    it comes and taken back at once, as if it had come in order. What it gives back must not be lost with it.
    """

    TRANSIENT: ClassVar[frozenset[str]] = frozenset({"makers", "downloads", "routes", "heard"})

    answers: dict[int, bytes] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)  # those of them that are made anew each time they are sent
    makers: dict[int, Callable[[], tuple[bytes, Sequence[Any]]]] = field(
        default_factory=dict
    )  # by their own function
    downloads: dict[int, Download] = field(default_factory=dict)  # answers under way that have payload or are large
    tickets: dict[int, int] = field(default_factory=dict)  # seq → ticket, unanswered
    routes: dict[int, Route | None] = field(default_factory=dict)  # seq → connection it came over last
    heard: dict[Route, None] = field(default_factory=dict)  # connections that anything came over, the first first
    done: int = 0
    low: int = 0  # every request up to here has come, or is in early
    ahead: set[int] = field(default_factory=set)  # those beyond of which that is so
    early: set[int] = field(default_factory=set)

    def hear(self, route: Route) -> None:
        """Something came over a connection. Of too many, the first is kept, which said hello, and the newest."""
        self.heard[route] = None
        if len(self.heard) > MOST_HEARD:
            del self.heard[next(itertools.islice(self.heard, 1, None))]

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
        if seq == self.low + 1 and not self.ahead:
            self.low = seq
            return
        self.ahead.add(seq)
        self._advance()

    def _advance(self) -> None:
        while self.low + 1 in self.ahead:
            self.low += 1
            self.ahead.remove(self.low)

    def settle(self, seq: int) -> None:
        """Its answer arrived."""
        if self.forget(seq) is not None:
            self.routes.pop(seq, None)

    def forget(self, seq: int) -> bytes | None:
        """The answer, which nobody will ask for again."""
        self.made.discard(seq)
        self.makers.pop(seq, None)
        self.downloads.pop(seq, None)
        return self.answers.pop(seq, None)

    def release_downloads(self, before_s: float) -> None:
        """Those that have left, or of which nothing was heard since: they are made again for who asks again."""
        for seq in [seq for seq, each in self.downloads.items() if each.gone or each.heard_s < before_s]:
            del self.downloads[seq]

    def over(self, seq: int) -> None:
        """Every request up to here is over. A server that came back knows nothing of those that changed nothing."""
        if seq > self.low:
            self.low = seq
            self.ahead = {s for s in self.ahead if s > seq}
            self._advance()

    def raise_done(self, done: int) -> None:
        """Every answer below has arrived, or is taken back."""
        self.done = done
        if not self.answers:
            return
        for seq in [s for s in self.answers if s < done]:
            self.settle(seq)
