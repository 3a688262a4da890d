"""Leases: rows held by sessions, and their time limits."""

from __future__ import annotations

import numpy as np

from ...errors import LeaseLost, SchemaError
from ..commands import Ids
from .context import Context
from .rows import NONE, Rows
from .sessions import Grant, Session, Sessions, ShardedLease, Timers
from .tasks import Task, Tasks

MAX_VOIDED = 100
"""Number of ended leases with a known reason."""


class Leases:
    """``by_token``: all leases, oldest first. ``voided``: by token, why the lease of a step in parts
    ended before its acknowledgement; the newest ones."""

    def __init__(self, context: Context, rows: Rows, sessions: Sessions, tasks: Tasks) -> None:
        self._context, self._rows, self._sessions, self._tasks = context, rows, sessions, tasks
        self.by_token: dict[int, Grant] = {}
        self.deadlines = Timers(self.by_token)
        self.voided: dict[int, str] = {}
        self._next = 1

    def add(
        self,
        session: Session,
        task: Task,
        ids: Ids,
        step: int,
        newest: int,
        offsets: int,
        shards: ShardedLease | None,
    ) -> Grant:
        """Lease rows to a session, or to the sessions of ``shards``."""
        token, self._next = self._next, self._next + 1
        until = self._context.now + task.spec.lease_s
        grant = Grant(
            token, task.spec.name, session.id, ids, self._context.now, until, len(ids), step, shards, offsets, newest
        )
        task.hold(grant)
        for leases in self._indexes(grant):
            leases[token] = grant
        self.deadlines.add(token)
        return grant

    def held(self, session: Session, token: int, rank: int) -> Grant:
        """Return the lease named by a session. Raises LeaseLost."""
        grant = self.by_token.get(token)
        if grant is None or not grant.held_by(session.id, rank):
            why = self.voided.get(token, "completed, expired, returned, or its rows ended")
            raise LeaseLost(f"lease {token} is not held by {session.name}: {why}")
        return grant

    def renew(self, grant: Grant) -> None:
        """Restart the time limit of a lease."""
        grant.renew(self._context.now + self._tasks[grant.task].spec.lease_s)
        self.deadlines.add(grant.token)

    def having(self, grant: Grant, ids: Ids) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Return a mask of rows still held by the lease."""
        return self._rows.having(self._tasks[grant.task].token, grant.token, ids)

    def outstanding(self, grant: Grant) -> Ids:
        """Return the rows still held by the lease."""
        ids: Ids = grant.ids[self.having(grant, grant.ids)]
        return ids

    def of_step(self, first: int) -> list[Grant]:
        """Return leases of a step and of later ones."""
        return [grant for grant in self.by_token.values() if grant.step >= first]

    def release(self, grant: Grant, count: int) -> None:
        """Count ``count`` rows as no longer leased. The last one ends the lease."""
        if grant.release(count):
            self.remove(grant)

    def remove(self, grant: Grant) -> None:
        """End a lease, if it has not ended."""
        if grant.token not in self.by_token:
            return
        self._tasks[grant.task].drop(grant)
        for leases in self._indexes(grant):
            del leases[grant.token]

    def note_void(self, token: int, reason: str) -> None:
        """Keep the reason why a lease ended."""
        self.voided[token] = reason
        if len(self.voided) > MAX_VOIDED:
            del self.voided[next(iter(self.voided))]

    def lose_rows(self, ids: Ids, tokens: Ids) -> list[tuple[Grant, Ids]]:
        """Remove ended rows from the leases ``tokens`` (NONE: none). Notify holders that asked. Return
        leases of steps in parts with the rows they lost."""
        broken = []
        for token, count in zip(*np.unique(tokens[tokens != NONE], return_counts=True), strict=True):
            grant = self.by_token[int(token)]
            for number in grant.sessions:
                session = self._sessions.by_id.get(number)
                if session is not None and session.lose(ids[tokens == token]):
                    self._context.wake("lost")
            self.release(grant, int(count))
            if grant.parts != NONE:
                broken.append((grant, ids[tokens == token]))
        return broken

    def _indexes(self, grant: Grant) -> list[dict[int, Grant]]:
        sessions = self._sessions.by_id
        return [self.by_token, *(sessions[number].leases for number in grant.sessions if number in sessions)]


def positions(index: bytes | None, count: int) -> Ids:
    """Return positions named by a client (int32; None: all ``count``). Raises SchemaError."""
    if index is None:
        return np.arange(count)
    if len(index) % 4:
        raise SchemaError("positions are packed int32")
    at = np.frombuffer(index, "<i4")
    if len(at) and (at.min() < 0 or at.max() >= count or len(np.unique(at)) != len(at)):
        raise SchemaError(f"positions must lie in 0..{count - 1}, each once")
    return at.astype(np.int64)
