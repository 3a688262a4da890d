"""Publication: who publishes versions, which one is announced, and when it becomes current.

The publisher is ``world_size`` ranks, each of one live session. A version is announced, its parts are published, and with the last
part it is current. If a rank withdraws it or dies before that, the whole version is discarded.
"""

from __future__ import annotations

from ..errors import ConfigError, VersionGone
from ..types import events as ev
from . import commands as cmd
from .replicas import Replicas
from .state import LedgerState
from .state.budget import MAX_NUMBER
from .state.rows import NONE
from .state.sessions import Session
from .state.versions import AnnouncedVersion, KeptVersion
from .training import Training


class Publication:
    """``ranks``: the session of each rank of the publisher. ``announced``: the version being written. ``not_coming``: the last version
    that was announced and discarded, and why. ``lost``: by rank, why a version of which it published a part was discarded, until
    the rank is told. ``no_rollback``: why the trainer of the last publisher cannot load a version."""

    def __init__(self, state: LedgerState, training: Training, replicas: Replicas) -> None:
        self._context, self._limits, self._sessions, self._tasks = (
            state.context,
            state.limits,
            state.sessions,
            state.tasks,
        )
        self._steps, self._versions, self._training, self._replicas = state.steps, state.versions, training, replicas
        self.ranks: dict[int, int] = {}
        self.world_size = 0
        self.announced: AnnouncedVersion | None = None
        self.not_coming = (NONE, "")
        self.lost: dict[int, str] = {}
        self.no_rollback = ""

    def open(self, session: Session, command: cmd.OpenPublisher) -> cmd.Reply:
        """Make a session a rank of the publisher."""
        rank, size, versions = command.rank, command.world_size, self._versions
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
                f"{who} cannot be one of {size}: {self._who(holder)} is rank {other} of {self.world_size}; open all ranks"
                " with one world_size, or end that publisher first"
            )
        if rank in self.ranks:
            raise ConfigError(
                f"{who} is {self._who(self.ranks[rank])}: a run has one publisher at a time. Publish there, close it, or"
                f" end its process; if its host is gone, run.evict({self.ranks[rank]}) says so"
            )
        self.ranks[rank], self.world_size, session.rank = session.id, size, rank
        self.no_rollback = command.no_rollback
        kept = {each.source: each.parts[rank] for each in versions.kept.values() if rank < len(each.parts)}
        return cmd.Publisher(version=versions.current, kept=tuple(sorted(kept.items())))

    def close(self, session: Session, reason: str) -> None:
        """A session is no rank any more. Versions that cannot be fetched without it are not kept."""
        if session.rank == NONE:
            return
        said, versions = self.announced, self._versions
        if said is not None:
            first = self._sessions.name(self.ranks[min(said.ranks)])
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
                        f"it cannot be fetched any more, since {session.name}, which had its bytes, {reason}"
                    )

    def announce(self, session: Session, command: cmd.Announce) -> cmd.Reply | None:
        """A rank begins to write a version. None while the version before is not there from all ranks."""
        rank, version, said = self._rank(session), command.version, self.announced
        to_restore = self._versions.to_restore
        self._check_number(version)
        if to_restore != NONE:
            raise ConfigError(
                f"version {version} cannot be published: the run was rolled back, and the trainer has not loaded version"
                f" {to_restore} yet. Load it, then call run.restored({to_restore})"
            )
        if said is not None and rank in said.parts:
            if version == said.version:
                raise ConfigError(f"rank {rank} has published its part of version {version} already")
            return None
        if said is not None and version < said.version and said.ranks != {rank}:
            others = ", ".join(
                f"rank {r} ({self._sessions.name(self.ranks[r])})" for r in sorted(said.ranks - {rank})
            )
            raise ConfigError(
                f"rank {rank} cannot announce version {version}: {others} announced {said.version}, which is not there yet;"
                f" all ranks publish one version, under one number, now {said.version} or a higher one"
            )
        if said is None or version != said.version:
            self._check_step(version)
            if said is not None:  # without this rank's part it would never be complete
                number, why = self.not_coming
                before = f"; {why}" if number == said.version else ""
                self.discard(f"was withdrawn: rank {rank} ({session.name}) announced {version} in its place{before}")
            said = self.announced = AnnouncedVersion(version, self._context.now)
        said.ranks.add(rank)
        return self._published(self.lost.pop(rank, ""))

    def publish(self, session: Session, command: cmd.Publish) -> cmd.Reply:
        """A rank's part is there. With the last part the version becomes current."""
        rank, version, said = self._rank(session), command.version, self.announced
        if said is None or version != said.version:
            self._check_number(version)
            if self.not_coming[0] == version:
                raise VersionGone(f"{self.not_coming[1]}; announce it again")
            raise ConfigError(f"version {version} is not announced; announce a version before it is published")
        if rank in said.parts:
            raise ConfigError(f"rank {rank} has published its part of version {version} already")
        said.parts[rank] = command.part
        said.ranks.add(rank)
        said.probe = command.probe or said.probe
        if len(said.parts) == self.world_size:
            self.announced = None
            parts = tuple(said.parts[each] for each in range(self.world_size))
            sessions = tuple(self.ranks[each] for each in range(self.world_size))
            self._training.place(version)
            self.make_current(
                KeptVersion(version, version, parts, sessions, said.probe, self._context.now), session.name
            )
        return self._published()

    def withdraw(self, session: Session, command: cmd.Withdraw) -> cmd.Reply:
        """Discard an announced version."""
        version = command.version
        self._rank(session)
        if self.announced is None or self.announced.version != version:
            if version == self.not_coming[0]:
                return cmd.Done()  # another rank was first
            raise ConfigError(f"version {version} is not announced, so it cannot be withdrawn")
        because = f": {command.reason}" if command.reason else ""
        self.discard(f"was withdrawn by {session.name}{because}")
        return cmd.Done()

    def make_current(self, kept: KeptVersion, worker: str, reason: str = "") -> None:
        """Make a version current, and keep no more than ``keep_versions``."""
        versions = self._versions
        lost = versions.lineage.given_up(versions.current)
        versions.current, versions.since, versions.unavailable = kept.version, self._context.now, ""
        versions.kept[kept.version] = kept
        for old in list(versions.kept)[: -self._limits.keep_versions]:
            del versions.kept[old]
        self._context.publish(
            ev.Published(
                time_s=self._context.now, worker=worker, version=kept.version, nbytes=kept.nbytes, root=kept.root,
                source=NONE if kept.source == kept.version else kept.source, reason=reason,
            )
        )  # fmt: skip
        self.not_coming = (NONE, "")
        self._context.wake("version", "swap", "announce")
        self._tasks.wake_replicas()
        if lost:  # replicas on a version that was given up are granted nothing anyhow
            self._replicas.commit(at_once=True)

    def next_number(self, number: int) -> int:
        """The lowest number from ``number`` on that no announced version has."""
        return number if self.announced is None else max(number, self.announced.version + 1)

    def discard(self, what: str) -> None:
        """Discard the announced version, if there is one. ``what`` happened to it, in words."""
        said = self.announced
        if said is not None:
            self.not_coming = (said.version, f"version {said.version} {what}")
            self.lost.update(dict.fromkeys(said.parts, self.not_coming[1]))
            self.announced = None
            self._context.publish(ev.Note(time_s=self._context.now, text=self.not_coming[1], level="warning"))
            self._context.wake("announce")

    def _published(self, lost: str = "") -> cmd.Published:
        sources = {each.source for each in self._versions.kept.values()}
        if self.announced is not None and self.announced.parts:
            sources.add(self.announced.version)
        return cmd.Published(keep=tuple(sorted(sources)), lost=lost)

    def _check_number(self, version: int) -> None:
        current, last = self._versions.current, self._versions.lineage.last
        if version <= current:
            raise ConfigError(
                f"version {version} cannot be published: {current} is already current, and a number is never used again"
                f"{self._why_taken(version)}"
            )
        if version < last.first and last.lost:
            raise ConfigError(f"version {version} cannot be published{self._why_taken(version)}")
        if version > MAX_NUMBER:
            raise ConfigError(f"version {version} is past the largest number, {MAX_NUMBER}")

    def _check_step(self, version: int) -> None:
        """A version is one step ahead of the one before: if numbers were left out, rows could be older than the staleness rule allows."""
        current = self._versions.current
        if not self._steps.declared or current == NONE:
            return
        step = self._training.in_training()
        most = max(current, self._training.version_of(step)) + 1
        if version > most:
            raise ConfigError(
                f"version {version} cannot be published: {current} is current and step {step} is not trained yet, so the"
                f" next number is {most}; a step is published as step.version + 1"
            )

    def _why_taken(self, version: int) -> str:
        """Explain a rollback or resume since, which the trainer may not know."""
        current, last = self._versions.current, self._versions.lineage.last
        if not last.parent < version <= last.first or not (last.lost or last.rolled_back):
            return ""
        if last.lost:
            step = last.first - last.offset
            return f". Training went on from step {step}, whose version is {last.first}: number from there"
        return (
            f". Version {last.first} is what was rolled back to, with the bytes of {last.parent}: what was trained from the"
            f" versions given up is not wanted. Load {current} into the trainer and go on from there; its next version"
            f" is {current + 1}, also for a step that was leased before the rollback"
        )

    def _rank(self, session: Session) -> int:
        if session.rank == NONE:
            raise ConfigError(f"{session.name} is not this run's publisher; open one before versions are published")
        return session.rank

    def _who(self, session: int) -> str:
        return f"{self._sessions.name(session)} (session {session})"
