"""Status of a queue: its counters, and why requests wait. The cost does not depend on live rows."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
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

MAX_LISTED = 100
"""Limit of explained requests, the longest waiting, and of listed sessions, the oldest."""
MAX_NAMED = 5
"""Number of sessions named in a sentence."""


class StatusReporter:
    """Reads the ledger and changes nothing."""

    def __init__(
        self, state: LedgerState, staleness: StalenessControl, publication: VersionPublication, replicas: Replicas
    ) -> None:
        self._state, self._staleness, self._publication, self._replicas = state, staleness, publication, replicas

    def explain(self, request: ParkedRequest) -> str:
        """Return how long a request has waited, and why; for a part of a step, with its unfinished
        groups. The cost may depend on the number of live rows."""
        text = f"after {self._state.context.now - request.since:.1f} s: {self.why(request)}"
        command = request.command
        if isinstance(command, cmd.LeaseRows) and command.parts and self._full_step(command) is None:
            text += self._unfinished_groups()
        return text

    def why(self, request: ParkedRequest) -> str:
        """Return what a request waits for, who should provide it, and since when."""
        command = request.command
        match command:
            case cmd.AddRows():
                return self._why_no_room(command)
            case cmd.AwaitVersion():
                return self._why_no_newer(command)
            case cmd.AwaitPins():
                return self._why_pinned()
            case cmd.AwaitLost():
                return "none of the rows this session has leased has ended"
            case cmd.AllGather():
                return self._why_no_barrier(request)
            case cmd.Announce():
                return f"version {command.version} must wait for another one; {self._why_unfinished()}"
            case cmd.Swap():
                return f"version {command.version} may not be loaded yet; {self._why_no_swap(request)}"
            case cmd.AwaitRowsWanted(more=False):
                return "rows of steps may still be lost with a host, and are then put again"
            case cmd.AwaitRowsWanted():
                return self._why_none_wanted()
        return f"task {command.task!r} has {self._what_there_is(command)}; {self._why_no_rows(request)}"

    def _why_no_newer(self, command: cmd.AwaitVersion) -> str:
        versions = self._state.versions
        if versions.committed <= command.after < versions.current in versions.kept:
            return (
                f"version {versions.current} is current but not committed; the committed version"
                f" {versions.committed} must be loaded first; {self._why_no_version()}"
            )
        return f"no version newer than {command.after}; {self._why_no_version()}"

    def _why_pinned(self) -> str:
        names = {number: name for name, number in self._state.partitions.numbers.items()}
        pins = self._state.partitions.pins.items()
        held = ", ".join(f"{names[number]!r} (version {pin.version})" for number, pin in pins)
        return f"the last version is kept for partitions whose rows, or their end, are still to come: {held}"

    def _why_none_wanted(self) -> str:
        if not self._state.steps.declared:
            return "no task with batch_rows (train) is declared, so the number of wanted rows is unknown"
        window = self._state.steps.window
        if window.slots is None:
            return f"enough rows are queued for step {window.step} and the {window.max_staleness + 1} after it"
        return "enough rows are queued"

    def _why_no_barrier(self, request: ParkedRequest) -> str:
        """Name the missing ranks, and the barriers where they wait instead."""
        command = request.command
        there = [
            each for each in self._state.parked.at(request.place) if each.command.world_size == command.world_size
        ]
        here = {command.rank, *(each.command.rank for each in there if each.command.what == command.what)}
        absent = sorted(set(range(command.world_size)) - here)
        elsewhere = "".join(
            f"; rank {each.command.rank} ({self._state.sessions.name(each.session)}) waits at {each.command.what!r}"
            for each in there
            if each.command.rank in absent
        )
        holding = "" if elsewhere or command.group not in self._state.tasks else self._holding([command.group])
        text = (
            f"{_ranks(absent)} of {command.world_size} of group {command.group!r} have not reached {command.what!r}"
        )
        return f"{text}{elsewhere}" + (f"; {holding}" if holding else "")

    def _what_there_is(self, command: cmd.LeaseRows) -> str:
        """Describe the ready rows, if the request needs more."""
        task, limits = self._state.tasks[command.task], self._state.limits
        if command.parts:
            return self._what_there_is_of_a_step(command)
        where = None if command.partition is None else self._state.partitions.number(command.partition)
        fit = max((n for partition, n in task.fit.items() if where in (None, partition)), default=0)
        if not fit:
            return "nothing to give"
        if fit >= max(command.at_least, 1) and task.spec.sampler is not None:
            return (
                f"nothing to give: {fit} rows are ready, and sampler {task.spec.sampler.name!r} chooses none of them"
            )
        text = f"{fit} of {max(command.at_least, 1)} rows"
        if (first := self._state.parked.first("put")) is not None:
            count = first.command.groups * first.command.group_size
            who = self._state.sessions.name(first.session)
            return f"{text}, and {who} waits for room to put {count} more"
        if command.at_least > limits.capacity_rows - self._state.budget.occupied + fit:
            return f"{text}, and capacity_rows={limits.capacity_rows} leaves no room for the others"
        return text

    def _what_there_is_of_a_step(self, command: cmd.LeaseRows) -> str:
        """Describe the rows selected for the next part of a step."""
        window, grant = self._state.steps.window, self._state.leases.by_token.get(command.token)
        if (full := self._full_step(command)) is not None:
            return f"rows of step {full}, which is full"
        selected = window.batch_rows - window.free - (0 if grant is None else grant.left)
        other = next((each for each in self._state.steps.task.leases.values() if each.step == window.step), None)
        if grant is None and other is not None:
            who = self._state.sessions.name(other.session)
            return f"nothing to give: {who} has step {window.step}, the one being filled, in parts"
        return f"{selected} of {max(command.at_least, 1)} rows for the next part of step {window.step}"

    def _full_step(self, command: cmd.LeaseRows) -> int | None:
        """Return the step of a request for a part if it is full."""
        steps, grant = self._state.steps, self._state.leases.by_token.get(command.token)
        if grant is not None:
            return grant.step if grant.step != steps.window.step else None
        return steps.closed[0][0] if steps.closed else None

    def _unfinished_groups(self) -> str:
        """List groups that may fill the open step and are not finished, earliest deadline first, and
        who works on them."""
        steps, rows = self._state.steps, self._state.rows
        live = rows.live_ids()
        at = rows.at(live)
        late = steps.unselected_at(at) & (steps.task.state[at] == WAITING)
        live, at = live[late], at[late]
        deadlines = np.where(rows.deadline[at] == NONE, np.iinfo(np.int64).max, rows.deadline[at])
        firsts = list(dict.fromkeys(rows.first[at][np.lexsort((live, deadlines))].tolist()))
        if not firsts:
            return ""
        groups = join_some(self._unfinished_group(live[rows.first[at] == first]) for first in firsts[:MAX_NAMED])
        more = f" and {len(firsts) - MAX_NAMED} more" if len(firsts) > MAX_NAMED else ""
        return f". Unfinished groups of step {steps.window.step}: {groups}{more}"

    def _unfinished_group(self, ids: Ids) -> str:
        """Name the rows of a group, and for each task its holders or the number of ready rows."""
        rows, now, parts = self._state.rows, self._state.context.now, []
        at = rows.at(ids)
        for task in self._state.tasks:
            states, tokens = task.state[at], task.token[at]
            ready = int((states == READY).sum())
            parts += [f"{ready} ready for task {task.spec.name!r}"] if ready else []
            for token, count in zip(*np.unique(tokens[states == LEASED], return_counts=True), strict=True):
                grant = self._state.leases.by_token[int(token)]
                who = self._state.sessions.name(grant.session)
                parts.append(f"{count} leased in task {task.spec.name!r} by {who} for {now - grant.since:.1f} s")
        span = f"row {ids[0]}" if len(ids) == 1 else f"{len(ids)} rows from {ids[0]} on"
        return f"{span} ({', '.join(parts) or 'in no task'})"

    def _why_no_room(self, put: cmd.AddRows) -> str:
        limits, budget, steps = self._state.limits, self._state.budget, self._state.steps
        count, live = self._state.keys.rows_in(put), budget.occupied
        holding = self._holding(list(self._state.tasks.by_name)) or "no task has any rows; declare one or end the run"
        reserve = max(count * budget.reserve, put.nbytes)
        if live + count <= limits.capacity_rows and budget.charged + reserve > limits.capacity_bytes:
            held = f", and by {budget.held} trained rows not covered by a checkpoint" if budget.held else ""
            return (
                f"{count} more rows may take {reserve} bytes, and the queue has {budget.charged} of"
                f" {limits.capacity_bytes} bytes taken or reserved by {live} rows{held}; {holding}"
            )
        if live + count <= limits.capacity_rows:
            return "earlier puts wait for room, and this one is behind them"
        full = f"{count} more rows do not fit: the queue has {live} of {limits.capacity_rows} rows"
        if steps.lacks_rows:
            lacks, batch = steps.window.free - steps.unselected, steps.window.batch_rows
            if count + batch - lacks > limits.capacity_rows:
                return (
                    f"{full}, and step {steps.window.step} cannot fill without {lacks} more;"
                    " put fewer at a time, or set a larger capacity_rows"
                )
        return f"{full}; {holding}"

    def _why_no_rows(self, request: ParkedRequest) -> str:
        command, task, steps = request.command, self._state.tasks[request.command.task], self._state.steps
        asking = {command.rank, *(self._state.parked.alike(command) if command.world_size > 1 else ())}
        if absent := sorted(set(range(command.world_size)) - asking):
            return f"{_ranks(absent)} of {command.world_size} of group {command.group!r} have not asked"
        if task.must_wait(self._state.sessions.by_id[request.session]):
            return "rows that were held by a lost worker are tried with fewer others first, and this one holds enough"
        if task.spec.admits and not steps.declared:
            return "no task with batch_rows (train) is declared, so the staleness rule cannot admit anything"
        failed = sum(home.rows_failed for home in self._state.homes.by_number.values())
        lost = (
            f"; {failed} rows were lost with their hosts: put them again with their keys"
            if failed and not self._state.parked.feeders
            else ""
        )
        if not any(task.unfinished.values()):
            return f"every row put has been through it; put more, or end the stream{lost}"
        where = command.partition
        if where is not None and not task.unfinished[self._state.partitions.number(where)]:
            return f"every row put in partition {where!r} has been through it; put more there, or end the partition"
        if task.spec.admits and task.counts[READY]:
            return self._why_not_admitted(request)
        fill = ""
        if task.spec.batch_rows is not None:
            window = steps.window
            fill = (
                f"step {window.step} lacks {window.free} of {window.batch_rows} rows, and the queue has"
                f" {steps.unselected} that may fill it; "
            )
        return fill + (self._missing(task) or self._holding([task.spec.name])) + lost

    def _why_not_admitted(self, request: ParkedRequest) -> str:
        window, rule = self._state.steps.window, self._staleness.rule
        loaded = self._state.sessions.by_id[request.session].loaded
        if loaded is None:
            return f"no version is loaded; {self._why_no_version()}"
        if self._staleness.failed:
            return self._staleness.failed
        policy = "" if rule.spec.name == "wait" else f" (policy {rule.spec.name!r})"
        return (
            f"with version {loaded} loaded and max_staleness {window.max_staleness}{policy} no group may start: step"
            f" {window.step} has {window.free} free slots and {window.load(window.step + window.max_staleness)} rows"
            f" admitted for it; {self._why_no_version()}; {self._missing(self._state.steps.task)}"
        ).rstrip("; ")

    def _why_no_version(self) -> str:
        versions = self._state.versions
        if versions.current < 0:
            text = "no version was published yet"
        else:
            text = f"version {versions.current} is current since {self._state.context.now - versions.since:.1f} s"
        if self._state.steps.declared:
            trains = self._holding([self._state.steps.name])
            text = f"{text}; {trains}" if trains else f"{text} and no trainer holds a step"
        coming = self._why_missing()
        return f"{text}; {coming}" if coming else text

    def _missing(self, task: Task) -> str:
        """Name the tasks that should write needed columns, and what they do."""
        columns = self._lacking(task)
        names: list[str] = []
        pending = [task]
        while pending:
            needs = set(pending.pop().spec.needs)
            for name, other in self._state.tasks.by_name.items():
                gives = needs & set(other.spec.gives) and _share_rows(task, other)
                if gives and name not in names and name != task.spec.name:
                    names.append(name)
                    pending.append(other)
        admitting = [name for name in names if self._state.tasks[name].spec.admits]
        if admitting and not self._state.steps.declared:
            columns.append(
                f"task {admitting[0]!r} starts no row before a task with batch_rows is declared, and none is:"
                " declare the task"
                ' that trains with its rows of a step, as in run.consumer("train", batch_size=256)'
            )
            names = [name for name in names if name not in admitting]
        return "; ".join(part for part in (*columns, self._holding(names)) if part)

    def _lacking(self, task: Task) -> list[str]:
        """Name columns missing in rows of a task, and the tasks that give them."""
        parts: list[str] = []
        for column in task.spec.needs:
            bit = int(self._state.columns.bit(column))
            count = sum(
                rows
                for (where, kind), rows in self._state.columns.kinds.items()
                if not kind & bit and task.takes(where)
            )
            giving = [
                other.spec.name
                for other in self._state.tasks
                if column in other.spec.gives and _share_rows(task, other)
            ]
            givers = " or ".join(map(repr, giving))
            if count and givers:
                parts.append(f"{count} rows lack column {column!r}, given by task {givers}")
            elif count:
                parts.append(f"no task gives column {column!r}, and {count} rows were put without it")
        return parts

    def _holding(self, names: list[str]) -> str:
        """Describe rows ready or leased in tasks, and their holders."""
        parts: list[str] = []
        now = self._state.context.now
        for name in names:
            task = self._state.tasks[name]
            ready = task.counts[READY] + task.counts[SELECTED]
            preparing = join_some(
                f"{self._state.sessions.name(session)} is {each.what} for {now - each.since:.1f} s"
                for session, each in self._state.sessions.preparing.items()
                if each.task == name
            )
            if ready:
                nobody = "" if self._state.parked.first(task.place) or preparing else ", and no client requests them"
                parts.append(f"{ready} rows are ready for task {name!r}{nobody}")
            if preparing:
                parts.append(preparing)
            if task.leases:
                oldest = next(iter(task.leases.values()))
                who = self._state.sessions.name(oldest.session)
                parts.append(
                    f"{task.counts[LEASED]} rows are leased in task {name!r}, the oldest by {who} for"
                    f" {now - oldest.since:.1f} s"
                )
        return "; ".join(parts)

    # ---- versions: who writes, fetches, may load or failed to load one

    def _why_missing(self) -> str:
        """Explain why no newer version can be fetched; "" if unknown."""
        failures = join_some(self._doing(self._state.sessions.by_id[number]) for number in self._replicas.failing)
        return "; ".join(
            part for part in (self._state.versions.unavailable, self._why_unfinished(), failures) if part
        )

    def _why_unfinished(self) -> str:
        """Explain why the announced or last discarded version is not current; "" if none."""
        publication = self._publication
        announced = publication.announced
        if announced is None:
            return publication.discarded[1]
        first = self._state.sessions.name(publication.ranks[min(announced.ranks)])
        since = self._state.context.now - announced.since
        text = f"version {announced.version} was announced {since:.1f} s ago by {first}"
        lacks = [rank for rank in range(publication.world_size) if rank not in announced.parts]
        if publication.world_size == 1:
            return f"{text}, not published yet"
        return f"{text} and lacks {join_some(self._rank(rank) for rank in lacks)}"

    def _why_no_swap(self, request: ParkedRequest) -> str:
        version, limits, now = request.command.version, self._state.limits, self._state.context.now
        if limits.quorum and version > self._state.versions.committed:
            return self._why_uncommitted(version)
        loading = join_some(
            f"{self._state.sessions.name(session)} for {now - since:.1f} s"
            for session, since in self._replicas.swapping.items()
        )
        earlier = sum(other.since < request.since for other in self._state.parked.at("swap"))
        queue = f"; {earlier} waited before it" if earlier else ""
        return f"at most {limits.max_swapping} at a time (max_swapping), now {loading}{queue}"

    def _why_uncommitted(self, version: int) -> str:
        quorum, replicas = self._state.limits.quorum, self._replicas.sessions()
        lacks = [r for r in replicas if r.replica is not None and version not in (r.replica.staged, r.loaded)]
        has = len(replicas) - len(lacks)
        text = f"{has} of the {quorum} required replicas (quorum) have it staged"
        if lacks:
            text += f"; without it: {join_some(self._doing(each) for each in lacks)}"
        if len(replicas) < quorum:
            text += f"; there are {len(replicas)} replicas, {quorum - len(replicas)} too few"
        return text

    def _doing(self, session: Session) -> str:
        text = doing(session)
        since = session.replica.since if session.replica is not None else session.since
        if not text:
            on = "no version" if session.loaded is None else f"version {session.loaded}"
            return f"{session.name} (on {on})"
        return f"{session.name} ({text}, for {self._state.context.now - since:.1f} s)"

    def _rank(self, rank: int) -> str:
        session = self._publication.ranks.get(rank)
        return (
            f"rank {rank} (no session)" if session is None else f"rank {rank} ({self._state.sessions.name(session)})"
        )

    def report(self) -> StatusReport:
        """Return rows by task and state, sessions, leases and parked requests."""
        now, limits, budget = self._state.context.now, self._state.limits, self._state.budget
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
            why=self.why(request), since_s=now - request.since, left_s=request.expires - now,
        )  # fmt: skip


def doing(session: Session) -> str:
    """Describe a replica's activity with a version ("fetching 7"); "" once it generates with it."""
    replica = session.replica
    if replica is None or not replica.doing:
        return ""
    words = {"waits": "waits to load", "swapping": "loading"}
    why = f": {replica.why}" if replica.why else ""
    return f"{words.get(replica.doing, replica.doing)} {replica.version}{why}"


def join_some(things: Iterable[str]) -> str:
    """Join the first MAX_NAMED items, and count the others."""
    known = list(things)
    more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
    return ", ".join(known[:MAX_NAMED]) + more


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _share_rows(one: Task, other: Task) -> bool:
    """True if both tasks take rows of some partition."""
    return "*" in other.spec.partitions or any(other.spec.takes(each) or each == "*" for each in one.spec.partitions)


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
