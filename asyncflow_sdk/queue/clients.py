"""The clients of a queue server: their sessions and processes."""

from __future__ import annotations

import msgspec

from ..ledger import StatusReport


class ClientProcess(msgspec.Struct, frozen=True, array_like=True):
    """``number``: its ledger session. ``pid_key``, ``host``, ``public``: see ``ClientHello``."""

    number: int
    pid: int
    pid_key: str
    host: str
    public: str = ""


class ClientTable:
    """Open sessions by their wire name. ``silent``: by home, the key of its unit's last session if it
    ended by silence, and since when. Not thread-safe: only the server's thread uses it."""

    def __init__(self) -> None:
        self.by_session: dict[str, ClientProcess] = {}
        self.silent: dict[int, tuple[str, float]] = {}

    def __contains__(self, session: str) -> bool:
        return session in self.by_session

    def __len__(self) -> int:
        return len(self.by_session)

    def open(self, session: str, client: ClientProcess) -> None:
        """Add a session."""
        self.by_session[session] = client

    def close(self, session: str) -> ClientProcess:
        """Remove a session."""
        return self.by_session.pop(session)

    def silence(self, client: ClientProcess, homes: dict[int, float]) -> None:
        """Note that the unit of these homes ended by silence. ``homes``: since when each is absent."""
        self.silent |= {home: (client.public, since) for home, since in homes.items()}

    def public_keys(self) -> set[str]:
        """Return the public keys of open sessions."""
        return {client.public for client in self.by_session.values()}

    def number(self, session: str) -> int:
        """Return the ledger's number of an open session."""
        return self.by_session[session].number

    def known(self, session: str) -> int:
        """Return the ledger's number of a session; 0 if it is not open."""
        return self.by_session[session].number if session in self.by_session else 0

    def numbers(self) -> dict[str, int]:
        """Return the ledger's numbers of all open sessions."""
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
