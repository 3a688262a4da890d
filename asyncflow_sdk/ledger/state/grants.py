"""Granted leases, and the shards of a rank group's lease."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ..commands import Ids
from .rows import NONE


@dataclass
class ShardedLease:
    """The ranks of a group's lease.

    ``members``: session of each rank. ``bounds``: shard s has the rows from bounds[s] to bounds[s +
    1]. ``done``: ranks with a finished shard. ``finished``: bool mask of completed rows. ``seen``:
    by rank, bool mask of its shard's rows that it completed or returned. ``filtered``: by shard,
    positions to drop once every rank has acknowledged the step.
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
        """Number of ranks."""
        return len(self.members)

    @property
    def overlapping(self) -> bool:
        """True if several ranks have the same shard."""
        return len(self.bounds) - 1 < self.size

    def shard(self, rank: int) -> int:
        """Return the shard number of a rank."""
        return rank * (len(self.bounds) - 1) // self.size

    def span(self, rank: int) -> slice:
        """Return the slice of a rank's rows."""
        shard = self.shard(rank)
        return slice(self.bounds[shard], self.bounds[shard + 1])


@dataclass
class DealtPart:
    """Rows of a step delivered together. Shard s has the rows from bounds[s] to bounds[s + 1]."""

    ids: Ids
    bounds: list[int]

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.bounds) - 1

    def without(self, ids: Ids) -> DealtPart:
        """Return the part without these rows."""
        kept = ~np.isin(self.ids, ids)
        return DealtPart(self.ids[kept], [int(kept[:bound].sum()) for bound in self.bounds])


@dataclass
class Grant:
    """A lease. ``left``: rows not completed yet. ``shards``: of a rank group's lease, else None.
    ``offsets``: number of version offsets when granted. ``newest``: the newest version loaded since
    by its replica, or the version trained by its step. ``parts``: number of delivered parts of a
    step in parts; NONE for other leases. ``since``, ``expires``: ledger seconds."""

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
    parts: int = NONE

    @property
    def sessions(self) -> list[int]:
        """The holders."""
        return [self.session] if self.shards is None else list(dict.fromkeys(self.shards.members))

    def part(self, rank: int) -> Ids:
        """Return the rows meant by positions in a command of this rank."""
        return self.ids if self.shards is None else self.ids[self.shards.span(rank)]

    def held_by(self, session: int, rank: int) -> bool:
        """True if a session holds the lease under this rank."""
        if self.shards is None:
            return session == self.session
        return 0 <= rank < self.shards.size and session == self.shards.members[rank]

    def session_of(self, rank: int) -> int:
        """Return the session of a rank."""
        return self.session if self.shards is None else self.shards.members[rank]

    def left_of(self, session: int) -> int:
        """Return the number of rows that a holder has not completed or returned."""
        shards = self.shards
        if shards is None:
            return self.left
        ranks = [rank for rank, member in enumerate(shards.members) if member == session and rank not in shards.done]
        spans = [(rank, shards.span(rank)) for rank in ranks]
        return sum(span.stop - span.start - int(np.sum(shards.seen.get(rank, 0))) for rank, span in spans)

    def extend(self, part: DealtPart) -> None:
        """Add a part of its step. The rows of a shard stay together, in order of delivery."""
        shards = self.shards
        if shards is None:
            self.ids = np.concatenate([self.ids, part.ids])
        else:
            bounds = list(zip(shards.bounds, part.bounds, strict=True))
            pieces = [
                piece
                for (old, new), (old_end, new_end) in pairwise(bounds)
                for piece in (self.ids[old:old_end], part.ids[new:new_end])
            ]
            self.ids, shards.bounds = np.concatenate(pieces), [old + new for old, new in bounds]
        self.left += len(part.ids)
        self.parts += 1

    @property
    def over(self) -> bool:
        """True if no holder has any rows left."""
        shards = self.shards
        if self.left:
            return False
        return shards is None or not shards.overlapping or self.step != NONE or len(shards.done) == shards.size
