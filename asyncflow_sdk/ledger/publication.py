"""Version publication: the publisher's ranks, the announced version, and when it becomes current.

The publisher has ``world_size`` ranks, each one live session. A version is announced, its parts are
published, and the last part makes it current. If a rank withdraws it or dies before, it is discarded.
"""

from __future__ import annotations

from ..errors import ConfigError, VersionGone
from ..types import events as ev
from . import commands as cmd
from .pins import VersionPins
from .replicas import Replicas
from .state import LedgerState
from .state.budget import MAX_NUMBER
from .state.rows import NONE
from .state.sessions import Session
from .state.versions import AnnouncedVersion, KeptVersion
from .step_versions import StepVersions


class VersionTaken(ConfigError):
    """Internal: raised for version 0 if that number names the engines' own weights."""


class VersionPublication:
    """``ranks``: session of each rank. ``announced``: the version being written. ``discarded``: the
    last discarded version, and why. ``lost``: by rank, why a version with a published part was
    discarded, until reported to the rank. ``no_rollback``: see ``OpenPublisher``."""

    def __init__(
        self, state: LedgerState, step_versions: StepVersions, replicas: Replicas, pins: VersionPins
    ) -> None:
        self._state, self._step_versions, self._replicas, self._pins = state, step_versions, replicas, pins
        self.ranks: dict[int, int] = {}
        self.world_size = 0
        self.announced: AnnouncedVersion | None = None
        self.discarded = (NONE, "")
        self.lost: dict[int, str] = {}
        self.no_rollback = ""

    def open(self, session: Session, command: cmd.OpenPublisher) -> cmd.Reply:
        """Make a session a rank of the publisher."""
        rank, size, versions = command.rank, command.world_size, self._state.versions
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} of {size} cannot publish: ranks are 0 to world_size - 1")
        who = f"rank {rank} of this run's publisher"
        if session.rank != NONE:
            raise ConfigError(
                f"{session.name} is rank {session.rank} of this run's publisher already; close that one first"
            )
        if self.ranks and size != self.world_size:
            other, holder = next(iter(self.ranks.items()))
            raise ConfigError(
                f"{who} cannot be one of {size}: {self._who(holder)} is rank {other} of {self.world_size}; open"
                " all ranks with one world_size, or end that publisher first"
            )
        if rank in self.ranks:
            raise ConfigError(
                f"{who} is {self._who(self.ranks[rank])}: a run has one publisher at a time. Publish there, close"
                f" it, or end its process; if its host is gone, call run.evict({self.ranks[rank]})"
            )
        self.ranks[rank], self.world_size, session.rank = session.id, size, rank
        self.no_rollback = command.no_rollback
        kept = {each.source: each.parts[rank] for each in versions.kept.values() if rank < len(each.parts)}
        return cmd.Publisher(version=versions.current, kept=tuple(sorted(kept.items())))

    def close(self, session: Session, reason: str) -> None:
        """End a session's rank. Versions that cannot be fetched without it are no longer kept."""
        if session.rank == NONE:
            return
        announced, versions = self.announced, self._state.versions
        if announced is not None:
            first = self._state.sessions.name(self.ranks[min(announced.ranks)])
            which = "which" if first == session.name else f"and rank {session.rank} ({session.name})"
            self.discard(f"was announced by {first}, {which} {reason}")
        del self.ranks[session.rank]
        self.lost.pop(session.rank, None)
        session.rank = NONE
        for each in list(versions.kept.values()):
            holds = zip(each.sessions, each.parts, strict=True)
            if any(who == session.id and not part.outlives for who, part in holds):
                del versions.kept[each.version]
                if each.version == versions.current:
                    versions.unavailable = (
                        f"it can no longer be fetched: its bytes were with {session.name}, which {reason}"
                    )
        self._pins.drop()

    def announce(self, session: Session, command: cmd.Announce) -> cmd.Reply | None:
        """Let a rank write a version. None until all parts of the version before are published."""
        rank, version, announced = self._rank(session), command.version, self.announced
        versions = self._state.versions
        to_restore = versions.to_restore
        self._check_number(version)
        if to_restore != NONE:
            raise ConfigError(
                f"version {version} cannot be published: the run was rolled back, and the trainer has not loaded"
                f" version {to_restore} yet. Load it, then call run.restored({to_restore})"
            )
        if announced is not None and rank in announced.parts:
            if version == announced.version:
                raise ConfigError(f"rank {rank} has published its part of version {version} already")
            return None
        if announced is not None and version < announced.version and announced.ranks != {rank}:
            others = ", ".join(
                f"rank {r} ({self._state.sessions.name(self.ranks[r])})" for r in sorted(announced.ranks - {rank})
            )
            raise ConfigError(
                f"rank {rank} cannot announce version {version}: {others} announced {announced.version}, still"
                f" incomplete; all ranks publish one version, under one number, now {announced.version} or a"
                " higher one"
            )
        if announced is None or version != announced.version:
            self._check_step(version)
            if announced is not None:  # it can never be complete without this rank
                number, why = self.discarded
                before = f"; {why}" if number == announced.version else ""
                self.discard(f"was withdrawn: rank {rank} ({session.name}) announced {version} in its place{before}")
            announced = self.announced = AnnouncedVersion(version, self._state.context.now)
            if version == 0:
                versions.name_zero(own=False)
                self._replicas.unclaim()
        announced.ranks.add(rank)
        return self._published(self.lost.pop(rank, ""))

    def publish(self, session: Session, command: cmd.Publish) -> cmd.Reply:
        """Add a rank's part. The last part makes the version current."""
        rank, version, announced = self._rank(session), command.version, self.announced
        if announced is None or version != announced.version:
            self._check_number(version)
            if self.discarded[0] == version:
                raise VersionGone(f"{self.discarded[1]}; announce it again")
            raise ConfigError(f"version {version} is not announced; announce a version before it is published")
        if rank in announced.parts:
            raise ConfigError(f"rank {rank} has published its part of version {version} already")
        announced.parts[rank] = command.part
        announced.ranks.add(rank)
        announced.probe = command.probe or announced.probe
        if len(announced.parts) == self.world_size:
            self.announced = None
            parts = tuple(announced.parts[each] for each in range(self.world_size))
            sessions = tuple(self.ranks[each] for each in range(self.world_size))
            self._step_versions.place(version)
            self.make_current(
                KeptVersion(version, version, parts, sessions, announced.probe, self._state.context.now), session.name
            )
        return self._published()

    def withdraw(self, session: Session, command: cmd.Withdraw) -> cmd.Reply:
        """Discard an announced version."""
        version = command.version
        self._rank(session)
        if self.announced is None or self.announced.version != version:
            if version == self.discarded[0]:
                return cmd.Done()  # another rank was first
            raise ConfigError(f"version {version} is not announced, so it cannot be withdrawn")
        because = f": {command.reason}" if command.reason else ""
        self.discard(f"was withdrawn by {session.name}{because}")
        return cmd.Done()

    def make_current(self, kept: KeptVersion, worker: str, reason: str = "") -> None:
        """Make a version current. Keep the newest ``keep_versions``, and pinned ones."""
        versions = self._state.versions
        lost = versions.lineage.given_up(versions.current)
        if versions.current == NONE:
            self._replicas.unclaim()
        versions.current, versions.since, versions.unavailable = kept.version, self._state.context.now, ""
        versions.kept[kept.version] = kept
        self._pins.published()
        for old in list(versions.kept)[: -self._state.limits.keep_versions]:
            if not self._pins.keeps(old):
                del versions.kept[old]
        self._state.context.publish(
            ev.Published(
                time_s=self._state.context.now, worker=worker, version=kept.version, nbytes=kept.nbytes, root=kept.root,
                source=NONE if kept.source == kept.version else kept.source, reason=reason,
            )
        )  # fmt: skip
        self.discarded = (NONE, "")
        self._state.context.wake("version", "swap", "announce")
        self._state.tasks.wake_replicas()
        if lost:  # replicas on a given-up version get nothing anyway
            self._replicas.commit(at_once=True)

    def next_number(self, number: int) -> int:
        """Return the lowest number from ``number`` on, above an announced version's."""
        return number if self.announced is None else max(number, self.announced.version + 1)

    def discard(self, what: str) -> None:
        """Discard the announced version, if any. ``what``: why, after the words "version N"."""
        announced = self.announced
        if announced is not None:
            self.discarded = (announced.version, f"version {announced.version} {what}")
            self.lost.update(dict.fromkeys(announced.parts, self.discarded[1]))
            self.announced = None
            self._state.context.publish(
                ev.Note(time_s=self._state.context.now, text=self.discarded[1], level="warning")
            )
            self._state.context.wake("announce")

    def _published(self, lost: str = "") -> cmd.PublishReply:
        sources = {each.source for each in self._state.versions.kept.values()}
        if self.announced is not None and self.announced.parts:
            sources.add(self.announced.version)
        return cmd.PublishReply(keep=tuple(sorted(sources)), lost=lost)

    def _check_number(self, version: int) -> None:
        current, last = self._state.versions.current, self._state.versions.lineage.last
        if version <= current:
            raise ConfigError(
                f"version {version} cannot be published: {current} is already current, and a number is never used"
                f" again{self._why_taken(version)}"
            )
        if version == 0 and self._state.versions.own_zero:
            raise VersionTaken(
                "version 0 cannot be published: rows were leased for the engines' own weights, which are version 0 until"
                " one is published. Publish it before prompts are put, or publish version 1 first"
            )
        if version < last.first and last.lost:
            raise ConfigError(f"version {version} cannot be published{self._why_taken(version)}")
        if version > MAX_NUMBER:
            raise ConfigError(f"version {version} is past the largest number, {MAX_NUMBER}")

    def _check_step(self, version: int) -> None:
        """Refuse skipped numbers: rows could become older than the staleness rule allows."""
        current = self._state.versions.current
        if not self._state.steps.declared or current == NONE:
            return
        step = self._step_versions.in_training()
        most = max(current, self._step_versions.version_of(step)) + 1
        if version > most:
            raise ConfigError(
                f"version {version} cannot be published: {current} is current and step {step} is not trained yet,"
                f" so the next number is {most}; a step is published as step.version + 1"
            )

    def _why_taken(self, version: int) -> str:
        """Explain a rollback or resume that the trainer may not know of."""
        current, last = self._state.versions.current, self._state.versions.lineage.last
        if not last.parent < version <= last.first or not (last.lost or last.rolled_back):
            return ""
        if last.lost:
            step = last.first - last.offset
            return f". Training went on from step {step}, whose version is {last.first}: number from there"
        return (
            f". Version {last.first} is what was rolled back to, with the bytes of {last.parent}: what was trained"
            f" from the versions given up is not wanted. Load {current} into the trainer and go on from there; its"
            f" next version is {current + 1}, also for a step that was leased before the rollback"
        )

    def _rank(self, session: Session) -> int:
        if session.rank == NONE:
            raise ConfigError(f"{session.name} is not this run's publisher; open one before versions are published")
        return session.rank

    def _who(self, session: int) -> str:
        return f"{self._state.sessions.name(session)} (session {session})"
