"""Requests waiting for disk space, or for a listener. They are neither recorded nor executed, so clients resend them
to a restarted server."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from ..errors import DeadlineExceeded, MemoryFull
from ..ledger import commands as cmd
from ..ledger.status import verb_of
from ..types.reports import ParkedStatus, StatusReport
from .journal import DISK_RETRY_S
from .protocol import Call, encode
from .remote_payload import IncomingBlock, RefusedUpload

MOST = 100
"""The number of waiting requests listed in a status."""


class DeferredRequest(msgspec.Struct, frozen=True):
    """A call and its wire numbers. ``since``, ``deadline``: ledger seconds. ``why`` it waits. ``held``:
    True while it waits for a listener."""

    session: str
    ticket: int
    seq: int
    done: int
    call: Call
    body: bytes
    payload: IncomingBlock | RefusedUpload | None
    since: float
    why: str = ""
    held: bool = False

    @property
    def deadline(self) -> float:
        """The ledger time at which it fails."""
        return self.since + float(getattr(self.call.command, "timeout_s", 0.0))

    @property
    def may_wait(self) -> bool:
        """True if the client set a timeout. That of a checkpoint is for listeners only: its trainer
        continues, and makes another one later."""
        return hasattr(self.call.command, "timeout_s") and not isinstance(self.call.command, cmd.AddCheckpoint)

    @property
    def puts_rows(self) -> bool:
        """True if it is a put."""
        return isinstance(self.call.command, cmd.AddRows)

    def restarted(self, now: float) -> DeferredRequest:
        """Return the same request as of ``now``, with the time left as its timeout."""
        if now <= self.since:
            return self
        assert self.call.command is not None
        command = msgspec.structs.replace(self.call.command, timeout_s=self.deadline - now)
        call = msgspec.structs.replace(self.call, command=command)
        return msgspec.structs.replace(self, call=call, body=encode(call), since=now)

    def release(self) -> None:
        """Free the memory of the payload sent with it."""
        if self.payload is not None:
            self.payload.release()

    def timeout_error(self, now: float) -> DeadlineExceeded:
        """Return the error for a request past its deadline."""
        return DeadlineExceeded(f"after {now - self.since:.1f} s: {self.why}")


class DeferredRequests:
    """Requests in order of arrival. Not thread-safe: only the server's thread uses it."""

    def __init__(self) -> None:
        self._waiting: dict[int, DeferredRequest] = {}
        self._next_try = math.inf

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def requests(self) -> list[DeferredRequest]:
        """All of them, oldest first."""
        return list(self._waiting.values())

    def check_turn(self, request: DeferredRequest) -> None:
        """Raise MemoryFull for a put if an earlier put waits."""
        if not self._waiting or not request.puts_rows:
            return
        before = next((each for each in self._waiting.values() if each.puts_rows), None)
        if before is not None:
            raise MemoryFull(before.why)

    def hold(self, request: DeferredRequest, why: str) -> None:
        """Let a request wait for a listener, until it is dropped."""
        self._waiting[request.ticket] = msgspec.structs.replace(request, why=why, held=True)

    def add(self, request: DeferredRequest, full: MemoryFull, now: float) -> None:
        """Let a request wait for the disk. ``full``: the reason."""
        self._waiting[request.ticket] = msgspec.structs.replace(request, why=str(full))
        self._next_try = min(self._next_try, now + DISK_RETRY_S)

    def drop(self, ticket: int) -> DeferredRequest | None:
        """Remove and return a cancelled request; None if it is not waiting."""
        return self._waiting.pop(ticket, None)

    def drop_session(self, session: str) -> list[DeferredRequest]:
        """Remove and return the requests of a session."""
        return self._take(lambda each: each.session == session)

    def due(self, now: float) -> bool:
        """True if it is time to try the disk again."""
        if all(each.held for each in self._waiting.values()) or now < self._next_try:
            return False
        self._next_try = now + DISK_RETRY_S
        return True

    def take_expired(self, now: float) -> list[DeferredRequest]:
        """Remove and return requests past their deadline."""
        return self._take(lambda each: each.deadline <= now)

    def _take(self, wanted: Callable[[DeferredRequest], bool]) -> list[DeferredRequest]:
        if not self._waiting:
            return []
        taken = [each for each in self._waiting.values() if wanted(each)]
        for each in taken:
            del self._waiting[each.ticket]
        return taken

    def next_due(self) -> float | None:
        """Return the ledger time of the next try or deadline; None without requests."""
        if not self._waiting:
            return None
        tries = [self._next_try] if any(not each.held for each in self._waiting.values()) else []
        return min([*tries, *(each.deadline for each in self._waiting.values())])

    def status(self, report: StatusReport, sessions: dict[str, int], now: float) -> StatusReport:
        """Add these requests to the waiting requests of a status report."""
        if not self._waiting:
            return report
        names = {session.id: session.name for session in report.sessions}
        parked = [
            ParkedStatus(
                session=sessions[each.session], name=names.get(sessions[each.session], ""), verb=verb_of(each.call.command),
                why=each.why, since_s=now - each.since, left_s=each.deadline - now,
            )
            for each in self._waiting.values()
            if each.session in sessions
        ]  # fmt: skip
        return msgspec.structs.replace(
            report, waiting=report.waiting | {each.name: each.why for each in parked}, parked=(*parked, *report.parked)[:MOST],
            parked_count=report.parked_count + len(parked),
        )  # fmt: skip
