"""The status of a queue: counters that are kept anyway, and who waits for what. Its cost does not follow the rows alive."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING

from . import commands as cmd
from .commands import TERMINAL, LeaseStatus, ParkedStatus, SessionStatus, StatusReport, VersionStatus
from .explain import explain
from .rows import NONE, TASK_STATES
from .whereabouts import doing, named

if TYPE_CHECKING:
    from .records import Held, Session, Waiter
    from .state import State

MOST = 100
"""So many parked requests are explained, and so many sessions named; the longest waiting and the oldest ones."""


def report(ledger: State) -> StatusReport:
    """Rows by task and state, sessions, leases and parked requests, now."""
    now, steps = ledger._now, ledger.steps
    waiters = list(ledger.parked.values())
    longest = heapq.nsmallest(MOST, waiters, key=lambda waiter: waiter.since)
    parked = tuple(_parked(ledger, waiter, now) for waiter in longest)
    oldest = next(iter(ledger.leases.values()), None)
    ended = dict(zip(TERMINAL, ledger.rows.ended[1:].tolist(), strict=True))
    return StatusReport(
        rows={name: dict(zip(TASK_STATES, task.counts, strict=True)) for name, task in ledger.tasks.items()},
        ended=ended,
        waiting={
            said.name: f"after {said.since_s:.1f} s: {said.why}"
            for waiter, said in zip(longest, parked, strict=True)
            if not _aside(ledger, waiter)
        },
        step=steps.window.step if steps else NONE,
        free_slots=steps.window.free if steps else 0,
        version=ledger.version,
        live=ledger.put_total - sum(ended.values()),
        put=ledger.put_total,
        capacity_rows=ledger.capacity_rows,
        capacity_bytes=ledger.capacity_bytes,
        charged_bytes=ledger.charged,
        came={name: task.came for name, task in ledger.tasks.items()},
        passed={name: task.passed for name, task in ledger.tasks.items()},
        sessions=tuple(_session(ledger, session, now) for session in _most_telling(ledger, waiters)),
        session_count=len(ledger.sessions),
        parked=parked,
        parked_count=len(waiters),
        oldest=_lease(ledger, oldest, now) if oldest is not None else None,
        lease_count=len(ledger.leases),
        batch_rows=steps.window.batch_rows if steps else 0,
        steps=ledger.last_steps,
        version_age_s=now - ledger.version_since if ledger.version >= 0 else -1.0,
        over=ledger.ended,
        time_s=now,
        versions=_versions(ledger, now),
        publisher=named(ledger._name(ledger.publisher[rank]) for rank in sorted(ledger.publisher)),
        announced=ledger.announced.version if ledger.announced is not None else NONE,
        announced_s=now - ledger.announced.since if ledger.announced is not None else 0.0,
        committed=ledger.committed,
        held=ledger.held,
        checkpoint=ledger.checkpoint,
        staleness=ledger.rule.spec.name,
        max_staleness=ledger.max_staleness if steps else NONE,
        promise=ledger.rule.promise,
        ages=ledger.ages,
    )


def _aside(ledger: State, waiter: Waiter) -> bool:
    """Whether it works meanwhile: a replica that has weights and hears of newer ones, or of rows that have ended."""
    if isinstance(waiter.command, cmd.AwaitLost):
        return True
    return isinstance(waiter.command, cmd.AwaitVersion) and ledger.sessions[waiter.session].loaded is not None


def _most_telling(ledger: State, waiters: list[Waiter]) -> list[Session]:
    """Sessions, those that wait or hold rows first when there are too many to name."""
    sessions = list(ledger.sessions.values())
    if len(sessions) <= MOST:
        return sessions
    waiting = {waiter.session for waiter in waiters}
    return heapq.nsmallest(MOST, sessions, key=lambda s: (s.id not in waiting and not s.leases, s.id))


def _session(ledger: State, session: Session, now: float) -> SessionStatus:
    oldest, preparing = next(iter(session.leases.values()), None), ledger.preparing.get(session.id)
    return SessionStatus(
        id=session.id,
        name=session.name,
        age_s=now - session.since,
        loaded=session.loaded,
        leases=len(session.leases),
        rows=sum(held.left_of(session.id) for held in session.leases.values()),
        task=oldest.task if oldest is not None else "",
        held_s=now - oldest.since if oldest is not None else 0.0,
        replica=session.replica is not None,
        weights=doing(session),
        weights_s=now - session.replica.since if session.replica is not None and session.replica.doing else 0.0,
        prepares=preparing.what if preparing is not None else "",
        prepares_s=now - preparing.since if preparing is not None else 0.0,
    )


def _versions(ledger: State, now: float) -> tuple[VersionStatus, ...]:
    replicas = [ledger.sessions[number] for number in ledger.replicas]
    on = Counter(session.loaded for session in replicas)
    staged = Counter(session.replica.staged for session in replicas if session.replica is not None)
    return tuple(
        VersionStatus(
            version=each.version, source=each.source, age_s=now - each.since, nbytes=each.nbytes, root=each.root,
            transport=each.parts[0].transport, on=on[each.version], staged=staged[each.version],
        )
        for each in ledger.versions.values()
    )  # fmt: skip


def _lease(ledger: State, held: Held, now: float) -> LeaseStatus:
    return LeaseStatus(
        token=held.token, task=held.task, session=held.session, name=ledger._name(held.session), rows=held.left,
        since_s=now - held.since, left_s=held.expires - now,
    )  # fmt: skip


def _parked(ledger: State, waiter: Waiter, now: float) -> ParkedStatus:
    _, _, why = explain(ledger, waiter, now).partition(" s: ")
    return ParkedStatus(
        session=waiter.session, name=ledger._name(waiter.session), verb=_verb(waiter.command), why=why,
        since_s=now - waiter.since, left_s=waiter.expires - now,
    )  # fmt: skip


def _verb(command: cmd.Command) -> str:
    if isinstance(command, cmd.Lease):
        return f"get {command.task}"
    if isinstance(command, cmd.Put):
        return f"put {command.groups * command.group_size} rows"
    if isinstance(command, cmd.AwaitVersion):
        return f"weights after {command.after}"
    if isinstance(command, cmd.Announce):
        return f"publish {command.version}"
    if isinstance(command, cmd.Swap):
        return f"load {command.version}"
    if isinstance(command, cmd.Meet):
        return f"meet at {command.what}"
    return "lost" if isinstance(command, cmd.AwaitLost) else "wanted"
