"""What a naive ledger knows of versions: who publishes, what is announced and kept, and what each replica is on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from naive_leases import PARKED, NaiveLeases

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

    def rank_of(self, session: int) -> int | None:
        return next((rank for rank, holder in self.ranks.items() if holder == session), None)

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
        parts = sorted((v.source, v.parts[c.rank]) for v in self.kept if c.rank < len(v.parts))
        self._is(outcome, cmd.Publisher(version=self.version, kept=tuple(parts)))
        self.ranks[c.rank], self.world_size = session, c.world_size

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
            self.withdrawn, self.coming = self.coming.version, None
        del self.ranks[rank]

    def _announce(self, session: int, c: cmd.Announce, outcome: Any) -> None:
        rank, coming = self.rank_of(session), self.coming
        odd = coming is not None and (rank in coming.parts) == (c.version == coming.version)
        if self._is_error(outcome, [ConfigError] if rank is None or c.version <= self.version or odd else []):
            return
        assert rank is not None
        if self.coming is not None and rank in self.coming.parts:
            self._is(outcome, PARKED)
            return
        self.coming = self.coming or Coming(c.version)
        self.coming.said.add(rank)
        self._is(outcome, self.to_keep())

    def _publish(self, session: int, c: cmd.Publish, outcome: Any) -> None:
        rank, errors = self.rank_of(session), []
        if rank is None or c.version <= self.version or (self.coming is not None and rank in self.coming.parts):
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
            self.published.append(Published(c.version, c.version, parts, by, self.coming.probe))
            self.kept = [*self.kept, self.published[-1]][-self.keep_versions :]
            self.coming = self.withdrawn = None
        self._is(outcome, self.to_keep())

    def _withdraw(self, session: int, c: cmd.Withdraw, outcome: Any) -> None:
        wrong = self.rank_of(session) is None or self.coming is None or self.coming.version != c.version
        if self._is_error(outcome, [ConfigError] if wrong else []):
            return
        self._is(outcome, cmd.Done())
        self.withdrawn, self.coming = c.version, None

    def _loaded(self, session: int, c: cmd.Loaded, outcome: Any) -> None:
        if self._is_error(outcome, [ConfigError] if not 0 <= c.version <= max(self.version, 0) else []):
            return
        self._is(outcome, cmd.Done())
        self.loaded[session] = c.version

    def _awaitversion(self, session: int, c: cmd.AwaitVersion, outcome: Any) -> None:
        new = self.published[-1] if self.published and self.published[-1] in self.kept else None
        if new is not None and new.version > max(c.after, -1):
            self._is(outcome, cmd.Version(version=new.version, parts=new.parts, source=new.source, probe=new.probe))
        elif not self._is_error(outcome, [Ended] if self.ended and all(map(self.exhausted, self.rollouts())) else []):
            self._is(outcome, PARKED)

    def drop(self, session: int, blame: bool) -> None:
        self.end_publisher(session)
        super().drop(session, blame)
