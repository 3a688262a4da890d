"""Status of a queue: its counters, and why requests wait. The cost does not depend on live rows."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any

from ..types.reports import TERMINAL, LeaseStatus, ParkedStatus, SessionStatus, StatusReport, VersionStatus
from . import commands as cmd
from .diagnostics import Diagnostics, doing, join_some
from .publication import VersionPublication
from .replicas import Replicas
from .staleness import StalenessControl
from .state import LedgerState
from .state.grants import Grant
from .state.parked import ParkedRequest
from .state.rows import NONE, TASK_STATES
from .state.sessions import Session

MAX_LISTED = 100
"""Limit of explained requests, the longest waiting, and of listed sessions, the oldest."""


class StatusReporter:
    """Reads the ledger and changes nothing."""

    def __init__(
        self,
        state: LedgerState,
        staleness: StalenessControl,
        publication: VersionPublication,
        replicas: Replicas,
        diagnostics: Diagnostics,
    ) -> None:
        self._state, self._staleness = state, staleness
        self._diagnostics, self._publication = diagnostics, publication
        self._replicas = replicas

    def report(self) -> StatusReport:
        """Return rows by task and state, sessions, leases and parked requests."""
        now = self._state.context.now
        limits = self._state.limits
        budget = self._state.budget
        versions = self._state.versions
        announced, rule = self._publication.announced, self._staleness.rule
        window = self._state.steps.window if self._state.steps.declared else None
        waiting = list(self._state.parked.by_ticket.values())
        longest = heapq.nsmallest(MAX_LISTED, waiting, key=lambda request: request.since)
        parked = tuple(self._parked_status(request) for request in longest)
        oldest = next(iter(self._state.leases.by_token.values()), None)
        ended = dict(zip(TERMINAL, self._state.rows.ended[1:].tolist(), strict=True))
        return StatusReport(
            rows={task.spec.name: dict(zip(TASK_STATES, task.counts, strict=True)) for task in self._state.tasks},
            ended=ended,
            waiting={
                status.name: f"after {status.since_s:.1f} s: {status.why}"
                for request, status in zip(longest, parked, strict=True)
                if not self._works_meanwhile(request)
            },
            step=window.step if window else NONE,
            free_slots=window.free if window else 0,
            version=versions.current,
            live=budget.put - sum(ended.values()),
            put=budget.put,
            capacity_rows=limits.capacity_rows,
            capacity_bytes=limits.capacity_bytes,
            charged_bytes=budget.charged,
            arrived={task.spec.name: task.became_ready for task in self._state.tasks},
            completed={task.spec.name: task.completed for task in self._state.tasks},
            sessions=tuple(self._session_status(session) for session in self._listed(waiting)),
            session_count=len(self._state.sessions.by_id),
            parked=parked,
            parked_count=len(waiting),
            oldest=self._lease_status(oldest) if oldest is not None else None,
            lease_count=len(self._state.leases.by_token),
            batch_rows=window.batch_rows if window else 0,
            steps=limits.steps,
            version_age_s=now - versions.since if versions.current >= 0 else -1.0,
            over=self._state.partitions.ended,
            time_s=now,
            versions=self._version_statuses(),
            publisher=join_some(
                self._state.sessions.name(session) for _, session in sorted(self._publication.ranks.items())
            ),
            announced=announced.version if announced is not None else NONE,
            announced_s=now - announced.since if announced is not None else 0.0,
            committed=versions.committed,
            held=budget.held,
            checkpoint=self._state.steps.checkpoint,
            staleness=rule.spec.name,
            max_staleness=limits.max_staleness if window else NONE,
            promise=rule.promise,
            ages=self._state.metrics.ages,
            in_parts=self._in_parts(),
        )

    def _in_parts(self) -> tuple[tuple[int, int], ...]:
        """Return step and delivered rows of each step leased in parts."""
        steps = self._state.steps
        leases = steps.task.leases.values() if steps.declared else ()
        return tuple((grant.step, grant.left) for grant in leases if grant.parts != NONE)

    def _works_meanwhile(self, request: ParkedRequest) -> bool:
        """True if the client works while it waits, for lost rows or for a newer version."""
        if isinstance(request.command, cmd.AwaitLost):
            return True
        loaded = self._state.sessions.by_id[request.session].loaded
        return isinstance(request.command, cmd.AwaitVersion) and loaded is not None

    def _listed(self, waiting: list[ParkedRequest]) -> list[Session]:
        """Return all sessions; if too many, first those with requests or rows."""
        sessions = list(self._state.sessions.by_id.values())
        if len(sessions) <= MAX_LISTED:
            return sessions
        busy = {request.session for request in waiting}
        return heapq.nsmallest(MAX_LISTED, sessions, key=lambda s: (s.id not in busy and not s.leases, s.id))

    def _session_status(self, session: Session) -> SessionStatus:
        now, replica = self._state.context.now, session.replica
        oldest, preparing = next(iter(session.leases.values()), None), self._state.sessions.preparing.get(session.id)
        return SessionStatus(
            id=session.id,
            name=session.name,
            age_s=now - session.since,
            loaded=session.loaded,
            leases=len(session.leases),
            rows=sum(grant.left_of(session.id) for grant in session.leases.values()),
            task=oldest.task if oldest is not None else "",
            held_s=now - oldest.since if oldest is not None else 0.0,
            replica=replica is not None,
            weights=doing(session),
            weights_s=now - replica.since if replica is not None and replica.doing else 0.0,
            prepares=preparing.what if preparing is not None else "",
            prepares_s=now - preparing.since if preparing is not None else 0.0,
        )

    def _version_statuses(self) -> tuple[VersionStatus, ...]:
        replicas, now = self._replicas.sessions(), self._state.context.now
        on = Counter(session.loaded for session in replicas)
        staged = Counter(session.replica.staged for session in replicas if session.replica is not None)
        return tuple(
            VersionStatus(
                version=each.version, source=each.source, age_s=now - each.since, nbytes=each.nbytes, root=each.root,
                transport=each.parts[0].transport, on=on[each.version], staged=staged[each.version],
            )
            for each in self._state.versions.kept.values()
        )  # fmt: skip

    def _lease_status(self, grant: Grant) -> LeaseStatus:
        now = self._state.context.now
        return LeaseStatus(
            token=grant.token, task=grant.task, session=grant.session, name=self._state.sessions.name(grant.session),
            rows=grant.left, since_s=now - grant.since, left_s=grant.expires - now,
        )  # fmt: skip

    def _parked_status(self, request: ParkedRequest) -> ParkedStatus:
        now = self._state.context.now
        return ParkedStatus(
            session=request.session, name=self._state.sessions.name(request.session), verb=verb_of(request.command),
            why=self._diagnostics.why(request), since_s=now - request.since, left_s=request.expires - now,
        )  # fmt: skip


def verb_of(command: Any) -> str:
    """Describe a waiting command in a few words ("get train", "put 64 rows")."""
    match command:
        case cmd.LeaseRows():
            return f"get {command.task}"
        case cmd.AddRows():
            return f"put {command.groups * command.group_size} rows"
        case cmd.AwaitPins():
            return "the end of the evaluations"
        case cmd.AwaitVersion():
            return f"weights after {command.after}"
        case cmd.Announce():
            return f"publish {command.version}"
        case cmd.Swap():
            return f"load {command.version}"
        case cmd.AllGather():
            return f"meet at {command.what}"
        case cmd.AwaitLost():
            return "lost"
    return "wanted"
