"""What must hold of a ledger after every command, worked out afresh from its rows by plain loops."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import msgspec
import numpy as np
from naive import Naive

from asyncflow_sdk.errors import AsyncFlowError
from asyncflow_sdk.ledger import TERMINAL, Ledger
from asyncflow_sdk.ledger.policies import Wait
from asyncflow_sdk.ledger.ready import ReadyQueue
from asyncflow_sdk.ledger.rows import APART, DONE, LEASED, LIVE, NONE, READY, SELECTED, TASK_STATES, WAITING, Rows

PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
UNCHANGING = (np.generic, int, str, msgspec.Struct)
HIDDEN = frozenset({"_now", "_lease_ends", "_request_ends", "_effects", "_dirty", "_all_woken", "redo"})


def freeze(thing: Any, seen: dict[int, Any] | None = None) -> Any:
    """All of a ledger's state as plain values; entries of ready queues that are dead already are left out."""
    if type(thing) in PLAIN or isinstance(thing, UNCHANGING):
        return thing
    seen = {} if seen is None else seen
    if isinstance(thing, np.ndarray):
        return thing.dtype.str, thing.tobytes()
    if id(thing) in seen:
        return "seen"
    seen[id(thing)] = thing
    if isinstance(thing, ReadyQueue):
        return [i for chunk in thing.chunks() for i in chunk[thing.is_ready(chunk)].tolist()]
    if isinstance(thing, Rows):
        kept = {name: values[: thing.count].tobytes() for name, values in thing._fields.items()}
        tasks = {t: {f: v[: thing.count].tobytes() for f, v in fields.items()} for t, fields in thing._tasks.items()}
        arrivals = {t: v[: thing.count].tobytes() for t, v in thing._arrivals.items()}
        return thing.base, thing.count, kept, tasks, arrivals, thing.ended.tobytes()
    if isinstance(thing, dict):
        return type(thing).__name__, [(freeze(k, seen), freeze(v, seen)) for k, v in thing.items()]
    if isinstance(thing, list | tuple | set) or type(thing).__name__ == "deque":
        return type(thing).__name__, [freeze(item, seen) for item in thing]
    hidden = HIDDEN | getattr(thing, "TRANSIENT", frozenset())
    return type(thing).__name__, [(n, freeze(value, seen)) for n, value in vars(thing).items() if n not in hidden]


def check_counters(ledger: Ledger) -> None:
    """Every counter equals what recounting the rows gives; leases do not overlap; the balance adds up."""
    rows, n = ledger.rows, ledger.rows.count
    live = [i for i in range(n) if rows.state[i] == LIVE]
    ended = Counter(int(s) for s in rows.state[:n])
    assert all(rows.ended[1 + s] >= ended[1 + s] for s in range(len(TERMINAL)))
    assert ledger.put_total == rows.base + n
    assert ledger.put_total == len(live) + int(rows.ended.sum())
    audit = ledger.audit()
    assert audit.balanced
    assert audit.live == len(live)
    if ledger.steps is not None:
        taken = rows.task(ledger.steps.task.spec.name, "state")
        assert ledger.unselected == sum(rows.step[i] == NONE and taken[i] != APART for i in live)
    held: Counter[int] = Counter()
    for name, task in ledger.tasks.items():
        states, tokens = rows.task(name, "state"), rows.task(name, "token")
        assert +task.undone == +Counter(int(rows.partition[i]) for i in live if states[i] < DONE), name
        assert dict(zip(TASK_STATES, task.counts, strict=True)) == rows.task_counts(name)
        assert list(task.leases) == [token for token, lease in ledger.leases.items() if lease.task == name]
        if not task.spec.grouped:
            for counted, state in ((task.fit, READY), (task.waiting, WAITING)):
                assert +counted == Counter(int(rows.partition[i]) for i in live if states[i] == state), name
                assert min(counted.values(), default=0) >= 0
        for i in live:
            assert (states[i] == LEASED) == (tokens[i] != NONE), TASK_STATES[states[i]]
            if states[i] == LEASED:
                held[int(tokens[i])] += 1
                assert i + rows.base in ledger.leases[int(tokens[i])].ids
                assert ledger.leases[int(tokens[i])].task == name
    for i in live:
        assert rows.todo[i] == sum(rows.task(t, "state")[i] < DONE for t in ledger.tasks)
    assert held == {token: lease.left for token, lease in ledger.leases.items() if lease.left}
    assert all(not lease.over and set(lease.sessions) & set(ledger.sessions) for lease in ledger.leases.values())
    for number, session in ledger.sessions.items():
        assert list(session.leases) == [token for token, lease in ledger.leases.items() if number in lease.sessions]
    assert ledger.kinds == Counter((int(rows.partition[i]), int(rows.columns[i])) for i in live)
    times = [thing.expires for things in (ledger.leases, ledger.parked) for thing in things.values()]
    assert ledger.next_deadline() == min(times, default=None)
    for name, task in ledger.tasks.items():
        leases = {t: h for t, h in ledger.leases.items() if h.task == name and h.crew is not None}
        asked = {
            w.ticket: w for w in ledger.parked.values() if w.place == f"task {name}" and w.command.world_size > 1
        }
        teams = task.teams.values()
        assert leases == {token: lease for team in teams for token, lease in team.leases.items()}
        assert asked == {t: w for team in teams for waiters in team.asking.values() for t, w in waiters.items()}
        assert all(team.asking or team.leases for team in teams)
    if ledger.steps is not None:
        _check_window(ledger, live)
    unsure = [i for i in live if rows.todo[i] == 0 and ledger.checkpoints and rows.step[i] >= ledger.covered]
    assert ledger.held == len(unsure)


def _check_window(ledger: Ledger, live: list[int]) -> None:
    steps, rows = ledger.steps, ledger.rows
    assert steps is not None
    window, name = steps.window, steps.task.spec.name
    filling = [i for i in live if rows.step[i] == window.step]
    assert window.free == window.batch_rows - len(filling)
    assert sorted(i for part in steps.filling for i in part.tolist()) == [i + rows.base for i in filling]
    loads = Counter(int(rows.deadline[i]) for i in live if rows.step[i] == NONE and rows.deadline[i] != NONE)
    assert +window._admitted == loads
    assert min(window._admitted.values(), default=0) >= 0
    for j in sorted({*range(window.step, window.step + window.max_staleness + 2), *(d for d in loads)}):
        load = sum(count for deadline, count in loads.items() if deadline <= j)
        slots = window.free + (j - window.step) * window.batch_rows
        assert load <= slots or ledger.rule.spec.name != "wait", f"invariant H at {j}"
    check_rule(ledger)
    if ledger.rule.bounded:
        late = {d for d in loads if d < window.step}
        assert not late, "an admitted row is overdue"
    for i in live if ledger.rule.bounded else ():
        if rows.step[i] != NONE and rows.version[i] != NONE:
            base = ledger.lineage.step(int(rows.version[i]))
            assert rows.step[i] - base <= window.max_staleness, "a row is too old for its step"
    assert [step for step, _ in steps.closed] == sorted({step for step, _ in steps.closed})
    for step, ids in steps.closed:
        assert (rows.step[rows.at(ids)] == step).all()
        assert (rows.task(name, "state")[rows.at(ids)] == SELECTED).all()


def check_rule(ledger: Ledger) -> None:
    """The invariant of the staleness policy holds, if it has one."""
    if ledger.steps is not None and ledger.rule.spec.name == "wait":
        assert Wait.holds(ledger._filling())


def check_same(ledger: Ledger, naive: Naive) -> None:
    """The ledger and the naive model say the same of every row."""
    rows = ledger.rows
    assert naive.invariant_h()
    assert (ledger.ended, ledger.version, len(ledger.tasks)) == (naive.ended, naive.version, len(naive.tasks))
    assert ledger.schema == naive.schema
    assert ledger.charged == naive.charged
    assert set(ledger._places) == naive.named_columns
    assert rows.base + rows.count == len(naive.rows)
    for i, row in naive.rows.items():
        if i < rows.base:
            assert row.ended is not None, f"row {i} is forgotten and lives"
            continue
        at = i - rows.base
        state = int(rows.state[at])
        assert (TERMINAL[state - 1] if state else None) == row.ended, f"row {i}"
        if state:
            continue
        for name, task in naive.tasks.items():
            shown = (*TASK_STATES, "apart")[rows.task(name, "state")[at]]
            assert shown == naive.shown_state(i, task), f"row {i} in task {name}"
            assert rows.task(name, "attempts")[at] == row.attempts.get(name, 0)
            assert rows.task(name, "token")[at] == row.token.get(name, NONE)
        assert (rows.nbytes[at], rows.charged[at]) == (row.nbytes, row.charge), f"row {i}"
        assert rows.deadline[at] == (NONE if row.deadline is None else row.deadline), f"row {i}"
        assert rows.version[at] == (NONE if row.version is None else row.version), f"row {i}"
        assert rows.newest[at] == (NONE if row.newest is None else row.newest), f"row {i}"
        assert rows.step[at] == (NONE if row.step is None else row.step), f"row {i}"
    if ledger.steps is not None:
        assert ledger.steps.window.step == naive.step
        assert ledger.steps.window.finished == naive.finished


def check_same_versions(ledger: Ledger, naive: Naive) -> None:
    """They say the same of versions, of their publisher, and of replicas."""
    assert [(v.version, v.source) for v in ledger.versions.values()] == [(v.version, v.source) for v in naive.kept]
    assert ledger.publisher == naive.ranks
    assert {session.id: session.rank for session in ledger.sessions.values() if session.rank != NONE} == {
        session: rank for rank, session in naive.ranks.items()
    }
    assert set(ledger.replicas) == naive.replicas
    assert set(ledger.swapping) == naive.permits
    staged = {s: r.replica.staged for s, r in ledger.sessions.items() if r.replica and r.replica.staged != NONE}
    assert staged == naive.staged
    assert {number for number, session in ledger.sessions.items() if session.claimed} == naive.claimed
    assert ledger.committed == naive.committed
    assert ledger.lineage.step(ledger.version) == naive.trains[naive.version]
    assert ledger.lineage.version(0) == naive.shift()
    for version in range(ledger.version + 2):
        assert ledger.lineage.given_up(version) == naive.given_up(version), version


def check_no_lost_wakeup(ledger: Ledger) -> None:
    """No parked request could be answered now."""
    if not any(ledger.waiters.values()):
        return
    twin = copy.deepcopy(ledger)
    for waiter in twin.parked.values():
        session = twin.sessions[waiter.session]
        try:
            reply = twin._handlers[type(waiter.command)](session, waiter.command)
        except AsyncFlowError as error:
            reply = error
        assert reply is None, f"{waiter.command} is parked, but could have {reply!r}"


def ready_rows(ledger: Ledger, task: str) -> int:
    rows = ledger.rows
    states = rows.task(task, "state")[: rows.count]
    return int(((states == READY) & (rows.state[: rows.count] == LIVE)).sum())
