"""The clients of a queue server: their sessions, and the process that each runs in."""

from __future__ import annotations

import msgspec

from ..ledger import StatusReport


class Client(msgspec.Struct, frozen=True, array_like=True):
    """``number``: its session in the ledger. ``pid_key``: by which its end is noticed; "" on another host. ``host``: for people."""

    number: int
    pid: int
    pid_key: str
    host: str


class Clients:
    """Open sessions by the name that the wire has for them. Not thread-safe: the server's thread owns it."""

    def __init__(self) -> None:
        self.by_session: dict[str, Client] = {}

    def __contains__(self, session: str) -> bool:
        return session in self.by_session

    def __len__(self) -> int:
        return len(self.by_session)

    def number(self, session: str) -> int:
        """Return the ledger's number of a session that is open."""
        return self.by_session[session].number

    def numbers(self) -> dict[str, int]:
        return {session: client.number for session, client in self.by_session.items()}

    def fill(self, report: StatusReport) -> StatusReport:
        """Return the report with the process and host of each session."""
        clients = {client.number: client for client in self.by_session.values()}
        sessions = []
        for session in report.sessions:
            client = clients.get(session.id)
            pid, host = (0, "") if client is None else (client.pid, client.host)
            sessions.append(msgspec.structs.replace(session, pid=pid, host=host))
        return msgspec.structs.replace(report, sessions=tuple(sessions))
