"""Checkpoints waiting for a listener. They are neither recorded nor executed, so clients resend them to a
restarted server."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..errors import DeadlineExceeded
from ..ledger.status import verb_of
from ..types.reports import ParkedStatus, StatusReport
from .protocol import Call
from .remote_payload import IncomingBlock, RefusedUpload

MOST = 100
"""The number of waiting requests listed in a status."""


class DeferredRequest(msgspec.Struct, frozen=True):
    """A call and its wire numbers. ``since``: ledger seconds. ``why`` it waits."""

    session: str
    ticket: int
    seq: int
    done: int
    call: Call
    body: bytes
    payload: IncomingBlock | RefusedUpload | None
    since: float
    why: str = ""

    @property
    def deadline(self) -> float:
        """The ledger time at which it fails."""
        return self.since + float(getattr(self.call.command, "timeout_s", 0.0))

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

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def hold(self, request: DeferredRequest, why: str) -> None:
        """Let a request wait for a listener, until it is dropped."""
        self._waiting[request.ticket] = msgspec.structs.replace(request, why=why)

    def drop(self, ticket: int) -> DeferredRequest | None:
        """Remove and return a request; None if it is not waiting."""
        return self._waiting.pop(ticket, None)

    def drop_session(self, session: str) -> None:
        """Remove the requests of a session."""
        self._take(lambda each: each.session == session)

    def take_expired(self, now: float) -> list[DeferredRequest]:
        """Remove and return requests past their deadline."""
        return self._take(lambda each: each.deadline <= now)

    def _take(self, wanted: Callable[[DeferredRequest], bool]) -> list[DeferredRequest]:
        taken = [each for each in self._waiting.values() if wanted(each)]
        for each in taken:
            del self._waiting[each.ticket]
        return taken

    def waiting(self) -> list[DeferredRequest]:
        """Return the requests."""
        return list(self._waiting.values())

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
