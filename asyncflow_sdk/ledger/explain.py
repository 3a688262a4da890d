"""Why a request waits: in words, from the ledger's state. The text of every deadline error and of `top`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import commands as cmd
from .rows import LEASED, READY, SELECTED
from .whereabouts import named, what_failed, why_no_swap, why_not_there

if TYPE_CHECKING:
    from .records import Task, Waiter
    from .state import State


def explain(ledger: State, waiter: Waiter, now: float) -> str:
    """What a parked request waits for, who should bring it, and since when."""
    waited = f"after {now - waiter.since:.1f} s: "
    command = waiter.command
    if isinstance(command, cmd.Put):
        return f"{waited}{_why_no_room(ledger, command, now)}"
    if isinstance(command, cmd.AwaitVersion):
        if ledger.committed <= command.after < ledger.version in ledger.versions:
            return (
                f"{waited}version {ledger.version} is current and not decided: {ledger.committed}, which is, has to be loaded"
                f" first; {_why_no_version(ledger, now)}"
            )
        return f"{waited}no version newer than {command.after}; {_why_no_version(ledger, now)}"
    if isinstance(command, cmd.AwaitLost):
        return f"{waited}none of the rows this session has leased has ended"
    if isinstance(command, cmd.Meet):
        return f"{waited}{_who_has_not_come(ledger, waiter, now)}"
    if isinstance(command, cmd.Announce):
        return f"{waited}version {command.version} comes after another one; {why_not_there(ledger, now)}"
    if isinstance(command, cmd.Swap):
        return f"{waited}version {command.version} may not be loaded yet; {why_no_swap(ledger, waiter, now)}"
    if isinstance(command, cmd.Wanted):
        if ledger.steps is None:
            return f"{waited}no task with batch_rows (train) is declared, so nothing says how many rows are wanted"
        window = ledger.steps.window
        if window.slots is None:
            ahead = f"step {window.step} and the {window.max_staleness + 1} after it"
            return f"{waited}the queue has all the rows that {ahead} can take"
        return f"{waited}the queue has all the rows its steps can take"
    return f"{waited}task {command.task!r} has {_what_there_is(ledger, command)}; {_why_task(ledger, waiter, now)}"


def _who_has_not_come(ledger: State, waiter: Waiter, now: float) -> str:
    """Which ranks are not where this one waits for them, and what they say they do."""
    command = waiter.command
    there = [
        each
        for each in ledger.waiters.get(waiter.place, {}).values()
        if each.command.world_size == command.world_size
    ]
    here = {command.rank, *(each.command.rank for each in there if each.command.what == command.what)}
    absent = sorted(set(range(command.world_size)) - here)
    elsewhere = "".join(
        f"; rank {each.command.rank} ({ledger._name(each.session)}) waits at {each.command.what!r}"
        for each in there
        if each.command.rank in absent
    )
    ranks = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} of {command.world_size} of team {command.team!r}"
    holding = "" if elsewhere or command.team not in ledger.tasks else _holding(ledger, [command.team], now)
    return f"{ranks} did not come to {command.what!r} yet{elsewhere}" + (f"; {holding}" if holding else "")


def _what_there_is(ledger: State, command: cmd.Lease) -> str:
    """Of rows taken singly, what a request for more has to wait beside."""
    task = ledger.tasks[command.task]
    where = None if command.partition is None else ledger.partitions.get(command.partition, -1)
    fit = max((n for partition, n in task.fit.items() if where in (None, partition)), default=0)
    if not fit:
        return "nothing to give"
    if fit >= max(command.at_least, 1) and task.spec.sampler is not None:
        return f"nothing to give: {fit} rows are ready, and sampler {task.spec.sampler.name!r} chooses none of them"
    text = f"{fit} of {command.at_least} rows"
    parked = next(iter(ledger.waiters.get("put", {}).values()), None)
    if parked is not None:
        count = parked.command.groups * parked.command.group_size
        return f"{text}, and {ledger._name(parked.session)} waits to put {count} more, for which there is no room"
    if (
        command.at_least
        > ledger.capacity_rows - (ledger.put_total - int(ledger.rows.ended.sum()) - ledger.held) + fit
    ):
        return f"{text}, and capacity_rows={ledger.capacity_rows} leaves no room for the others"
    return text


def _why_no_room(ledger: State, put: cmd.Put, now: float) -> str:
    count = ledger._keys.rows_in(put)
    live = ledger.put_total - int(ledger.rows.ended.sum()) - ledger.held
    reserve = max(count * ledger._reserve(), put.nbytes)
    if live + count <= ledger.capacity_rows and ledger.charged + reserve > ledger.capacity_bytes:
        holding = _holding(ledger, list(ledger.tasks), now) or "no task has any rows; declare a task or end the run"
        held = f", and by {ledger.held} that are trained and that no checkpoint covers" if ledger.held else ""
        return (
            f"{count} more rows may take {reserve} bytes, and the queue has {ledger.charged} of"
            f" {ledger.capacity_bytes} bytes taken or reserved by {live} rows{held}; {holding}"
        )
    if live + count <= ledger.capacity_rows:
        return "rows put earlier wait for room, and these come after them"
    full = f"{count} more rows do not fit: the queue has {live} of {ledger.capacity_rows} rows"
    if ledger.steps is not None:
        window = ledger.steps.window
        lacks = window.free - ledger.unselected
        if lacks > 0 and not window.finished and count + window.batch_rows - lacks > ledger.capacity_rows:
            return (
                f"{full}, and step {window.step} cannot fill without {lacks} more;"
                " put fewer at a time, or set a larger capacity_rows"
            )
    holding = _holding(ledger, list(ledger.tasks), now) or "no task has any of them; declare a task or end the run"
    return f"{full}; {holding}"


def _why_task(ledger: State, waiter: Waiter, now: float) -> str:
    command, task = waiter.command, ledger.tasks[waiter.command.task]
    if command.world_size > 1:
        absent = sorted(
            set(range(command.world_size))
            - {command.rank, *(task.teams[command.team].asking if command.team in task.teams else ())}
        )
        if absent:
            return (
                f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} of {command.world_size} of team"
                f" {command.team!r} have not asked"
            )
    if task.spec.admits and ledger.steps is None:
        return "no task with batch_rows (train) is declared, so the staleness rule cannot admit anything"
    if not any(task.undone.values()):
        return "every row put has been through it; put more, or end the stream"
    where = waiter.command.partition
    if where is not None and not task.undone[ledger.partitions.get(where, -1)]:
        return f"every row put in partition {where!r} has been through it; put more there, or end the partition"
    if task.spec.admits and any(len(ready.peek_group()) for ready in task.ready.values()):
        return _why_not_admitted(ledger, task, waiter, now)
    if task.spec.batch_rows is not None:
        assert ledger.steps is not None
        window = ledger.steps.window
        fill = (
            f"step {window.step} lacks {window.free} of {window.batch_rows} rows, and the queue has"
            f" {ledger.unselected} that may fill it; "
        )
    else:
        fill = ""
    return fill + (_missing(ledger, task, now) or _holding(ledger, [task.spec.name], now))


def _why_not_admitted(ledger: State, task: Task, waiter: Waiter, now: float) -> str:
    assert ledger.steps is not None
    window = ledger.steps.window
    loaded = ledger.sessions[waiter.session].loaded
    if loaded is None:
        return f"no version is loaded; {_why_no_version(ledger, now)}"
    if ledger.policy_failed:
        return ledger.policy_failed
    policy = "" if ledger.rule.spec.name == "wait" else f" (policy {ledger.rule.spec.name!r})"
    return (
        f"with version {loaded} loaded and max_staleness {window.max_staleness}{policy} no group may start: step"
        f" {window.step} has {window.free} free slots and {window.load(window.step + window.max_staleness)} rows"
        f" admitted for it; {_why_no_version(ledger, now)}; {_missing(ledger, ledger.steps.task, now)}"
    ).rstrip("; ")


def _why_no_version(ledger: State, now: float) -> str:
    if ledger.version < 0:
        text = "no version was published yet"
    else:
        text = f"version {ledger.version} is current since {now - ledger.version_since:.1f} s"
    coming = "; ".join(
        part for part in (ledger.not_there, why_not_there(ledger, now), what_failed(ledger, now)) if part
    )
    if ledger.steps is not None:
        trains = _holding(ledger, [ledger.steps.task.spec.name], now)
        text = f"{text}; {trains}" if trains else f"{text} and no trainer holds a step"
    return f"{text}; {coming}" if coming else text


def _missing(ledger: State, task: Task, now: float) -> str:
    """Who should write the columns a task needs: the tasks before it that have rows in hand, or why they get none."""
    columns = _lacking(ledger, task)
    names: list[str] = []
    pending = [task]
    while pending:
        needs = set(pending.pop().spec.needs)
        for name, other in ledger.tasks.items():
            gives = needs & set(other.spec.gives) and _share_rows(task, other)
            if gives and name not in names and name != task.spec.name:
                names.append(name)
                pending.append(other)
    admitting = [name for name in names if ledger.tasks[name].spec.admits]
    if admitting and ledger.steps is None:
        columns.append(
            f"task {admitting[0]!r} starts no row before a task with batch_rows is declared, and none is: declare the task"
            ' that trains with its rows of a step, as in run.consumer("train", batch_size=256)'
        )
        names = [name for name in names if name not in admitting]
    return "; ".join(part for part in (*columns, _holding(ledger, names, now)) if part)


def _lacking(ledger: State, task: Task) -> list[str]:
    """Columns that rows of a task still lack, and who gives them."""
    parts: list[str] = []
    kinds = ledger.kinds.items()
    for column in task.spec.needs:
        bit = int(ledger._bit(column))
        count = sum(rows for (where, kind), rows in kinds if not kind & bit and ledger._takes(task, where))
        giving = [
            name for name, other in ledger.tasks.items() if column in other.spec.gives and _share_rows(task, other)
        ]
        givers = " or ".join(map(repr, giving))
        if count and givers:
            parts.append(f"{count} rows lack column {column!r}, which task {givers} gives")
        elif count:
            parts.append(f"nobody gives column {column!r}: no task declares it, and {count} rows were put without it")
    return parts


def _share_rows(one: Task, other: Task) -> bool:
    """True if there is a partition whose rows both take."""
    return "*" in other.spec.partitions or any(other.spec.takes(each) or each == "*" for each in one.spec.partitions)


def _holding(ledger: State, names: list[str], now: float) -> str:
    """Rows ready or leased in tasks, with the holders."""
    parts: list[str] = []
    for name in names:
        task = ledger.tasks[name]
        ready = task.counts[READY] + task.counts[SELECTED]
        asking = len(ledger.waiters.get(f"task {name}", ()))
        preparing = named(
            f"{ledger._name(session)} is {each.what} for {now - each.since:.1f} s"
            for session, each in ledger.preparing.items()
            if each.task == name
        )
        if ready:
            nobody = "" if asking or preparing else ", and nobody asks for them"
            parts.append(f"{ready} rows are ready for task {name!r}{nobody}")
        if preparing:
            parts.append(preparing)
        if task.leases:
            oldest = next(iter(task.leases.values()))
            who = ledger._name(oldest.session)
            parts.append(
                f"{task.counts[LEASED]} rows are leased in task {name!r}, the oldest by {who} for"
                f" {now - oldest.since:.1f} s"
            )
    return "; ".join(parts)
