"""Versions on replicas: which is handed out, and what each replica has staged and loaded."""

from __future__ import annotations

from ..errors import ConfigError, Ended
from ..types import events as ev
from . import commands as cmd
from .publishing import Publishing
from .records import Session, Waiter
from .rows import LIVE, NONE
from .state import EXPIRED
from .versions import Kept, Replica


class Versioning(Publishing):
    """Hands versions to replicas, and hears what became of them."""

    def _await_version(self, session: Session, command: cmd.AwaitVersion) -> cmd.Reply | None:
        if session.replica is None and any(self.parked[each].command is command for each in session.parked):
            raise ConfigError(f"{session.name} takes no versions any more: it retired while this request waited")
        if session.dismissed:
            raise Ended(f"{session.name} was told to leave, and needs no other version")
        newest = self._to_fetch(session, command.after)
        if newest is None or newest.version <= max(command.after, NONE):
            if self.ended and all(self._exhausted(t) for t in self.tasks.values() if t.spec.admits):
                raise Ended("no rollout will need another version")
            return None
        self._does(session, newest.version, "fetching")
        return cmd.Version(version=newest.version, parts=newest.parts, source=newest.source, probe=newest.probe)

    def _to_fetch(self, session: Session, after: int) -> Kept | None:
        """The newest version; but while it is undecided, a replica that is below what is decided has that first, since it may
        load nothing else. What it could not load, it need not have."""
        decided, replica = self.versions.get(self.committed), session.replica
        newest = self.versions.get(self.version)
        if decided is None or decided is newest or (session.loaded is not None and session.loaded >= self.committed):
            return newest
        if replica is not None and replica.doing == "failed" and replica.version == self.committed:
            return newest
        return decided

    def _staged(self, session: Session, command: cmd.Staged) -> cmd.Reply:
        if not 0 <= command.version <= self.version:
            raise ConfigError(f"version {command.version} was never published; {self.version} is the newest")
        self._does(session, command.version, "staged", seconds=command.seconds, moved=command.moved,
                   encoding=command.encoding, skipped=command.skipped).staged = command.version  # fmt: skip
        return cmd.Done()

    def _loaded(self, session: Session, command: cmd.Loaded) -> cmd.Reply:
        if not 0 <= command.version <= max(self.version, 0):
            raise ConfigError(f"version {command.version} was never published; {self.version} is the newest")
        session.loaded = command.version
        session.claimed = command.version == 0 != self.version
        replica = session.replica
        if replica is not None and command.version >= replica.version:
            replica.doing, replica.why, replica.version, replica.since = "", "", command.version, self._now
            self.failing.pop(session.id, None)
        self._take_back_younger(session, command.version)
        for lease in session.leases.values():
            if self.tasks[lease.task].spec.admits:
                lease.newest = max(lease.newest, command.version)
        if self.lineage.rolled_back(command.version):
            self._expire_held(session, command.version)
        if self.committed != self.version:
            self._dirty.add("version")  # what is not decided yet may be fetched now
        self._wake_replicas()
        lag = max(self.version - command.version, 0)
        self._effects.events.append(
            ev.Loaded(time_s=self._now, worker=session.name, version=command.version, lag=lag)
        )
        return cmd.Done()

    def _take_back_younger(self, session: Session, version: int) -> None:
        """Rows that a replica began with a version trained later than the one it has loaded now, which a trainer published that
        went on from a checkpoint: tokens drawn from here on would be older than the rule allows, so they are drawn anew."""
        for lease in list(session.leases.values()):
            if self.tasks[lease.task].spec.admits and self._is_older(version, lease.newest):
                self._void(lease, f"version {version} was loaded, which is trained earlier", blame=False)

    def _is_older(self, version: int, begun: int) -> bool:
        return version > begun and not self.lineage.follows(version, begun)

    def _expire_held(self, session: Session, version: int) -> None:
        """What a replica generates with a version that was given up, while it was loading it, ends."""
        for lease in [lease for lease in session.leases.values() if self.tasks[lease.task].spec.admits]:
            ids = self._outstanding(lease)
            ids = ids[self.rows.state[self.rows.at(ids)] == LIVE]
            if len(ids):
                self._end_groups(ids, EXPIRED, f"version {version} was rolled back")

    def _not_loaded(self, session: Session, command: cmd.NotLoaded) -> cmd.Reply:
        if not 0 <= command.version <= self.version:
            raise ConfigError(f"version {command.version} was never published; {self.version} is the newest")
        replica = self._does(session, command.version, "failed", command.reason)
        if replica.staged == command.version:
            replica.staged = NONE
        if self.committed != self.version:
            self._dirty.add("version")
        return cmd.Done()

    def _retire(self, session: Session, command: cmd.Retire) -> cmd.Reply:
        session.replica, session.loaded, session.claimed = None, None, False
        self.replicas.pop(session.id, None)
        self.failing.pop(session.id, None)
        self._dirty.update(("version", "swap"))  # its own requests that wait there are refused
        self._wake_replicas()
        return cmd.Done()

    def _does(
        self, session: Session, version: int, doing: str, why: str = "", *, seconds: float = 0.0, moved: int = 0,
        encoding: str = "", skipped: int = 0,
    ) -> Replica:  # fmt: skip
        """A replica does something about a version, and says so."""
        replica = self._replica(session)
        replica.version, replica.doing, replica.since, replica.why = version, doing, self._now, why
        self.failing.pop(session.id, None)
        if doing == "failed":
            self.failing[session.id] = None
        self._effects.events.append(
            ev.WeightState(
                time_s=self._now, worker=session.name, version=version, state=doing, detail=why, seconds=seconds,
                moved=moved, encoding=encoding, skipped=skipped,
            )
        )  # fmt: skip
        return replica

    def _replica(self, session: Session) -> Replica:
        self.replicas[session.id] = None
        if session.replica is None:
            session.replica = Replica()
        return session.replica

    def _park(self, waiter: Waiter) -> None:
        super()._park(waiter)
        if isinstance(waiter.command, cmd.AwaitVersion):
            self._replica(self.sessions[waiter.session])

    def _drop_session(self, session: int, reason: str, blame: bool) -> None:
        super()._drop_session(session, reason, blame)
        self.replicas.pop(session, None)
        self.failing.pop(session, None)
