"""What a naive ledger knows of versions: who publishes, what is announced and kept, and what each replica is on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from naive_leases import PARKED, NaiveLeases
from naive_rows import Row

from asyncflow_sdk.errors import ConfigError, Ended, VersionGone
from asyncflow_sdk.ledger import commands as cmd


@dataclass
class Published:
    version: int
    source: int
    parts: tuple[cmd.Part, ...]
    by: tuple[int, ...]
    probe: bytes


@dataclass
class Coming:
    version: int
    said: set[int] = field(default_factory=set)
    parts: dict[int, cmd.Part] = field(default_factory=dict)
    probe: bytes = b""


class NaiveVersions(NaiveLeases):
    def __init__(self) -> None:
        super().__init__()
        self.ranks: dict[int, int] = {}  # rank → session
        self.world_size = 0
        self.coming: Coming | None = None
        self.kept: list[Published] = []  # those that can be fetched
        self.withdrawn: int | None = None  # the last that was announced and will not come
        self.keep_versions, self.max_swapping, self.quorum = 2, 0, 0
        self.replicas: set[int] = set()
        self.staged: dict[int, int] = {}  # by session
        self.permits: set[int] = set()  # of sessions that may load
        self.failed: dict[
            int, int
        ] = {}  # by session, the version that it could not have and has done nothing about since
        self.unheard: set[int] = set()  # ranks that do not know yet that what they published will not come
        self.claimed: set[int] = set()  # sessions on a version 0 they brought, before their first prompts
        self.committed = -1
        self.to_restore, self.restore_step = -1, -1  # of a rollback whose bytes the trainer has not loaded
        self.no_rollback = ""
        self.saved: dict[int, int] = {}  # checkpoints: version by step

    def rank_of(self, session: int) -> int | None:
        return next((rank for rank, holder in self.ranks.items() if holder == session), None)

    def taken(self, version: int) -> bool:
        return version <= self.version or (self.planned is not None and version < self.planned.number)

    def end_coming(self) -> None:
        assert self.coming is not None
        self.unheard |= set(self.coming.parts)
        self.withdrawn, self.coming = self.coming.version, None

    def to_keep(self) -> cmd.Published:
        sources = {v.source for v in self.kept}
        if self.coming is not None and self.coming.parts:
            sources.add(self.coming.version)
        return cmd.Published(keep=tuple(sorted(sources)))

    def _openpublisher(self, session: int, c: cmd.OpenPublisher, outcome: Any) -> None:
        errors: list[type[Exception]] = []
        if not 0 <= c.rank < c.world_size or self.rank_of(session) is not None or c.rank in self.ranks:
            errors.append(ConfigError)
        if self.ranks and c.world_size != self.world_size:
            errors.append(ConfigError)
        if self._is_error(outcome, errors):
            return
        parts = {v.source: v.parts[c.rank] for v in self.kept if c.rank < len(v.parts)}
        self._is(outcome, cmd.Publisher(version=self.version, kept=tuple(sorted(parts.items()))))
        self.ranks[c.rank], self.world_size = session, c.world_size
        self.no_rollback = c.no_rollback

    def _closepublisher(self, session: int, c: cmd.ClosePublisher, outcome: Any) -> None:
        self._is(outcome, cmd.Done())
        self.end_publisher(session)

    def end_publisher(self, session: int) -> None:
        rank = self.rank_of(session)
        if rank is None:
            return
        for v in list(self.kept):
            if any(who == session and not part.outlives for who, part in zip(v.by, v.parts, strict=True)):
                self.kept.remove(v)
        if self.coming is not None:
            self.end_coming()
        del self.ranks[rank]
        self.unheard.discard(rank)

    def _announce(self, session: int, c: cmd.Announce, outcome: Any) -> None:
        rank, coming = self.rank_of(session), self.coming
        odd = coming is not None and (
            (rank in coming.parts and c.version == coming.version)
            or (rank not in coming.parts and c.version < coming.version and coming.said != {rank})
        )
        errors = [ConfigError] if rank is None or self.taken(c.version) or odd or self.to_restore >= 0 else []
        fresh = coming is None or (rank not in coming.parts and c.version != coming.version)
        if fresh and self.train() is not None and self.version >= 0:
            errors += [ConfigError] * (c.version > max(self.version, self.version_of(self.in_training())) + 1)
        if self._is_error(outcome, errors):
            return
        assert rank is not None
        if self.coming is not None and rank in self.coming.parts:
            self._is(outcome, PARKED)
            return
        if self.coming is not None and self.coming.version != c.version:
            self.end_coming()
        self.coming = self.coming or Coming(c.version)
        self.coming.said.add(rank)
        assert isinstance(outcome, cmd.Published), outcome
        self._is(outcome.keep, self.to_keep().keep)
        self._is(bool(outcome.lost), rank in self.unheard)
        self.unheard.discard(rank)

    def _publish(self, session: int, c: cmd.Publish, outcome: Any) -> None:
        rank, errors = self.rank_of(session), []
        if rank is None or self.taken(c.version) or (self.coming is not None and rank in self.coming.parts):
            errors.append(ConfigError)
        elif self.coming is None or self.coming.version != c.version:
            errors.append(VersionGone if self.withdrawn == c.version else ConfigError)
        if self._is_error(outcome, errors):
            return
        assert rank is not None
        assert self.coming is not None
        self.coming.parts[rank] = c.part
        self.coming.probe = c.probe or self.coming.probe
        if set(self.coming.parts) == set(range(self.world_size)):
            ranks = range(self.world_size)
            parts = tuple(self.coming.parts[r] for r in ranks)
            by = tuple(self.ranks[r] for r in ranks)
            self.number_to(c.version)
            if self.train() is not None:
                trained = self.in_training() + (self.version >= 0)
                if self.trains[c.version] > trained or (self.version < 0 and self.trains[c.version] != trained):
                    self.trains[c.version], self.resumed = trained, None
                    self.turns.append((c.version, False))
            self.planned = None
            self.make_current(Published(c.version, c.version, parts, by, self.coming.probe))
            self.coming = None
        self._is(outcome, self.to_keep())

    def _withdraw(self, session: int, c: cmd.Withdraw, outcome: Any) -> None:
        wrong = self.rank_of(session) is None or self.coming is None or self.coming.version != c.version
        said = self.coming.version if self.coming is not None else None
        if self.rank_of(session) is not None and said != c.version == self.withdrawn:
            self._is(outcome, cmd.Done())
            return
        if self._is_error(outcome, [ConfigError] if wrong else []):
            return
        self._is(outcome, cmd.Done())
        self.end_coming()

    def _loaded(self, session: int, c: cmd.Loaded, outcome: Any) -> None:
        if self._is_error(outcome, [ConfigError] if not 0 <= c.version <= max(self.version, 0) else []):
            return
        self._is(outcome, cmd.Done())
        for token, lease in list(self.leases.items()):
            mine = lease.crew is None and lease.session == session and self.tasks[lease.task].admits
            if mine and c.version > lease.newest and not self.follows(c.version, lease.newest):
                self._return(token, self.held(token), blame=False)
        self.loaded[session] = c.version
        self.claimed.discard(session)
        if session in self.failed and c.version >= self.failed[session]:
            del self.failed[session]
        if c.version == 0 and self.version != 0:
            self.claimed.add(session)
        for lease in self.leases.values():
            if lease.crew is None and lease.session == session and self.tasks[lease.task].admits:
                lease.newest = max(lease.newest, c.version)
        if self.rolled_back(c.version):
            for token, lease in list(self.leases.items()):
                if lease.crew is None and lease.session == session and self.tasks[lease.task].admits:
                    for i in self.held(token):
                        self._end_group(i, "expired")
        self.permits.discard(session)
        self.decide()

    def _staged(self, session: int, c: cmd.Staged, outcome: Any) -> None:
        if self._is_error(outcome, [ConfigError] if not 0 <= c.version <= self.version else []):
            return
        self._is(outcome, cmd.Done())
        self.replicas.add(session)
        self.failed.pop(session, None)
        self.staged[session] = c.version
        self.decide()

    def _notloaded(self, session: int, c: cmd.NotLoaded, outcome: Any) -> None:
        if self._is_error(outcome, [ConfigError] if not 0 <= c.version <= self.version else []):
            return
        self._is(outcome, cmd.Done())
        self.replicas.add(session)
        self.failed[session] = c.version
        if self.staged.get(session) == c.version:
            del self.staged[session]
        self.permits.discard(session)

    def _retire(self, session: int, c: cmd.Retire, outcome: Any) -> None:
        self._is(outcome, cmd.Done())
        self.loaded[session] = None
        self.failed.pop(session, None)
        self.replicas.discard(session)
        self.staged.pop(session, None)
        self.permits.discard(session)
        self.claimed.discard(session)

    def _swap(self, session: int, c: cmd.Swap, outcome: Any) -> None:
        errors: list[type[Exception]] = []
        if self.given_up(c.version):
            errors.append(VersionGone)
        if self.staged.get(session) != c.version:
            errors.append(ConfigError)
        elif c.version != self.version and not (self.quorum and c.version == self.committed):
            errors.append(VersionGone)
        if self._is_error(outcome, errors):
            return
        busy = self.max_swapping and session not in self.permits and len(self.permits) >= self.max_swapping
        if (self.quorum and c.version > self.committed) or busy:
            self._is(outcome, PARKED)
            return
        self._is(outcome, cmd.Permitted(version=c.version))
        self.failed.pop(session, None)
        waiting = [p for p in self.parked if isinstance(p.command, cmd.Swap)]
        first = next((p for p in waiting if p.command.version == c.version), None)
        assert first is None or first.session == session or session in self.permits, "somebody asked before"
        self.permits.add(session)

    def _rollback(self, session: int, c: cmd.Rollback, outcome: Any) -> None:
        kept = {v.source: v for v in self.kept} | {v.version: v for v in self.kept}
        current = next((v for v in self.kept if v.version == self.version), None)
        found = kept.get(c.version)
        wrong = self.no_rollback or found is None or (current is not None and found.source == current.source)
        if self._is_error(outcome, [ConfigError] if wrong else []):
            return
        assert found is not None
        assert isinstance(outcome, cmd.RolledBack), outcome
        number, step = max(self.version, self.coming.version if self.coming else -1) + 1, self.trains[self.version]
        if self.train() is not None:
            step = self.next_to_train()
        self.number_to(number - 1)
        self.parents[number], self.trains[number] = c.version, step
        if self.coming is not None:
            self.end_coming()
        self.turns.append((number, True))
        self.resumed = self.planned = None
        self.make_current(Published(number, found.source, found.parts, found.by, found.probe))
        before = len(self.live())
        for i, row in self.live().items():
            if self.generated_by_what_is_given_up(i, row):
                self._end_group(i, "expired")
        fitting = [step for step, version in self.saved.items() if version in (found.version, found.source)]
        self.to_restore, self.restore_step = number, max(fitting, default=-1)
        expired = before - len(self.live())
        self._is(outcome, cmd.RolledBack(version=number, expired=expired, checkpoint=self.restore_step))

    def _getrestoration(self, session: int, c: cmd.GetRestoration, outcome: Any) -> None:
        assert isinstance(outcome, cmd.Restoration), outcome
        kept = next((v for v in self.kept if v.version == self.to_restore), None)
        assert (outcome.version, outcome.checkpoint) == (self.to_restore, self.restore_step), outcome
        assert outcome.parts == (() if kept is None else kept.parts), outcome

    def _restored(self, session: int, c: cmd.Restored, outcome: Any) -> None:
        if self._is_error(outcome, [ConfigError] if c.version != self.version else []):
            return
        self._is(outcome, cmd.Done())
        self.to_restore = self.restore_step = -1

    def generated_by_what_is_given_up(self, i: int, row: Row) -> bool:
        by = {row.version, row.newest}
        for token, lease in self.leases.items():
            if self.tasks[lease.task].admits and i in self.held(token):
                by.add(lease.newest)
        return any(self.rolled_back(version) for version in by if version is not None)

    def make_current(self, version: Published) -> None:
        before = self.version
        self.published.append(version)
        if self.quorum and self.given_up(before):
            self.committed = version.version  # decided at once
        self.kept = [*self.kept, version][-self.keep_versions :]
        self.withdrawn = None

    def decide(self) -> None:
        """Whether enough replicas have the current version."""
        having = [s for s in self.replicas if self.version in (self.staged.get(s), self.loaded[s])]
        if self.quorum and len(having) >= self.quorum:
            self.committed = self.version

    def must_load(self, session: int) -> int | None:
        loaded = self.loaded[session]
        assert loaded is not None
        if loaded < self.committed:
            return self.committed
        late = session in self.claimed and self.version > 0
        return self.version if late or self.given_up(loaded) else None

    def take_over(self, session: int, command: Any) -> None:
        super().take_over(session, command)
        if isinstance(command, cmd.AwaitVersion | cmd.Swap):
            self.replicas.add(session)
        if isinstance(command, cmd.Swap):
            self.failed.pop(session, None)

    def _awaitversion(self, session: int, c: cmd.AwaitVersion, outcome: Any) -> None:
        retired = session not in self.replicas and any(p.command is c for p in self.parked)
        if self._is_error(outcome, [ConfigError] if retired else []):
            return
        if self._is_error(outcome, [Ended] if session in self.dismissed else []):
            return
        new = self.published[-1] if self.published and self.published[-1] in self.kept else None
        loaded, decided = self.loaded[session], [v for v in self.kept if v.version == self.committed]
        if decided and (loaded is None or loaded < self.committed) and self.failed.get(session) != self.committed:
            new = decided[0]  # it may load nothing else
        if new is not None and new.version > max(c.after, -1):
            self.replicas.add(session)
            self.failed.pop(session, None)
            self._is(outcome, cmd.Version(version=new.version, parts=new.parts, source=new.source, probe=new.probe))
        elif not self._is_error(outcome, [Ended] if self.ended and all(map(self.exhausted, self.rollouts())) else []):
            self._is(outcome, PARKED)

    def drop(self, session: int, blame: bool) -> None:
        self.end_publisher(session)
        self.replicas.discard(session)
        self.staged.pop(session, None)
        self.permits.discard(session)
        self.claimed.discard(session)
        super().drop(session, blame)
