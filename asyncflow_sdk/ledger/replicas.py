"""Replicas: sessions with weights. The version fetched by each, and when it may load it.

Replicas load in order of request, at most ``max_swapping`` at once. A replica without prompts before it loads
(``ReplicaState.starved``) does not wait: it would idle. A version staged by a ``quorum`` is *committed*: only then
may replicas load it, also while a newer uncommitted one is current, and the others get no prompts."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError, Ended, VersionGone
from ..types import events as ev
from . import commands as cmd
from .completion import RowCompletion
from .pins import VersionPins
from .state import LedgerState
from .state.rows import NONE
from .state.sessions import Grant, ParkedRequest, Session
from .state.versions import KeptVersion
from .terminations import EXPIRED


class Replicas:
    """``numbers``: their sessions, an ordered set. ``swapping``: replicas permitted to load, since ledger seconds."""

    def __init__(self, state: LedgerState, completion: RowCompletion, pins: VersionPins) -> None:
        self._state, self._completion, self._pins = state, completion, pins
        self._context, self._versions, self._tasks = state.context, state.versions, state.tasks
        self.numbers: dict[int, None] = {}
        self.swapping: dict[int, float] = {}

    def sessions(self) -> list[Session]:
        """Return the replicas' sessions."""
        return [self._state.sessions.by_id[number] for number in self.numbers]

    def lacking(self, version: int) -> list[Session]:
        """Return the replicas with a version neither staged nor loaded."""
        found = self.sessions()
        return [each for each in found if each.replica and version not in (each.replica.staged, each.loaded)]

    def remove(self, session: Session, why: str) -> None:
        """Forget a replica that ends or retires, and pass its permission to load on."""
        self._release_swap(session, why)
        self.numbers.pop(session.id, None)

    def _follow(self, session: Session, **changes: Any) -> None:
        """Set fields of a replica's state. The first ones make the session a replica."""
        self.numbers[session.id] = None
        session.follow(**changes)

    def _begin(self, session: Session, version: int, doing: str, why: str = "") -> None:
        self._follow(session, version=version, doing=doing, since=self._context.now, why=why)
        if doing == "staged":
            session.follow(staged=version)
        elif doing == "failed" and session.replica is not None and session.replica.staged == version:
            session.follow(staged=NONE)

    def _update(self, session: Session, version: int, doing: str, why: str = "", **transfer: Any) -> None:
        """Set and publish the replica's activity with a version. ``transfer``: numbers of the event."""
        self._begin(session, version, doing, why)
        self._publish_state(session, version, doing, why, **transfer)

    def _publish_state(self, session: Session, version: int, state: str, detail: str, **transfer: Any) -> None:
        now, worker = self._context.now, session.name
        event = ev.WeightState(time_s=now, worker=worker, version=version, state=state, detail=detail, **transfer)
        self._context.publish(event)

    def commit(self, *, at_once: bool = False) -> None:
        """Commit the current version if a quorum staged or loaded it, or if ``at_once``; without a quorum, none."""
        quorum, current = self._state.limits.quorum, self._versions.current
        if not quorum:
            self._versions.commit(NONE)
        if not quorum or self._versions.committed == current:
            return
        ready = len(self.numbers) - len(self.lacking(current))
        if ready >= quorum or at_once:
            self._versions.commit(current)
            self._context.publish(ev.Committed(time_s=self._context.now, version=current, staged=ready))
            self._context.wake("swap")
            self._tasks.wake_replicas()

    def unclaim(self) -> None:
        """Give no rows to replicas with weights of their own before they have loaded a version."""
        for session in self._state.sessions.by_id.values():
            if session.claimed:
                session.load(None)

    def await_version(self, session: Session, command: cmd.AwaitVersion) -> cmd.Reply | None:
        """Return the version to fetch; None while there is no newer one."""
        parked = self._state.parked.by_ticket
        if session.replica is None and any(parked[each].command is command for each in session.parked):
            raise ConfigError(f"{session.name} retired while this request waited")
        if session.dismissed:
            raise Ended(f"{session.name} was dismissed and needs no other version")
        found = self._to_fetch(session, command.task)
        if found is None or found.version <= max(command.after, NONE):
            rollout = self._tasks.by_name.get(command.task, self._tasks.admitting)
            if self._state.partitions.ended and (rollout is None or rollout.exhausted()):
                raise Ended("no rollout will need another version")
            return None
        self._update(session, found.version, "fetching")
        session.follow(task=command.task)
        return cmd.Version(version=found.version, parts=found.parts, source=found.source, probe=found.probe)

    def staged(self, session: Session, command: cmd.ReportStaged) -> cmd.Reply:
        """Note a version as staged by a replica."""
        self._check_published(command.version)
        transfer = {name: getattr(command, name) for name in ("seconds", "moved", "encoding", "skipped")}
        self._update(session, command.version, "staged", **transfer)
        self._context.wake_session("swap", session.id)  # its request may have to be refused
        self.commit()
        return cmd.Done()

    def swap(self, session: Session, command: cmd.Swap) -> cmd.Reply | None:
        """Permit a replica to load its staged version; None while it must wait."""
        version, versions, limits = command.version, self._versions, self._state.limits
        if versions.lineage.given_up(version):
            raise VersionGone(f"version {version} was rolled back; {versions.current} is current: stage that")
        if version < 0 or session.replica is None or session.replica.staged != version:
            raise ConfigError(f"{session.name} has not staged version {version}, so it cannot load it")
        pinned = self._pins.holds(session.replica.task)
        if pinned != NONE and version > pinned:
            return None
        if version not in (versions.current, pinned) and not (limits.quorum and version == versions.committed):
            now = f"{versions.current}, current since {self._context.now - versions.since:.1f} s"
            raise VersionGone(f"version {version} was replaced by {now}: stage that")
        if limits.quorum and version > versions.committed:
            return None
        full = limits.max_swapping and len(self.swapping) >= limits.max_swapping
        if full and session.id not in self.swapping and not session.replica.starved:
            return None
        self.swapping.setdefault(session.id, self._context.now)
        self._update(session, version, "swapping")
        return cmd.Permitted(version=version)

    def loaded(self, session: Session, command: cmd.ReportLoaded) -> cmd.Reply:
        """Note a version as loaded by a replica."""
        version, versions = command.version, self._versions
        self._check_published(version, least=0)
        taken = versions.current != NONE or versions.own_zero is False
        if command.own and taken:
            return cmd.Done()  # version 0 is not this: it loads a published version first
        session.load(version, claimed=command.own or (version == 0 and not taken))
        if (replica := session.replica) is not None:
            session.follow(starved=False)
            if version >= replica.version:
                self._begin(session, version, "")
        self._apply_to_prompts(session, version)
        self._wake_uncommitted()
        if self._state.partitions.pins:  # it may fetch the next version now
            self._context.wake("version")
        self._tasks.wake_replica(session.id)
        lag = max(versions.current - version, 0)
        self._context.publish(ev.Loaded(time_s=self._context.now, worker=session.name, version=version, lag=lag))
        self._end_swap(session.id)
        self.commit()
        return cmd.Done()

    def not_loaded(self, session: Session, command: cmd.ReportLoadFailed) -> cmd.Reply:
        """Note a failed fetch or load of a replica."""
        self._check_published(command.version)
        self._update(session, command.version, "failed", command.reason)
        self._wake_uncommitted()
        self._context.wake_session("swap", session.id)  # its request may have to be refused
        self._end_swap(session.id)
        return cmd.Done()

    def retire(self, session: Session, command: cmd.Retire) -> cmd.Reply:
        """Make a session a replica no more."""
        self.remove(session, "it retired")
        session.retire()
        self._context.wake("version", "swap")  # its own requests there are refused
        self._tasks.wake_replica(session.id)
        return cmd.Done()

    def parked(self, request: ParkedRequest) -> None:
        """Make the session of a parked request a replica."""
        session, command = self._state.sessions.by_id[request.session], request.command
        if isinstance(command, cmd.AwaitVersion):
            self._follow(session, task=command.task)
        else:
            self._begin(session, command.version, "waits")

    def reply_undelivered(self, session: int, version: int) -> None:
        """Revoke a permission not delivered to the replica: the version is staged, as before."""
        replica = self._state.sessions.by_id[session] if session in self.swapping else None
        if replica is not None and replica.replica is not None and replica.replica.version == version:
            self._release_swap(replica, "its request was dropped")
            self._begin(replica, version, "staged")

    def _release_swap(self, session: Session, why: str) -> None:
        if session.id in self.swapping and session.replica is not None:
            self._publish_state(session, session.replica.version, "released", why)
        self._end_swap(session.id)

    def _to_fetch(self, session: Session, task: str) -> KeptVersion | None:
        """Return the version to fetch: the one pinned for its rows, if newer; else the committed one before a newer
        one, unless it failed to load it."""
        versions, replica, loaded = self._versions, session.replica, session.loaded
        pinned = self._pins.holds(task)
        if pinned != NONE and (loaded is None or loaded < pinned):
            return versions.kept.get(pinned)
        if self._pins.idles(task):
            return None
        committed = versions.kept.get(versions.committed)
        failed = replica is not None and replica.doing == "failed" and replica.version == versions.committed
        past = failed or (loaded is not None and loaded >= versions.committed)
        return versions.newest if committed is None or past else committed

    def _check_published(self, version: int, least: int = NONE) -> None:
        current = self._versions.current
        if not 0 <= version <= max(current, least):
            raise ConfigError(f"version {version} was never published; {current} is the newest")

    def _apply_to_prompts(self, session: Session, version: int) -> None:
        """Note the loaded version in the session's leases of prompts. Return rows begun with a version trained later,
        which a resumed trainer published: their next tokens would be older than the staleness rule allows. Expire
        rows of a version that was rolled back during its load."""
        lineage = self._versions.lineage
        for grant in self._prompts(session):
            if version > grant.newest and not lineage.follows(version, grant.newest):
                self._completion.void(grant, f"version {version} was loaded, which is trained earlier", blame=False)
        for grant in self._prompts(session):
            grant.load(version)
            if lineage.rolled_back(version):
                ids = self._state.leases.outstanding(grant)
                self._completion.terminations.end_groups(ids, EXPIRED, f"version {version} was rolled back")

    def _prompts(self, session: Session) -> list[Grant]:
        return [grant for grant in session.leases.values() if self._tasks[grant.task].spec.admits]

    def _wake_uncommitted(self) -> None:
        """Retry requests for an uncommitted version; without a quorum each load would retry the requests of all."""
        if self._state.limits.quorum and self._versions.committed != self._versions.current:
            self._context.wake("version")

    def _end_swap(self, session: int) -> None:
        if self.swapping.pop(session, None) is not None:
            self._context.wake("swap")
            self._tasks.wake_replica(session)  # it gets rows again
