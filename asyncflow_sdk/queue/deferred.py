"""Requests that wait for room on the disk. Nothing of them was recorded or carried out, so another server knows nothing of
them: their clients ask it again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ..errors import DeadlineExceeded, MemoryFull
from ..ledger import commands as cmd
from ..types.reports import ParkedStatus, StatusReport
from .protocol import Call, encode
from .remote import IncomingBlock, Refused

TRY_AGAIN_S = 0.5
"""How often the disk is asked again whether it has room."""
MOST = 100
"""Requests that a status names."""


@dataclass(frozen=True)
class DeferredRequest:
    """A call as it came, and the numbers that the wire knows it by. Times are ledger seconds; ``until``: its deadline.
    ``why``: it waits."""

    session: str
    ticket: int
    seq: int
    done: int
    call: Call
    body: bytes
    payload: IncomingBlock | Refused | None
    since: float
    why: str = ""

    @property
    def until(self) -> float:
        return self.since + float(getattr(self.call.command, "timeout_s", 0.0))

    @property
    def may_wait(self) -> bool:
        """True if the client said how long it waits."""
        return hasattr(self.call.command, "timeout_s")

    @property
    def puts_rows(self) -> bool:
        return isinstance(self.call.command, cmd.AddRows)

    def at(self, now: float) -> DeferredRequest:
        """The same request, made now with the time that is left."""
        if now <= self.since:
            return self
        assert self.call.command is not None
        command = msgspec.structs.replace(self.call.command, timeout_s=self.until - now)
        call = msgspec.structs.replace(self.call, command=command)
        return replace(self, call=call, body=encode(call), since=now)

    def release(self) -> None:
        """Free the memory of payload that was sent with it, which nobody will use."""
        if self.payload is not None:
            self.payload.release()

    def refused(self, now: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"after {now - self.since:.1f} s: {self.why}")


class DeferredRequests:
    """In order of arrival. Not thread-safe: the server's thread owns it."""

    def __init__(self) -> None:
        self._waiting: dict[int, DeferredRequest] = {}
        self._next_try = math.inf

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def requests(self) -> list[DeferredRequest]:
        return list(self._waiting.values())

    def check_turn(self, request: DeferredRequest) -> None:
        """Raise MemoryFull if rows of an earlier put still wait."""
        before = next((each for each in self._waiting.values() if each.puts_rows), None)
        if request.puts_rows and before is not None:
            raise MemoryFull(before.why)

    def add(self, request: DeferredRequest, full: MemoryFull, now: float) -> None:
        self._waiting[request.ticket] = replace(request, why=str(full))
        self._next_try = min(self._next_try, now + TRY_AGAIN_S)

    def drop(self, ticket: int) -> DeferredRequest | None:
        """Nobody waits for a request any more."""
        return self._waiting.pop(ticket, None)

    def drop_session(self, session: str) -> list[DeferredRequest]:
        """Return the requests of a session, which wait no longer."""
        dropped = [each for each in self._waiting.values() if each.session == session]
        for each in dropped:
            del self._waiting[each.ticket]
        return dropped

    def due(self, now: float) -> bool:
        """True if the disk is to be asked again."""
        if not self._waiting or now < self._next_try:
            return False
        self._next_try = now + TRY_AGAIN_S
        return True

    def take_late(self, now: float) -> list[DeferredRequest]:
        """Requests past their deadline, which wait no longer."""
        late = [each for each in self._waiting.values() if each.until <= now]
        for each in late:
            del self._waiting[each.ticket]
        return late

    def next_s(self) -> float | None:
        """When there is something to do."""
        if not self._waiting:
            return None
        return min(self._next_try, *(each.until for each in self._waiting.values()))

    def status(self, report: StatusReport, sessions: dict[str, int], now: float) -> StatusReport:
        """A status with these requests among those that wait."""
        if not self._waiting:
            return report
        names = {session.id: session.name for session in report.sessions}
        parked = [
            ParkedStatus(
                session=sessions[each.session], name=names.get(sessions[each.session], ""), verb=_verb(each.call.command),
                why=each.why, since_s=now - each.since, left_s=each.until - now,
            )
            for each in self._waiting.values()
            if each.session in sessions
        ]  # fmt: skip
        return msgspec.structs.replace(
            report, waiting=report.waiting | {each.name: each.why for each in parked}, parked=(*parked, *report.parked)[:MOST],
            parked_count=report.parked_count + len(parked),
        )  # fmt: skip


def _verb(command: Any) -> str:
    if isinstance(command, cmd.AddRows):
        return f"put {command.groups * command.group_size} rows"
    return f"get {command.task}" if isinstance(command, cmd.LeaseRows) else type(command).__name__.lower()
