"""Replicas: sessions that load versions of the weights. A quorum of them commits a version."""

from __future__ import annotations

from ..types import events as ev
from .state import LedgerState
from .state.sessions import ReplicaState, Session


class Replicas:
    """``numbers``: their sessions. ``failing``: whose last fetch or load failed. Ordered sets."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state
        self.numbers: dict[int, None] = {}
        self.failing: dict[int, None] = {}

    def sessions(self) -> list[Session]:
        """Return the replicas' sessions."""
        return [self._state.sessions.by_id[number] for number in self.numbers]

    def add(self, session: Session) -> ReplicaState:
        """Make a session a replica if it is none. Return its state."""
        self.numbers[session.id] = None
        if session.replica is None:
            session.replica = ReplicaState()
        return session.replica

    def remove(self, session: int) -> None:
        """Forget a session."""
        self.numbers.pop(session, None)
        self.failing.pop(session, None)

    def update(
        self, session: Session, version: int, doing: str, why: str = "", *, seconds: float = 0.0, moved: int = 0,
        encoding: str = "", skipped: int = 0,
    ) -> ReplicaState:  # fmt: skip
        """Set and publish the replica's activity with a version."""
        replica = self.add(session)
        replica.begin(version, doing, self._state.context.now, why)
        self.failing.pop(session.id, None)
        if doing == "failed":
            self.failing[session.id] = None
        self._state.context.publish(
            ev.WeightState(
                time_s=self._state.context.now, worker=session.name, version=version, state=doing, detail=why, seconds=seconds,
                moved=moved, encoding=encoding, skipped=skipped,
            )
        )  # fmt: skip
        return replica

    def commit(self, *, at_once: bool = False) -> None:
        """Commit the current version if a quorum has it staged or loaded, or if ``at_once``."""
        limits, versions = self._state.limits, self._state.versions
        if not limits.quorum or versions.committed == versions.current:
            return
        ready = sum(
            each.replica is not None and versions.current in (each.replica.staged, each.loaded)
            for each in self.sessions()
        )
        if ready >= limits.quorum or at_once:
            versions.committed = versions.current
            self._state.context.publish(
                ev.Committed(time_s=self._state.context.now, version=versions.current, staged=ready)
            )
            self._state.context.wake("swap")
            self._state.tasks.wake_replicas()

    def unclaim(self) -> None:
        """Give no rows to replicas with weights of their own before they have loaded a version."""
        for session in self._state.sessions.by_id.values():
            if session.claimed:
                session.loaded, session.claimed = None, False

    def quorum_changed(self) -> None:
        """Apply a changed quorum. Without a quorum no version is committed."""
        if not self._state.limits.quorum:
            self._state.versions.committed = -1
        self.commit()
