"""Publishing: who has the role, what is announced, and what becomes current when every rank's part is there.

The publisher is ``world_size`` ranks, each of one live session. A version is announced, its parts are published, and with
the last of them it is current; if a rank withdraws it or dies before that, it is forgotten as a whole.
"""

from __future__ import annotations

from ..errors import ConfigError, VersionGone
from ..types import events as ev
from . import commands as cmd
from .intake import Intake
from .records import Session
from .rows import NONE
from .state import MAX_NUMBER
from .versions import Announced, Kept


class Publishing(Intake):
    """Takes versions from their publisher."""

    def _open_publisher(self, session: Session, command: cmd.OpenPublisher) -> cmd.Reply:
        rank, size = command.rank, command.world_size
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} of {size} cannot publish: ranks are 0 to world_size - 1")
        who = f"rank {rank} of this run's publisher"
        if session.rank != NONE:
            raise ConfigError(
                f"{session.name} is rank {session.rank} of this run's publisher already; close that one first"
            )
        if self.publisher and size != self.publisher_size:
            other, holder = next(iter(self.publisher.items()))
            raise ConfigError(
                f"{who} cannot be one of {size}: {self._who(holder)} is rank {other} of {self.publisher_size}; open all ranks"
                " with one world_size, or end that publisher first"
            )
        if rank in self.publisher:
            raise ConfigError(
                f"{who} is {self._who(self.publisher[rank])}: a run has one publisher at a time. Publish there, close it, or"
                f" end its process; if its host is gone, run.evict({self.publisher[rank]}) says so"
            )
        self.publisher[rank], self.publisher_size, session.rank = session.id, size, rank
        self.no_rollback = command.no_rollback
        kept = {each.source: each.parts[rank] for each in self.versions.values() if rank < len(each.parts)}
        return cmd.Publisher(version=self.version, kept=tuple(sorted(kept.items())))

    def _close_publisher(self, session: Session, command: cmd.ClosePublisher) -> cmd.Reply:
        self._end_publisher(session, "closed its publisher")
        return cmd.Done()

    def _announce(self, session: Session, command: cmd.Announce) -> cmd.Reply | None:
        rank, version, said = self._rank(session), command.version, self.announced
        self._check_number(version)
        if self.to_restore != NONE:
            raise ConfigError(
                f"version {version} cannot be published: the run was rolled back, and the trainer has not loaded version"
                f" {self.to_restore} yet. Load it, then call run.restored({self.to_restore})"
            )
        if said is not None and rank in said.parts:
            if version == said.version:
                raise ConfigError(f"rank {rank} has published its part of version {version} already")
            return None
        if said is not None and version < said.version and said.ranks != {rank}:
            others = ", ".join(f"rank {r} ({self._name(self.publisher[r])})" for r in sorted(said.ranks - {rank}))
            raise ConfigError(
                f"rank {rank} cannot announce version {version}: {others} announced {said.version}, which is not there yet;"
                f" all ranks publish one version, under one number, now {said.version} or a higher one"
            )
        if said is None or version != said.version:
            self._check_step(version)
            if said is not None:  # without this rank's part it would never be there
                number, why = self.not_coming
                before = f"; {why}" if number == said.version else ""
                self._forget_announced(
                    f"was withdrawn: rank {rank} ({session.name}) announced {version} in its place{before}"
                )
            said = self.announced = Announced(version, self._now)
        said.ranks.add(rank)
        return self._what_to_keep(self.lost.pop(rank, ""))

    def _publish(self, session: Session, command: cmd.Publish) -> cmd.Reply:
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
        if len(said.parts) == self.publisher_size:
            self.announced = None
            parts = tuple(said.parts[each] for each in range(self.publisher_size))
            sessions = tuple(self.publisher[each] for each in range(self.publisher_size))
            self._place(version)
            self._make_current(Kept(version, version, parts, sessions, said.probe, self._now), session.name)
        return self._what_to_keep()

    def _withdraw_version(self, session: Session, command: cmd.Withdraw) -> cmd.Reply:
        version = command.version
        self._rank(session)
        if self.announced is None or self.announced.version != version:
            if version == self.not_coming[0]:
                return cmd.Done()  # another rank was first
            raise ConfigError(f"version {version} is not announced, so it cannot be withdrawn")
        because = f": {command.reason}" if command.reason else ""
        self._forget_announced(f"was withdrawn by {session.name}{because}")
        return cmd.Done()

    def weight_sessions(self) -> set[int]:
        """Those that wrote versions that are kept, alive or not."""
        return {session for each in self.versions.values() for session in each.sessions}

    def _make_current(self, kept: Kept, worker: str, reason: str = "") -> None:
        self.version, self.version_since = kept.version, self._now
        self.versions[kept.version] = kept
        for old in list(self.versions)[: -self.keep_versions]:
            del self.versions[old]
        self._effects.events.append(
            ev.Published(
                time_s=self._now, worker=worker, version=kept.version, nbytes=kept.nbytes, root=kept.root,
                source=NONE if kept.source == kept.version else kept.source, reason=reason,
            )
        )  # fmt: skip
        self.not_coming, self.not_there = (NONE, ""), ""
        self._dirty.update(("version", "swap", "announce"))
        self._wake_replicas()

    def _what_to_keep(self, lost: str = "") -> cmd.Published:
        sources = {each.source for each in self.versions.values()}
        if self.announced is not None and self.announced.parts:
            sources.add(self.announced.version)
        return cmd.Published(keep=tuple(sorted(sources)), lost=lost)

    def _check_number(self, version: int) -> None:
        if version <= self.version:
            raise ConfigError(
                f"version {version} cannot be published: {self.version} is already current, and a number is never used again"
                f"{self._why_taken(version)}"
            )
        if version < self.lineage.last.first and self.lineage.last.lost:
            raise ConfigError(f"version {version} cannot be published{self._why_taken(version)}")
        if version > MAX_NUMBER:
            raise ConfigError(f"version {version} is past the largest number, {MAX_NUMBER}")

    def _check_step(self, version: int) -> None:
        """A version is one step ahead of the one before: numbers left out would let rows be older than the staleness rule says."""
        if self.steps is None or self.version == NONE:
            return
        step = self._in_training()
        most = max(self.version, self._version_of(step)) + 1
        if version > most:
            raise ConfigError(
                f"version {version} cannot be published: {self.version} is current and step {step} is not trained yet, so the"
                f" next number is {most}; a step is published as step.version + 1"
            )

    def _in_training(self) -> int:
        """The first step whose update is not published."""
        assert self.steps is not None
        step, waiting = self._next_to_train(), {step for step, _ in self.steps.closed}
        last = self.steps.window.step
        while self.version > self.lineage.version(step) and step + 1 < last and step + 1 not in waiting:
            step += 1  # published, and not acknowledged yet, while the next one is trained
        return step

    def _place(self, version: int) -> None:
        """Of a version that becomes current: it is trained by the step after the one in training, or by an earlier one. The
        first version is trained by the first step, whatever its number."""
        if self.steps is None:
            return
        step = self._in_training()
        most = step if self.version == NONE else min(self.lineage.step(version), step + 1)
        self.lineage.place(version, most)

    def _why_taken(self, version: int) -> str:
        """What a trainer may not have known that publishes what it trained to since."""
        last = self.lineage.last
        if not last.parent < version <= last.first or not (last.lost or last.rolled_back):
            return ""
        if last.lost:
            return f". Training went on from step {last.first - last.shift}, whose version is {last.first}: number from there"
        return (
            f". Version {last.first} is what was rolled back to, with the bytes of {last.parent}: what was trained from the"
            f" versions given up is not wanted. Load {self.version} into the trainer and go on from there; its next version"
            f" is {self.version + 1}, also for a step that was leased before the rollback"
        )

    def _rank(self, session: Session) -> int:
        if session.rank == NONE:
            raise ConfigError(f"{session.name} is not this run's publisher; open one before versions are published")
        return session.rank

    def _who(self, session: int) -> str:
        return f"{self._name(session)} (session {session})"

    def _forget_announced(self, what: str) -> None:
        """A version will not come. ``what``: happened to it."""
        said = self.announced
        if said is not None:
            self.not_coming = (said.version, f"version {said.version} {what}")
            self.lost.update(dict.fromkeys(said.parts, self.not_coming[1]))
            self.announced = None
            self._effects.events.append(ev.Note(time_s=self._now, text=self.not_coming[1], level="warning"))
            self._dirty.add("announce")

    def _end_publisher(self, session: Session, reason: str) -> None:
        """A rank is nobody's any more; what cannot be fetched without it is kept no longer."""
        if session.rank == NONE:
            return
        said = self.announced
        if said is not None:
            first = self._name(self.publisher[min(said.ranks)])
            which = "which" if first == session.name else f"and rank {session.rank} ({session.name})"
            self._forget_announced(f"was announced by {first}, {which} {reason}")
        del self.publisher[session.rank]
        self.lost.pop(session.rank, None)
        session.rank = NONE
        for each in list(self.versions.values()):
            holds = zip(each.sessions, each.parts, strict=True)
            if any(who == session.id and not part.outlives for who, part in holds):
                del self.versions[each.version]
                if each.version == self.version:
                    self.not_there = (
                        f"it cannot be fetched any more, since {session.name}, which had its bytes, {reason}"
                    )

    def _drop_session(self, session: int, reason: str, blame: bool) -> None:
        if session in self.sessions:
            self._end_publisher(self.sessions[session], f"died: {reason}" if blame else "left")
        super()._drop_session(session, reason, blame)
