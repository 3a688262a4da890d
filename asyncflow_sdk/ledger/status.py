"""Status of a queue: its counters, and why requests wait. The cost does not depend on live rows."""

from __future__ import annotations

import heapq
from collections import Counter
from operator import attrgetter
from typing import Any

import numpy as np

from ..types.reports import TERMINAL, LeaseStatus, ParkedStatus, SessionStatus, StatusReport, VersionStatus
from . import commands as cmd
from .commands import Ids
from .publication import VersionPublication
from .replicas import Replicas
from .staleness import StalenessControl
from .state import LedgerState
from .state.rows import NONE
from .state.sessions import Grant, ParkedRequest, Session
from .state.tasks import LEASED, READY, SELECTED, TASK_STATES, WAITING, Task
from .terminations import MAX_NAMED, join_some

MAX_LISTED = 100
"""Limit of explained requests, the longest waiting, and of listed sessions, the oldest."""


class StatusReporter:
    """Reads the ledger and changes nothing."""

    def __init__(
        self, state: LedgerState, staleness: StalenessControl, publication: VersionPublication, replicas: Replicas
    ) -> None:
        self._state, self._staleness, self._publication, self._replicas = state, staleness, publication, replicas
        self._tasks, self._steps = state.tasks, state.steps
        self._versions, self._parked, self._name = state.versions, state.parked, state.sessions.name

    def _age(self, since: float) -> float:
        return self._state.context.now - since

    def _since(self, session: int, since: float, doing: str = "") -> str:
        return f"{self._name(session)}{doing} for {self._age(since):.1f} s"

    def explain(self, request: ParkedRequest) -> str:
        """Return how long a request has waited, and why, with unfinished groups of a step: it may read all rows."""
        command = request.command
        open_step = isinstance(command, cmd.LeaseRows) and command.parts and self._full_step(command) is None
        groups = self._unfinished_groups() if open_step else ""
        return f"after {self._age(request.since):.1f} s: {self.why(request)}{groups}"

    def why(self, request: ParkedRequest) -> str:
        """Return what a request waits for, who should provide it, and since when."""
        command = request.command
        match command:
            case cmd.AddRows():
                return self._why_no_room(command)
            case cmd.AwaitVersion():
                return self._why_no_newer(command)
            case cmd.AwaitPins():
                names, pins = self._state.partitions.names, self._state.partitions.pins.items()
                held = ", ".join(f"{names[number]!r} (version {pin.version})" for number, pin in pins)
                return f"the last version is kept for partitions whose rows, or their end, are still to come: {held}"
            case cmd.AwaitLost():
                return "none of the rows this session has leased has ended"
            case cmd.AllGather():
                return self._why_no_barrier(request)
            case cmd.Announce():
                return f"version {command.version} must wait for another one; {self._why_unfinished()}"
            case cmd.Swap():
                return f"version {command.version} may not be loaded yet; {self._why_no_swap(request)}"
            case cmd.AwaitRowsWanted():
                return self._why_none_wanted(command)
        return f"task {command.task!r} has {self._what_there_is(command)}; {self._why_no_rows(request)}"

    def _why_no_newer(self, command: cmd.AwaitVersion) -> str:
        current, committed, text = self._versions.current, self._versions.committed, self._why_no_version()
        if committed <= command.after < current in self._versions.kept:
            text = f"the committed version {committed} must be loaded first; {text}"
            return f"version {current} is current but not committed; {text}"
        return f"no version newer than {command.after}; {text}"

    def _why_none_wanted(self, command: cmd.AwaitRowsWanted) -> str:
        if not command.more:
            return "rows of steps may still be lost with a host, and are then put again"
        if not self._steps.declared:
            return "no task with batch_rows (train) is declared, so the number of wanted rows is unknown"
        window = self._steps.window
        steps = f" for step {window.step} and the {window.max_staleness + 1} after it" if window.slots is None else ""
        return f"enough rows are queued{steps}"

    def _why_no_barrier(self, request: ParkedRequest) -> str:
        command = request.command
        alike = [each for each in self._parked.at(request.place) if each.command.world_size == command.world_size]
        here = {command.rank, *(each.command.rank for each in alike if each.command.what == command.what)}
        absent = sorted(set(range(command.world_size)) - here)
        others = [
            f"rank {each.command.rank} ({self._name(each.session)}) waits at {each.command.what!r}"
            for each in alike
            if each.command.rank in absent
        ]
        if not others and command.group in self._tasks:
            others = [self._holding([command.group])]
        group = f"{_ranks(absent)} of {command.world_size} of group {command.group!r}"
        return _joined(f"{group} have not reached {command.what!r}", *others)

    def _what_there_is(self, command: cmd.LeaseRows) -> str:
        task, limits = self._tasks[command.task], self._state.limits
        if command.parts:
            return self._what_there_is_of_a_step(command)
        where = None if command.partition is None else self._state.partitions.number(command.partition)
        fit = max((n for partition, n in task.fit.items() if where in (None, partition)), default=0)
        least, sampler = max(command.at_least, 1), task.spec.sampler
        if not fit:
            return "nothing to give"
        if fit >= least and sampler is not None:
            return f"nothing to give: {fit} rows are ready, and sampler {sampler.name!r} chooses none of them"
        text = f"{fit} of {least} rows"
        if (first := self._parked.first("put")) is not None:
            count = first.command.groups * first.command.group_size
            return f"{text}, and {self._name(first.session)} waits for room to put {count} more"
        if command.at_least > limits.capacity_rows - self._state.budget.occupied + fit:
            return f"{text}, and capacity_rows={limits.capacity_rows} leaves no room for the others"
        return text

    def _what_there_is_of_a_step(self, command: cmd.LeaseRows) -> str:
        window, grant = self._steps.window, self._state.leases.by_token.get(command.token)
        if (full := self._full_step(command)) is not None:
            return f"rows of step {full}, which is full"
        selected = window.batch_rows - window.free - (0 if grant is None else grant.left)
        for other in self._steps.task.leases.values():
            if grant is None and other.step == window.step:
                who = self._name(other.session)
                return f"nothing to give: {who} has step {window.step}, the one being filled, in parts"
        return f"{selected} of {max(command.at_least, 1)} rows for the next part of step {window.step}"

    def _full_step(self, command: cmd.LeaseRows) -> int | None:
        steps, grant = self._state.steps, self._state.leases.by_token.get(command.token)
        if grant is not None:
            return grant.step if grant.step != steps.window.step else None
        return steps.closed[0][0] if steps.closed else None

    def _unfinished_groups(self) -> str:
        """Name unfinished groups that may fill the open step, earliest deadline first, and their holders."""
        steps, rows = self._steps, self._state.rows
        at = rows.at(rows.live_ids())
        at = at[steps.unselected_at(at) & (steps.task.state[at] == WAITING)]
        deadlines = np.where(rows.deadline[at] == NONE, np.iinfo(np.int64).max, rows.deadline[at])
        firsts = list(dict.fromkeys(rows.first[at][np.lexsort((at, deadlines))].tolist()))
        groups = [self._unfinished_group(at[rows.first[at] == first]) for first in firsts[:MAX_NAMED]]
        named = join_some([*groups, *firsts[MAX_NAMED:]])
        return f". Unfinished groups of step {steps.window.step}: {named}" if firsts else ""

    def _unfinished_group(self, at: Ids) -> str:
        parts, first = [], at[0] + self._state.rows.base
        for task in self._tasks:
            states, tokens, name = task.state[at], task.token[at], repr(task.spec.name)
            if ready := int((states == READY).sum()):
                parts.append(f"{ready} ready for task {name}")
            for token, count in zip(*np.unique(tokens[states == LEASED], return_counts=True), strict=True):
                grant = self._state.leases.by_token[int(token)]
                parts.append(f"{count} leased in task {name} by {self._since(grant.session, grant.since)}")
        span = f"row {first}" if len(at) == 1 else f"{len(at)} rows from {first} on"
        return f"{span} ({', '.join(parts) or 'in no task'})"

    def _why_no_room(self, put: cmd.AddRows) -> str:
        limits, budget, steps = self._state.limits, self._state.budget, self._steps
        count, live = self._state.keys.rows_in(put), budget.occupied
        holding = self._holding(list(self._tasks.by_name)) or "no task has any rows; declare one or end the run"
        reserve = max(count * budget.reserve, put.nbytes)
        if live + count > limits.capacity_rows:
            full = f"{count} more rows do not fit: the queue has {live} of {limits.capacity_rows} rows"
            lacks = steps.window.free - steps.unselected if steps.lacks_rows else 0
            if lacks and count + steps.window.batch_rows - lacks > limits.capacity_rows:
                more = f"step {steps.window.step} cannot fill without {lacks} more"
                return f"{full}, and {more}; put fewer at a time, or set a larger capacity_rows"
            return f"{full}; {holding}"
        if budget.charged + reserve <= limits.capacity_bytes:
            return "earlier puts wait for room, and this one is behind them"
        held = f" and {budget.held} trained rows not covered by a checkpoint" if budget.held else ""
        taken = f"{budget.charged} of {limits.capacity_bytes} bytes taken or reserved by {live} rows{held}"
        return f"{count} more rows may take {reserve} bytes, and the queue has {taken}; {holding}"

    def _why_no_rows(self, request: ParkedRequest) -> str:
        command, task, steps = request.command, self._tasks[request.command.task], self._steps
        asking = {command.rank, *(self._parked.alike(command) if command.world_size > 1 else ())}
        if absent := sorted(set(range(command.world_size)) - asking):
            return f"{_ranks(absent)} of {command.world_size} of group {command.group!r} have not asked"
        if task.must_wait(self._state.sessions.by_id[request.session]):
            return "rows that were held by a lost worker are tried with fewer others first, and this one holds enough"
        if task.spec.admits and not steps.declared:
            return "no task with batch_rows (train) is declared, so the staleness rule cannot admit anything"
        failed, where = sum(home.rows_failed for home in self._state.homes.by_number.values()), command.partition
        fed = not failed or self._parked.feeders
        lost = "" if fed else f"{failed} rows were lost with their hosts: put them again with their keys"
        if not task.left():
            return _joined("every row put has been through it; put more, or end the stream", lost)
        if where is not None and not task.left(self._state.partitions.number(where)):
            return f"every row put in partition {where!r} has been through it; put more there, or end the partition"
        if task.spec.admits and task.counts[READY]:
            return self._why_not_admitted(request)
        fill = ""
        if task.spec.batch_rows is not None:
            lacks = f"step {steps.window.step} lacks {steps.window.free} of {steps.window.batch_rows} rows"
            fill = f"{lacks}, and the queue has {steps.unselected} that may fill it"
        return _joined(fill, self._missing(task) or self._holding([task.spec.name]), lost)

    def _why_not_admitted(self, request: ParkedRequest) -> str:
        window, rule = self._steps.window, self._staleness.rule
        loaded = self._state.sessions.by_id[request.session].loaded
        if loaded is None:
            return f"no version is loaded; {self._why_no_version()}"
        if self._staleness.failed:
            return self._staleness.failed
        policy = "" if rule.spec.name == "wait" else f" (policy {rule.spec.name!r})"
        admitted = window.load(window.step + window.max_staleness)
        return _joined(
            f"with version {loaded} loaded and max_staleness {window.max_staleness}{policy} no group may start: step"
            f" {window.step} has {window.free} free slots and {admitted} rows admitted for it",
            self._why_no_version(),
            self._missing(self._steps.task),
        )

    def _why_no_version(self) -> str:
        current = self._versions.current
        since = f"version {current} is current since {self._age(self._versions.since):.1f} s"
        text = "no version was published yet" if current < 0 else since
        trains = self._holding([self._steps.name]) if self._steps.declared else ""
        if self._steps.declared and not trains:
            text += " and no trainer holds a step"
        failed = [each for each in self._replicas.sessions() if each.replica and each.replica.doing == "failed"]
        failures = join_some(map(self._doing, sorted(failed, key=attrgetter("replica.since"))))
        return _joined(text, trains, self._versions.unavailable, self._why_unfinished(), failures)

    def _missing(self, task: Task) -> str:
        """Name the tasks that should write needed columns, and what they do."""
        columns, names, pending = self._lacking(task), list[str](), [task]
        while pending:
            needs = set(pending.pop().spec.needs)
            for name, other in self._tasks.by_name.items():
                gives = needs & set(other.spec.gives) and _share_rows(task, other)
                if gives and name not in names and name != task.spec.name:
                    names.append(name)
                    pending.append(other)
        admitting = [name for name in names if self._tasks[name].spec.admits]
        if admitting and not self._steps.declared:
            text = 'declare the task that trains with its rows of a step, as in run.consumer("train", batch_size=256)'
            starts = "starts no row before a task with batch_rows is declared, and none is"
            columns.append(f"task {admitting[0]!r} {starts}: {text}")
            names = [name for name in names if name not in admitting]
        return _joined(*columns, self._holding(names))

    def _lacking(self, task: Task) -> list[str]:
        """Name columns missing in rows of a task, and the tasks that give them."""
        parts, kinds = [], self._state.columns.kinds
        for column in task.spec.needs:
            bit = int(self._state.columns.bit(column))
            count = sum(rows for (where, kind), rows in kinds.items() if not kind & bit and task.takes(where))
            giving = [each for each in self._tasks if column in each.spec.gives and _share_rows(task, each)]
            givers = " or ".join(repr(each.spec.name) for each in giving)
            if count and givers:
                parts.append(f"{count} rows lack column {column!r}, given by task {givers}")
            elif count:
                parts.append(f"no task gives column {column!r}, and {count} rows were put without it")
        return parts

    def _holding(self, names: list[str]) -> str:
        parts = []
        for name in names:
            task = self._tasks[name]
            ready = task.counts[READY] + task.counts[SELECTED]
            prepared = self._state.sessions.preparing.items()
            others = [(number, since, f" is {each.what}") for number, (each, since) in prepared if each.task == name]
            preparing = join_some(self._since(*each) for each in others)
            if ready:
                nobody = "" if self._parked.first(task.place) or preparing else ", and no client requests them"
                parts.append(f"{ready} rows are ready for task {name!r}{nobody}")
            parts.append(preparing)
            if task.leases:
                oldest = next(iter(task.leases.values()))
                by = self._since(oldest.session, oldest.since)
                parts.append(f"{task.counts[LEASED]} rows are leased in task {name!r}, the oldest by {by}")
        return _joined(*parts)

    def _why_unfinished(self) -> str:
        """Explain why the announced or last discarded version is not current; "" if none."""
        announced, ranks, size = self._publication.announced, self._publication.ranks, self._publication.world_size
        if announced is None:
            return self._publication.discarded[1]
        first, since = self._name(ranks[min(announced.ranks)]), self._age(announced.since)
        text = f"version {announced.version} was announced {since:.1f} s ago by {first}"
        if size == 1:
            return f"{text}, not published yet"
        names = {rank: self._name(ranks[rank]) if rank in ranks else "no session" for rank in range(size)}
        lacks = [f"rank {rank} ({name})" for rank, name in names.items() if rank not in announced.parts]
        return f"{text} and lacks {join_some(lacks)}"

    def _why_no_swap(self, request: ParkedRequest) -> str:
        version, limits = request.command.version, self._state.limits
        if limits.quorum and version > self._versions.committed:
            return self._why_uncommitted(version)
        loading = join_some(self._since(*swapping) for swapping in self._replicas.swapping.items())
        earlier = sum(other.since < request.since for other in self._parked.at("swap"))
        queue = f"{earlier} waited before it" if earlier else ""
        return _joined(f"at most {limits.max_swapping} at a time (max_swapping), now {loading}", queue)

    def _why_uncommitted(self, version: int) -> str:
        quorum, replicas = self._state.limits.quorum, self._replicas.sessions()
        lacks = self._replicas.lacking(version)
        text = f"{len(replicas) - len(lacks)} of the {quorum} required replicas (quorum) have it staged"
        without = f"without it: {join_some(map(self._doing, lacks))}" if lacks else ""
        few = quorum - len(replicas)
        return _joined(text, without, f"there are {len(replicas)} replicas, {few} too few" if few > 0 else "")

    def _doing(self, session: Session) -> str:
        if session.replica is None or not session.replica.doing:
            on = "no version" if session.loaded is None else f"version {session.loaded}"
            return f"{session.name} (on {on})"
        return f"{session.name} ({doing(session)}, for {self._age(session.replica.since):.1f} s)"

    def report(self) -> StatusReport:
        """Return rows by task and state, sessions, leases and parked requests."""
        state, versions, rule, ranks = self._state, self._versions, self._staleness.rule, self._publication.ranks
        limits, budget, leases = state.limits, state.budget, state.leases.by_token
        announced = self._publication.announced
        window, tasks = self._steps.window if self._steps.declared else None, self._tasks.by_name.items()
        waiting = list(self._parked.by_ticket.values())
        longest = heapq.nsmallest(MAX_LISTED, waiting, key=lambda request: request.since)
        parked = tuple(
            ParkedStatus(verb=verb_of(each.command), why=self.why(each), **self._client(each)) for each in longest
        )
        pairs = [pair for pair in zip(longest, parked, strict=True) if not self._works_meanwhile(pair[0])]
        waits = {status.name: f"after {status.since_s:.1f} s: {status.why}" for _, status in pairs}
        ended = dict(zip(TERMINAL, state.rows.ended[1:].tolist(), strict=True))
        steps = self._steps.task.leases.values() if window else ()
        return StatusReport(
            rows={name: dict(zip(TASK_STATES, task.counts, strict=True)) for name, task in tasks},
            arrived={name: task.became_ready for name, task in tasks},
            completed={name: task.completed for name, task in tasks},
            ended=ended, put=budget.put, live=budget.put - sum(ended.values()), held=budget.held,
            charged_bytes=budget.charged, capacity_rows=limits.capacity_rows, capacity_bytes=limits.capacity_bytes,
            waiting=waits, parked=parked, parked_count=len(waiting),
            sessions=tuple(map(self._session_status, self._listed(waiting))), session_count=len(state.sessions.by_id),
            oldest=self._lease_status(next(iter(leases.values()))) if leases else None, lease_count=len(leases),
            in_parts=tuple((grant.step, grant.left) for grant in steps if grant.parts != NONE),
            step=window.step if window else NONE, free_slots=window.free if window else 0,
            batch_rows=window.batch_rows if window else 0, max_staleness=limits.max_staleness if window else NONE,
            steps=limits.steps, checkpoint=self._steps.checkpoint, over=state.partitions.ended, time_s=state.context.now,
            staleness=rule.spec.name, promise=rule.promise, ages=state.metrics.ages, homes=state.homes.statuses(),
            version=versions.current, version_age_s=self._age(versions.since) if versions.current >= 0 else -1.0,
            committed=versions.committed, versions=self._version_statuses(),
            publisher=join_some(self._name(ranks[rank]) for rank in sorted(ranks)),
            announced=announced.version if announced is not None else NONE,
            announced_s=self._age(announced.since) if announced is not None else 0.0,
        )  # fmt: skip

    def _works_meanwhile(self, request: ParkedRequest) -> bool:
        """True if the client works while it waits, for lost rows or for a newer version."""
        loaded = self._state.sessions.by_id[request.session].loaded
        newer = isinstance(request.command, cmd.AwaitVersion) and loaded is not None
        return newer or isinstance(request.command, cmd.AwaitLost)

    def _listed(self, waiting: list[ParkedRequest]) -> list[Session]:
        """Return all sessions; if too many, first those with requests or rows."""
        sessions = list(self._state.sessions.by_id.values())
        if len(sessions) <= MAX_LISTED:
            return sessions
        busy = {request.session for request in waiting}
        return heapq.nsmallest(MAX_LISTED, sessions, key=lambda s: (s.id not in busy and not s.leases, s.id))

    def _session_status(self, session: Session) -> SessionStatus:
        replica, preparing = session.replica, self._state.sessions.preparing.get(session.id)
        oldest = next(iter(session.leases.values()), None)
        return SessionStatus(
            id=session.id, name=session.name, age_s=self._age(session.since), loaded=session.loaded,
            leases=len(session.leases), rows=sum(grant.left_of(session.id) for grant in session.leases.values()),
            task=oldest.task if oldest else "", held_s=self._age(oldest.since) if oldest else 0.0,
            replica=replica is not None, weights=doing(session),
            weights_s=self._age(replica.since) if replica is not None and replica.doing else 0.0,
            prepares=preparing[0].what if preparing else "", prepares_s=self._age(preparing[1]) if preparing else 0.0,
        )  # fmt: skip

    def _version_statuses(self) -> tuple[VersionStatus, ...]:
        replicas = self._replicas.sessions()
        on = Counter(session.loaded for session in replicas)
        staged = Counter(session.replica.staged for session in replicas if session.replica is not None)
        return tuple(
            VersionStatus(
                version=each.version, source=each.source, age_s=self._age(each.since), nbytes=each.nbytes,
                root=each.root, transport=each.parts[0].transport, on=on[each.version], staged=staged[each.version],
            )
            for each in self._versions.kept.values()
        )  # fmt: skip

    def _lease_status(self, grant: Grant) -> LeaseStatus:
        return LeaseStatus(token=grant.token, task=grant.task, rows=grant.left, **self._client(grant))

    def _client(self, held: Grant | ParkedRequest) -> dict[str, Any]:
        """Return the client of a lease or a request, and its times, as fields of its status."""
        since_s, left_s = self._age(held.since), -self._age(held.expires)
        return {"session": held.session, "name": self._name(held.session), "since_s": since_s, "left_s": left_s}


def doing(session: Session) -> str:
    """Describe a replica's activity with a version ("fetching 7"); "" once it generates with it."""
    if (replica := session.replica) is None or not replica.doing:
        return ""
    words = {"waits": "waits to load", "swapping": "loading"}.get(replica.doing, replica.doing)
    return f"{words} {replica.version}{f': {replica.why}' if replica.why else ''}"


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _share_rows(one: Task, other: Task) -> bool:
    return "*" in other.spec.partitions or any(other.spec.takes(each) or each == "*" for each in one.spec.partitions)


VERBS: dict[type, str] = {
    cmd.LeaseRows: "get {0.task}", cmd.AwaitVersion: "weights after {0.after}", cmd.Announce: "publish {0.version}",
    cmd.Swap: "load {0.version}", cmd.AllGather: "meet at {0.what}", cmd.AwaitPins: "the end of the evaluations",
    cmd.AwaitLost: "lost",
}  # fmt: skip


def verb_of(command: Any) -> str:
    """Describe a waiting command in a few words ("get train", "put 64 rows")."""
    if isinstance(command, cmd.AddRows):
        return f"put {command.groups * command.group_size} rows"
    return VERBS.get(type(command), "wanted").format(command)
