"""Granted leases, and who works on the shards of one that a rank group shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..commands import Ids
from .rows import NONE


@dataclass
class ShardedLease:
    """Who works on a lease of a rank group.

    ``members``: the session of each rank. ``bounds``: shard s has the rows from bounds[s] to bounds[s + 1]. ``done``: ranks
    that are through with their shard. ``finished``: bool for each row, True if it was completed. ``seen``: by rank, bool for each
    row of its shard, True if the rank completed it or gave it back. ``filtered``: by shard, positions to drop when every rank has
    acknowledged the step.
    """

    group: str
    members: list[int]
    bounds: list[int]
    done: set[int] = field(default_factory=set)
    finished: Any = None
    seen: dict[int, Any] = field(default_factory=dict)
    filtered: dict[int, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def overlapping(self) -> bool:
        """True if several ranks have the same shard."""
        return len(self.bounds) - 1 < self.size

    def shard(self, rank: int) -> int:
        return rank * (len(self.bounds) - 1) // self.size

    def span(self, rank: int) -> slice:
        shard = self.shard(rank)
        return slice(self.bounds[shard], self.bounds[shard + 1])


@dataclass
class Grant:
    """A lease. ``left``: rows still to be completed. ``shards``: of a rank group's lease, else None. ``offsets``: how many version
    offsets there were when it was granted. ``newest``: the newest version its replica loaded since, or the version that its
    step trains. ``since``, ``expires``: ledger seconds."""

    token: int
    task: str
    session: int
    ids: Ids
    since: float
    expires: float
    left: int
    step: int = NONE
    shards: ShardedLease | None = None
    offsets: int = 1
    newest: int = NONE

    @property
    def sessions(self) -> list[int]:
        """Its holders."""
        return [self.session] if self.shards is None else list(dict.fromkeys(self.shards.members))

    def part(self, rank: int) -> Ids:
        """The rows that positions in a command of this rank refer to."""
        return self.ids if self.shards is None else self.ids[self.shards.span(rank)]

    def held_by(self, session: int, rank: int) -> bool:
        if self.shards is None:
            return session == self.session
        return 0 <= rank < self.shards.size and session == self.shards.members[rank]

    def session_of(self, rank: int) -> int:
        return self.session if self.shards is None else self.shards.members[rank]

    def left_of(self, session: int) -> int:
        """Rows that one of its holders has still to complete or give back."""
        shards = self.shards
        if shards is None:
            return self.left
        ranks = [rank for rank, member in enumerate(shards.members) if member == session and rank not in shards.done]
        spans = [(rank, shards.span(rank)) for rank in ranks]
        return sum(span.stop - span.start - int(np.sum(shards.seen.get(rank, 0))) for rank, span in spans)

    @property
    def over(self) -> bool:
        """True if no holder has any rows left."""
        shards = self.shards
        if self.left:
            return False
        return shards is None or not shards.overlapping or self.step != NONE or len(shards.done) == shards.size
