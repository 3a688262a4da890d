"""Version publication: the publisher's ranks, the announced version, and when it becomes current.

Each rank of the publisher is one live session. An announced version is discarded if a rank withdraws it or dies
before its last part is published. A version made by a rollback is trained by the first unacknowledged step. The
trainer still has the weights given up: until it has loaded that version (``ReportRestored``) or resumes from a
checkpoint (``Resume``), none can be announced."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from ..errors import ConfigError, VersionGone
from ..types import events as ev
from . import commands as cmd
from .assembly import StepAssembly
from .pins import VersionPins
from .replicas import Replicas
from .state import LedgerState
from .state.rows import MAX_NUMBER, NONE
from .state.sessions import Session
from .state.versions import AnnouncedVersion, KeptVersion
from .terminations import EXPIRED


class VersionTaken(ConfigError):
    """Internal: raised for version 0 if that number names the engines' own weights."""


class VersionPublication:
    """``ranks``: session of each rank. ``announced``: the version being written. ``discarded``: the last discarded
    version, and why. ``lost``: by rank, why a version with a published part was discarded, until reported to the
    rank. ``no_rollback``: see ``OpenPublisher``.
    Example with two ranks: both announce 5, rank 0 publishes its part: 4 stays current. Rank 1 publishes: 5 is
    current, 4 and 5 are kept (``keep_versions`` 2). If rank 1 dies instead, 5 is discarded; rank 0 learns it."""

    def __init__(self, state: LedgerState, assembly: StepAssembly, replicas: Replicas, pins: VersionPins) -> None:
        self._state, self._assembly, self._replicas, self._pins = state, assembly, replicas, pins
        self._context, self._versions, self._steps = state.context, state.versions, state.steps
        self.ranks: dict[int, int] = {}
        self.world_size = 0
        self.announced: AnnouncedVersion | None = None
        self.discarded = (NONE, "")
        self.lost: dict[int, str] = {}
        self.no_rollback = ""

    def open(self, session: Session, command: cmd.OpenPublisher) -> cmd.Reply:
        """Make a session a rank of the publisher."""
        rank, size = command.rank, command.world_size
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} of {size} cannot publish: ranks are 0 to world_size - 1")
        who = f"rank {rank} of this run's publisher"
        if (own := self._rank_of(session)) != NONE:
            raise ConfigError(f"{session.name} is rank {own} of this run's publisher already; close that one first")
        holders = {each: f"{self._name(each)} (session {number})" for each, number in self.ranks.items()}
        if self.ranks and size != self.world_size:
            other, holder = next(iter(holders.items()))
            text = f"{holder} is rank {other} of {self.world_size}; open all ranks with one world_size"
            raise ConfigError(f"{who} cannot be one of {size}: {text}, or end that publisher first")
        if rank in self.ranks:
            text = f"close it, or end its process; if its host is gone, call run.evict({self.ranks[rank]})"
            raise ConfigError(f"{who} is {holders[rank]}: a run has one publisher at a time; {text}")
        self.ranks[rank], self.world_size, self.no_rollback = session.id, size, command.no_rollback
        kept = {each.source: each.parts[rank] for each in self._versions.kept.values() if rank < len(each.parts)}
        return cmd.Publisher(version=self._versions.current, kept=tuple(sorted(kept.items())))

    def close(self, session: Session, reason: str) -> cmd.Reply:
        """End a session's rank. Versions that cannot be fetched without it are no longer kept."""
        if (rank := self._rank_of(session)) == NONE:
            return cmd.Done()
        if self.announced is not None:
            first = self._name(min(self.announced.ranks))
            which = "which" if first == session.name else f"and rank {rank} ({session.name})"
            self.discard(f"was announced by {first}, {which} {reason}")
        del self.ranks[rank]
        self.lost.pop(rank, None)
        for each in list(self._versions.kept.values()):
            holds = zip(each.sessions, each.parts, strict=True)
            if any(who == session.id and not part.outlives for who, part in holds):
                self._versions.lose(each.version, f"its bytes were with {session.name}, which {reason}")
        self._pins.drop()
        return cmd.Done()

    def announce(self, session: Session, command: cmd.Announce) -> cmd.Reply | None:
        """Let a rank write a version. None until all parts of the version before are published."""
        rank, version, announced = self._rank(session), command.version, self.announced
        to_restore = self._versions.to_restore
        self._check_number(version)
        if to_restore != NONE:
            text = f"the run was rolled back, and the trainer has not loaded version {to_restore} yet"
            call = f"Load it, then call run.restored({to_restore})"
            raise ConfigError(f"version {version} cannot be published: {text}. {call}")
        if announced is not None and rank in announced.parts and version != announced.version:
            return None
        if announced is not None and version < announced.version and announced.ranks != {rank}:
            others = ", ".join(f"rank {each} ({self._name(each)})" for each in sorted(announced.ranks - {rank}))
            text = f"{others} announced {announced.version}; all ranks publish that number, or a higher one"
            raise ConfigError(f"rank {rank} cannot announce version {version}: {text}")
        if announced is None or version != announced.version:
            self._check_step(version)
            if announced is not None:  # it can never be complete without this rank
                number, why = self.discarded
                before = f"; {why}" if number == announced.version else ""
                self.discard(f"was withdrawn: rank {rank} ({session.name}) announced {version} in its place{before}")
            announced = self.announced = AnnouncedVersion(version, self._context.now)
            if version == 0:
                self._versions.name_zero(own=False)
                self._replicas.unclaim()
        self._check_unpublished(rank, announced)
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
        self._check_unpublished(rank, announced)
        announced.publish(rank, command.part, command.probe)
        if len(announced.parts) == self.world_size:
            self.announced = None
            parts = tuple(announced.parts[each] for each in range(self.world_size))
            sessions = tuple(self.ranks[each] for each in range(self.world_size))
            self._assembly.place(version)
            kept = KeptVersion(version, version, parts, sessions, announced.probe, self._context.now)
            self.make_current(kept, session.name)
        return self._published()

    def withdraw(self, session: Session, command: cmd.Withdraw) -> cmd.Reply:
        """Discard an announced version."""
        version = command.version
        self._rank(session)
        if self.announced is not None and self.announced.version == version:
            self.discard(f"was withdrawn by {session.name}{_because(command.reason)}")
        elif version != self.discarded[0]:  # else another rank was first
            raise ConfigError(f"version {version} is not announced, so it cannot be withdrawn")
        return cmd.Done()

    def make_current(self, kept: KeptVersion, worker: str, reason: str = "") -> None:
        """Make a version current. Keep the newest ``keep_versions``, and pinned ones."""
        versions, now = self._versions, self._context.now
        lost = versions.lineage.given_up(versions.current)
        if versions.current == NONE:
            self._replicas.unclaim()
        versions.make_current(kept, now)
        self._pins.bind()
        for old in list(versions.kept)[: -self._state.limits.keep_versions]:
            if not self._pins.keeps(old):
                del versions.kept[old]
        event = ev.Published(time_s=now, worker=worker, version=kept.version, nbytes=kept.nbytes, root=kept.root)
        if kept.source != kept.version:
            event = msgspec.structs.replace(event, source=kept.source, reason=reason)
        self._context.publish(event)
        self.discarded = (NONE, "")
        self._context.wake("version", "swap", "announce")
        self._state.tasks.wake_replicas()
        if lost:  # replicas on a given-up version get nothing anyway
            self._replicas.commit(at_once=True)

    def next_number(self, number: int) -> int:
        """Return the lowest number from ``number`` on, above an announced version's."""
        return number if self.announced is None else max(number, self.announced.version + 1)

    def discard(self, what: str) -> None:
        """Discard the announced version, if any. ``what``: why, after the words "version N"."""
        if (announced := self.announced) is not None:
            self.discarded = (announced.version, f"version {announced.version} {what}")
            self.lost.update(dict.fromkeys(announced.parts, self.discarded[1]))
            self.announced = None
            self._context.publish(ev.Note(time_s=self._context.now, text=self.discarded[1], level="warning"))
            self._context.wake("announce")

    def _published(self, lost: str = "") -> cmd.PublishReply:
        sources = {each.source for each in self._versions.kept.values()}
        if self.announced is not None and self.announced.parts:
            sources.add(self.announced.version)
        return cmd.PublishReply(keep=tuple(sorted(sources)), lost=lost)

    def _check_unpublished(self, rank: int, announced: AnnouncedVersion) -> None:
        if rank in announced.parts:
            raise ConfigError(f"rank {rank} has published its part of version {announced.version} already")

    def _check_number(self, version: int) -> None:
        current, last = self._versions.current, self._versions.lineage.last
        cannot = f"version {version} cannot be published"
        if version <= current:
            taken = f"{current} is already current, and a number is never used again"
            raise ConfigError(f"{cannot}: {taken}{self._why_taken(version)}")
        if version == 0 and self._versions.own_zero:
            text = "rows were leased for the engines' own weights, which are version 0 until one is published"
            raise VersionTaken(f"{cannot}: {text}. Publish it before prompts are put, or publish version 1 first")
        if version < last.first and last.lost:
            raise ConfigError(f"{cannot}{self._why_taken(version)}")
        if version > MAX_NUMBER:
            raise ConfigError(f"version {version} is past the largest number, {MAX_NUMBER}")

    def _check_step(self, version: int) -> None:
        """Refuse skipped numbers: rows could become older than the staleness rule allows."""
        current = self._versions.current
        if not self._steps.declared or current == NONE:
            return
        step = self._assembly.in_training()
        limit = max(current, self._assembly.version_of(step)) + 1
        if version > limit:
            text = f"{current} is current and step {step} is not trained yet, so the next number is {limit}"
            raise ConfigError(f"version {version} cannot be published: {text}; publish step.version + 1")

    def _why_taken(self, version: int) -> str:
        """Explain a rollback or resume that the trainer may not know of."""
        current, last = self._versions.current, self._versions.lineage.last
        if not last.parent < version <= last.first or not (last.lost or last.rolled_back):
            return ""
        if last.lost:
            from_step = f"step {last.first - last.offset}, whose version is {last.first}"
            return f". Training went on from {from_step}: number from there"
        text = f". Version {last.first} is what was rolled back to, with the bytes of {last.parent}. Load {current}"
        return f"{text} into the trainer; its next version is {current + 1}, also for a step leased earlier"

    def _rank(self, session: Session) -> int:
        if (rank := self._rank_of(session)) == NONE:
            raise ConfigError(f"{session.name} is not this run's publisher; open one before versions are published")
        return rank

    def _rank_of(self, session: Session) -> int:
        return next((rank for rank, number in self.ranks.items() if number == session.id), NONE)

    def _name(self, rank: int) -> str:
        return self._state.sessions.name(self.ranks[rank])

    def roll_back(self, session: Session, command: cmd.Rollback) -> cmd.Reply:
        """Make the bytes of a kept version current again."""
        versions, steps = self._versions, self._steps
        if self.no_rollback:
            raise ConfigError(f"version {command.version} cannot be rolled back to: {self.no_rollback}")
        target = self._target(command.version)
        given_up, number = versions.current, self.next_number(versions.current + 1)
        self.discard(f"was withdrawn: {session.name} rolled back to {command.version}")
        step = steps.next_to_train() if steps.declared else versions.lineage.step(given_up)
        versions.lineage.add(number, command.version, step)
        reason = f"version {given_up} was rolled back to {command.version}{_because(command.reason)}"
        self.make_current(replace(target, version=number, since=self._context.now), session.name, reason)
        saved = [step for step, each in steps.saved.items() if each in (target.version, target.source)]
        versions.restore(number, max(saved, default=NONE))
        self._pins.drop()
        return cmd.RollbackDone(version=number, expired=self._expire_given_up(), checkpoint=versions.restore_step)

    def restoration(self, version: int = NONE) -> cmd.Reply:
        """Return the version for the trainer to load, or ``version``."""
        versions = self._versions
        version = versions.to_restore if version == NONE else version
        kept = versions.kept.get(version)
        source, parts, why = (NONE, (), versions.unavailable) if kept is None else (kept.source, kept.parts, "")
        step = versions.restore_step
        return cmd.RestoreTarget(version=version, source=source, parts=parts, checkpoint=step, why=why)

    def restored(self, session: Session, command: cmd.ReportRestored) -> cmd.Reply:
        """Note the version as loaded by the trainer. Idempotent."""
        versions, version = self._versions, command.version
        if version != versions.current:
            text = "none was published" if versions.current == NONE else f"{versions.current} is current; load that"
            raise ConfigError(f"version {version} cannot be restored: {text}")
        if versions.to_restore != NONE:
            versions.restore()
            source = versions.kept[version].source if version in versions.kept else NONE
            now, who = self._context.now, session.name
            event = ev.Restored(time_s=now, worker=who, version=version, source=source, optimizer=command.optimizer)
            self._context.publish(event)
        return cmd.Done()

    def _target(self, version: int) -> KeptVersion:
        """Return the kept version with this number, or with its bytes. Raises ConfigError."""
        versions = self._versions
        kept = {each.source: each for each in versions.kept.values()} | versions.kept
        found, current = kept.get(version), versions.newest
        if found is None:
            known = ", ".join(str(number) for number in sorted(kept) if number != versions.current) or "none"
            gone = "is not kept any more" if 0 <= version <= versions.current else "was never published"
            text = f"{known} (keep_versions={self._state.limits.keep_versions})"
            raise ConfigError(f"version {version} {gone}, so nothing can be rolled back to it; kept are: {text}")
        if current is not None and found.source == current.source:
            others = ", ".join(str(number) for number, each in sorted(kept.items()) if each.source != current.source)
            number = "" if version == versions.current else f", as version {versions.current}"
            raise ConfigError(f"version {version} is current{number}; kept are: {others or 'no others'}")
        return found

    def _expire_given_up(self) -> int:
        """End groups with rows generated by versions given up. Return the number of rows."""
        rollout = self._state.tasks.admitting
        if rollout is None:
            return 0
        rows, live = self._state.rows, self._state.rows.live_ids()
        at = rows.at(live)
        by = np.maximum(rows.version[at], rows.newest[at])  # the versions of a row only rise
        for grant in rollout.leases.values():
            by[np.searchsorted(live, self._state.leases.outstanding(grant))] = grant.newest
        count = 0
        for version in np.unique(by).tolist():
            if version != NONE and self._versions.lineage.rolled_back(version):
                reason = f"version {version} was rolled back"
                count += self._assembly.terminations.end_groups(live[by == version], EXPIRED, reason)
        return count


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
