"""Parked requests: each waits at a place for a resource, or until its deadline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import commands as cmd
from .context import Context
from .sessions import Sessions
from .timers import Timers

PLACES = {
    cmd.AddRows: "put", cmd.AwaitVersion: "version", cmd.AwaitRowsWanted: "wanted", cmd.Announce: "announce", cmd.Swap: "swap",
    cmd.AwaitLost: "lost", cmd.AwaitPins: "pins",
}  # fmt: skip


@dataclass
class ParkedRequest:
    """``place``: where it waits. ``since``, ``expires``: ledger seconds."""

    ticket: int
    session: int
    command: Any
    place: str
    since: float
    expires: float


def place_of(command: cmd.Command) -> str:
    """Return the place where a command waits."""
    if isinstance(command, cmd.LeaseRows):
        return f"task {command.task}"
    if isinstance(command, cmd.AllGather):
        return f"barrier {command.group}"
    return PLACES[type(command)]


class ParkedRequests:
    """``by_ticket``: all requests. At each place the oldest comes first."""

    def __init__(self, context: Context, sessions: Sessions) -> None:
        self._context, self._sessions = context, sessions
        self.by_ticket: dict[int, ParkedRequest] = {}
        self._by_place: dict[str, dict[int, ParkedRequest]] = {}
        self._by_rank: dict[tuple[str, str], dict[int, dict[int, ParkedRequest]]] = {}  # by task and rank group
        self.deadlines = Timers(self.by_ticket)

    def at(self, place: str, sessions: set[int] | None = None) -> list[ParkedRequest]:
        """Return the requests at a place, oldest first; of some sessions, one session after another."""
        here = self._by_place.get(place, {})
        if sessions is None:
            return list(here.values())
        live = [self._sessions.by_id[each] for each in sorted(sessions) if each in self._sessions.by_id]
        return [here[ticket] for session in live for ticket in session.parked if ticket in here]

    def first(self, place: str) -> ParkedRequest | None:
        """Return the oldest request at a place."""
        return next(iter(self._by_place.get(place, {}).values()), None)

    def of_group(self, task: str, group: str) -> dict[int, dict[int, ParkedRequest]]:
        """Return lease requests of a rank group, by rank and ticket."""
        return self._by_rank.get((task, group), {})

    def alike(self, command: cmd.LeaseRows) -> dict[int, ParkedRequest]:
        """Return the oldest request of each rank for the same lease as ``command``."""
        asking = {}
        for rank, asked in self.of_group(command.task, command.group).items():
            request = next((each for each in asked.values() if each.command.token == command.token), None)
            if request is not None:
                asking[rank] = request
        return asking

    def count(self, place: str) -> int:
        """Return the number of requests at a place."""
        return len(self._by_place.get(place, {}))

    def add(self, request: ParkedRequest) -> None:
        """Park a request."""
        self._by_place.setdefault(request.place, {})[request.ticket] = request
        self.by_ticket[request.ticket] = request
        self._sessions.by_id[request.session].parked[request.ticket] = None
        self.deadlines.add(request.ticket)
        if (key := _group_of(request.command)) is not None:
            self._by_rank.setdefault(key, {}).setdefault(request.command.rank, {})[request.ticket] = request

    def remove(self, request: ParkedRequest) -> None:
        """Remove a request, and retry the next put in line."""
        del self._by_place[request.place][request.ticket], self.by_ticket[request.ticket]
        del self._sessions.by_id[request.session].parked[request.ticket]
        if (key := _group_of(request.command)) is not None:
            ranks = self._by_rank[key]
            del ranks[request.command.rank][request.ticket]
            if not ranks[request.command.rank]:
                del ranks[request.command.rank]
            if not ranks:
                del self._by_rank[key]
        self._context.wake("put")  # the next in line may go

    def wake_all(self) -> None:
        """Retry every parked request."""
        self._context.wake(*self._by_place)
        self._context.all_woken = True


def _group_of(command: cmd.Command) -> tuple[str, str] | None:
    """Return the task and rank group of a lease request; None for other commands."""
    if not isinstance(command, cmd.LeaseRows) or command.world_size == 1:
        return None
    return command.task, command.group
