"""Diagnostics: why a request waits, in words. The text of every deadline error, and of `asyncflow top`."""

from __future__ import annotations

from . import commands as cmd
from .staleness import Staleness
from .state import LedgerState
from .state.parked import ParkedRequest
from .state.rows import LEASED, READY, SELECTED
from .state.tasks import Task
from .version_diagnostics import VersionDiagnostics, named


class Diagnostics:
    """Reads the ledger, and changes nothing."""

    def __init__(self, state: LedgerState, staleness: Staleness, weights: VersionDiagnostics) -> None:
        self._context, self._columns, self._partitions, self._limits = (
            state.context,
            state.columns,
            state.partitions,
            state.limits,
        )
        self._budget, self._sessions, self._tasks, self._steps = (
            state.budget,
            state.sessions,
            state.tasks,
            state.steps,
        )
        self._versions, self._staleness, self._parked, self._keys = (
            state.versions,
            staleness,
            state.parked,
            state.keys,
        )
        self._weights = weights

    def explain(self, request: ParkedRequest) -> str:
        """How long a request has waited, and why."""
        return f"after {self._context.now - request.since:.1f} s: {self.why(request)}"

    def why(self, request: ParkedRequest) -> str:
        """What a request waits for, who should bring it, and since when."""
        command = request.command
        match command:
            case cmd.Put():
                return self._why_no_room(command)
            case cmd.AwaitVersion():
                return self._why_no_newer(command)
            case cmd.AwaitLost():
                return "none of the rows this session has leased has ended"
            case cmd.Meet():
                return self._why_no_barrier(request)
            case cmd.Announce():
                return f"version {command.version} comes after another one; {self._weights.why_unfinished()}"
            case cmd.Swap():
                return f"version {command.version} may not be loaded yet; {self._weights.why_no_swap(request)}"
            case cmd.Wanted():
                return self._why_none_wanted()
        return f"task {command.task!r} has {self._what_there_is(command)}; {self._why_no_rows(request)}"

    def _why_no_newer(self, command: cmd.AwaitVersion) -> str:
        versions = self._versions
        if versions.committed <= command.after < versions.current in versions.kept:
            return (
                f"version {versions.current} is current and not decided: {versions.committed}, which is, has to be loaded"
                f" first; {self._why_no_version()}"
            )
        return f"no version newer than {command.after}; {self._why_no_version()}"

    def _why_none_wanted(self) -> str:
        if not self._steps.declared:
            return "no task with batch_rows (train) is declared, so nothing says how many rows are wanted"
        window = self._steps.window
        if window.slots is None:
            ahead = f"step {window.step} and the {window.max_staleness + 1} after it"
            return f"the queue has all the rows that {ahead} can take"
        return "the queue has all the rows its steps can take"

    def _why_no_barrier(self, request: ParkedRequest) -> str:
        """The ranks that have not come, and where they wait instead."""
        command = request.command
        there = [each for each in self._parked.at(request.place) if each.command.world_size == command.world_size]
        here = {command.rank, *(each.command.rank for each in there if each.command.what == command.what)}
        absent = sorted(set(range(command.world_size)) - here)
        elsewhere = "".join(
            f"; rank {each.command.rank} ({self._sessions.name(each.session)}) waits at {each.command.what!r}"
            for each in there
            if each.command.rank in absent
        )
        holding = "" if elsewhere or command.team not in self._tasks else self._holding([command.team])
        text = (
            f"{_ranks(absent)} of {command.world_size} of team {command.team!r} did not come to {command.what!r} yet"
        )
        return f"{text}{elsewhere}" + (f"; {holding}" if holding else "")

    def _what_there_is(self, command: cmd.Lease) -> str:
        """The ready rows, where a request needs more."""
        task, limits = self._tasks[command.task], self._limits
        where = None if command.partition is None else self._partitions.number(command.partition)
        fit = max((n for partition, n in task.fit.items() if where in (None, partition)), default=0)
        if not fit:
            return "nothing to give"
        if fit >= max(command.at_least, 1) and task.spec.sampler is not None:
            return (
                f"nothing to give: {fit} rows are ready, and sampler {task.spec.sampler.name!r} chooses none of them"
            )
        text = f"{fit} of {command.at_least} rows"
        if (first := self._parked.first("put")) is not None:
            count = first.command.groups * first.command.group_size
            who = self._sessions.name(first.session)
            return f"{text}, and {who} waits to put {count} more, for which there is no room"
        if command.at_least > limits.capacity_rows - self._budget.occupied + fit:
            return f"{text}, and capacity_rows={limits.capacity_rows} leaves no room for the others"
        return text

    def _why_no_room(self, put: cmd.Put) -> str:
        limits, budget, steps = self._limits, self._budget, self._steps
        count, live = self._keys.rows_in(put), budget.occupied
        reserve = max(count * budget.reserve, put.nbytes)
        if live + count <= limits.capacity_rows and budget.charged + reserve > limits.capacity_bytes:
            holding = (
                self._holding(list(self._tasks.by_name)) or "no task has any rows; declare a task or end the run"
            )
            held = f", and by {budget.held} that are trained and that no checkpoint covers" if budget.held else ""
            return (
                f"{count} more rows may take {reserve} bytes, and the queue has {budget.charged} of"
                f" {limits.capacity_bytes} bytes taken or reserved by {live} rows{held}; {holding}"
            )
        if live + count <= limits.capacity_rows:
            return "rows put earlier wait for room, and these come after them"
        full = f"{count} more rows do not fit: the queue has {live} of {limits.capacity_rows} rows"
        if steps.lacks_rows:
            lacks, batch = steps.window.free - steps.unselected, steps.window.batch_rows
            if count + batch - lacks > limits.capacity_rows:
                return (
                    f"{full}, and step {steps.window.step} cannot fill without {lacks} more;"
                    " put fewer at a time, or set a larger capacity_rows"
                )
        holding = self._holding(list(self._tasks.by_name)) or "no task has any of them; declare a task or end the run"
        return f"{full}; {holding}"

    def _why_no_rows(self, request: ParkedRequest) -> str:
        """Why a task gives no rows."""
        command, task, steps = request.command, self._tasks[request.command.task], self._steps
        if command.world_size > 1:
            asking = self._parked.of_group(command.task, command.team)
            absent = sorted(set(range(command.world_size)) - {command.rank, *asking})
            if absent:
                return f"{_ranks(absent)} of {command.world_size} of team {command.team!r} have not asked"
        if task.spec.admits and not steps.declared:
            return "no task with batch_rows (train) is declared, so the staleness rule cannot admit anything"
        if not any(task.undone.values()):
            return "every row put has been through it; put more, or end the stream"
        where = command.partition
        if where is not None and not task.undone[self._partitions.number(where)]:
            return f"every row put in partition {where!r} has been through it; put more there, or end the partition"
        if task.spec.admits and any(len(ready.peek_group()) for ready in task.ready.values()):
            return self._why_not_admitted(request)
        fill = ""
        if task.spec.batch_rows is not None:
            window = steps.window
            fill = (
                f"step {window.step} lacks {window.free} of {window.batch_rows} rows, and the queue has"
                f" {steps.unselected} that may fill it; "
            )
        return fill + (self._missing(task) or self._holding([task.spec.name]))

    def _why_not_admitted(self, request: ParkedRequest) -> str:
        window, rule = self._steps.window, self._staleness.rule
        loaded = self._sessions.by_id[request.session].loaded
        if loaded is None:
            return f"no version is loaded; {self._why_no_version()}"
        if self._staleness.failed:
            return self._staleness.failed
        policy = "" if rule.spec.name == "wait" else f" (policy {rule.spec.name!r})"
        return (
            f"with version {loaded} loaded and max_staleness {window.max_staleness}{policy} no group may start: step"
            f" {window.step} has {window.free} free slots and {window.load(window.step + window.max_staleness)} rows"
            f" admitted for it; {self._why_no_version()}; {self._missing(self._steps.task)}"
        ).rstrip("; ")

    def _why_no_version(self) -> str:
        versions = self._versions
        if versions.current < 0:
            text = "no version was published yet"
        else:
            text = f"version {versions.current} is current since {self._context.now - versions.since:.1f} s"
        if self._steps.declared:
            trains = self._holding([self._steps.name])
            text = f"{text}; {trains}" if trains else f"{text} and no trainer holds a step"
        coming = self._weights.why_missing()
        return f"{text}; {coming}" if coming else text

    def _missing(self, task: Task) -> str:
        """The tasks that should write the columns a task needs, with the rows they hold, or why they get none."""
        columns = self._lacking(task)
        names: list[str] = []
        pending = [task]
        while pending:
            needs = set(pending.pop().spec.needs)
            for name, other in self._tasks.by_name.items():
                gives = needs & set(other.spec.gives) and _share_rows(task, other)
                if gives and name not in names and name != task.spec.name:
                    names.append(name)
                    pending.append(other)
        admitting = [name for name in names if self._tasks[name].spec.admits]
        if admitting and not self._steps.declared:
            columns.append(
                f"task {admitting[0]!r} starts no row before a task with batch_rows is declared, and none is: declare the task"
                ' that trains with its rows of a step, as in run.consumer("train", batch_size=256)'
            )
            names = [name for name in names if name not in admitting]
        return "; ".join(part for part in (*columns, self._holding(names)) if part)

    def _lacking(self, task: Task) -> list[str]:
        """Columns that rows of a task lack, and the tasks that give them."""
        parts: list[str] = []
        for column in task.spec.needs:
            bit = int(self._columns.bit(column))
            count = sum(
                rows
                for (where, kind), rows in self._columns.kinds.items()
                if not kind & bit and self._tasks.takes(task, where)
            )
            giving = [
                other.spec.name for other in self._tasks if column in other.spec.gives and _share_rows(task, other)
            ]
            givers = " or ".join(map(repr, giving))
            if count and givers:
                parts.append(f"{count} rows lack column {column!r}, which task {givers} gives")
            elif count:
                parts.append(
                    f"nobody gives column {column!r}: no task declares it, and {count} rows were put without it"
                )
        return parts

    def _holding(self, names: list[str]) -> str:
        """Rows that are ready or leased in tasks, with their holders."""
        parts: list[str] = []
        now = self._context.now
        for name in names:
            task = self._tasks[name]
            ready = task.counts[READY] + task.counts[SELECTED]
            preparing = named(
                f"{self._sessions.name(session)} is {each.what} for {now - each.since:.1f} s"
                for session, each in self._sessions.preparing.items()
                if each.task == name
            )
            if ready:
                nobody = "" if self._parked.count(task.place) or preparing else ", and nobody asks for them"
                parts.append(f"{ready} rows are ready for task {name!r}{nobody}")
            if preparing:
                parts.append(preparing)
            if task.leases:
                oldest = next(iter(task.leases.values()))
                who = self._sessions.name(oldest.session)
                parts.append(
                    f"{task.counts[LEASED]} rows are leased in task {name!r}, the oldest by {who} for"
                    f" {now - oldest.since:.1f} s"
                )
        return "; ".join(parts)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _share_rows(one: Task, other: Task) -> bool:
    """True if there is a partition whose rows both take."""
    return "*" in other.spec.partitions or any(other.spec.takes(each) or each == "*" for each in one.spec.partitions)
