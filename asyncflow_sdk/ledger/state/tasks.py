"""Tasks: their ready rows, counters and leases."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import SchemaError
from ...types.tasks import TaskSpec
from ..commands import Ids, SamplerTraits
from .context import Context
from .grants import Grant
from .partitions import Partitions
from .ready import ReadyQueue
from .rows import ANY, APART, DONE, LEASED, NONE, READY, TASK_STATES, WAITING, Rows
from .sessions import Session

PARTS = 4  # units lost together are leased in this many parts next


@dataclass
class Task:
    """A task.

    ``need``: bits of the needed columns. By partition: ``ready``, ready rows; ``unfinished``, live rows not
    completed; ``waiting`` and ``fit``, rows without their columns and ready rows, if leased singly; ``redo``,
    admitted rows with a lost producer. ``counts``: live rows by state. ``became_ready``, ``completed``: row counts
    over all time. ``leases_granted``: their number. ``suspects``: rows whose process died or hung, until their next
    lease has ended well. ``leases``, ``group_leases``: by token, oldest first; and by rank group. ``next_partition``:
    where a lease without a partition looks first.
    """

    spec: TaskSpec
    need: np.uint64
    sampling: SamplerTraits = field(default_factory=SamplerTraits)
    ready: dict[int, ReadyQueue] = field(default_factory=dict)
    unfinished: Counter[int] = field(default_factory=Counter)
    waiting: Counter[int] = field(default_factory=Counter)
    fit: Counter[int] = field(default_factory=Counter)
    next_partition: int = 0
    redo: dict[int, deque[Ids]] = field(default_factory=dict)
    counts: list[int] = field(default_factory=lambda: [0] * len(TASK_STATES))
    leases_granted: int = 0
    became_ready: int = 0
    completed: int = 0
    leases: dict[int, Grant] = field(default_factory=dict)
    group_leases: dict[str, dict[int, Grant]] = field(default_factory=dict)
    suspects: Ids = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def place(self) -> str:
        """The place where requests for its rows wait."""
        return f"task {self.spec.name}"

    @property
    def whole_groups(self) -> bool:
        """True if its rows become ready and are leased in whole groups."""
        return self.spec.grouped or self.sampling.whole_groups

    def move(self, count: int, before: int, after: int) -> None:
        """Count ``count`` live rows in another state."""
        self.counts[before] -= count
        self.counts[after] += count


class Tasks:
    """Tasks by name, in order of declaration."""

    def __init__(self, context: Context, rows: Rows, partitions: Partitions) -> None:
        self._context, self._rows, self._partitions = context, rows, partitions
        self.by_name: dict[str, Task] = {}

    def __iter__(self) -> Iterator[Task]:
        return iter(self.by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def __getitem__(self, name: str) -> Task:
        return self.by_name[name]

    def find(self, name: str) -> Task:
        """Return the task named by a client. Raises SchemaError."""
        try:
            return self.by_name[name]
        except KeyError:
            known = ", ".join(sorted(self.by_name)) or "none yet"
            raise SchemaError(f"no task {name!r}; declared: {known}") from None

    @property
    def admitting(self) -> Task | None:
        """The task with groups admitted by the staleness rule (rollout)."""
        return next((task for task in self if task.spec.admits), None)

    def wake_replicas(self) -> None:
        """Retry the requests of replicas: the staleness rule may now admit rows."""
        if (task := self.admitting) is not None:
            self._context.wake(task.place)

    def wake_replica(self, session: int) -> None:
        """Retry the requests of one replica, which alone may now get prompts."""
        for task in self:
            if task.spec.admits or self._partitions.pins:
                self._context.wake_session(task.place, session)

    def takes(self, task: Task, partition: int) -> bool:
        """True if a task takes the partition with this number."""
        names = task.spec.partitions
        return "*" in names or any(self._partitions.numbers.get(name) == partition for name in names)

    def queue(self, task: Task, partition: int) -> ReadyQueue:
        """Return the ready rows of a task in one partition."""
        if partition not in task.ready:
            task.ready[partition] = ReadyQueue(self._rows, task.spec.name)
        return task.ready[partition]

    def exhausted(self, task: Task, partition: str | None = None) -> bool:
        """True if a task gets no further row, of one partition or of any."""
        partitions = self._partitions
        if partition is not None:
            ended = partitions.closed(partitions.number(partition)) or partition in partitions.ended_names
            return ended and not task.unfinished[partitions.number(partition)]
        ended = partitions.ended or partitions.ended_names.issuperset(task.spec.partitions)
        return ended and not any(task.unfinished.values())

    def enter(self, at: Any, count: int, partition: int, takers: list[Task]) -> None:
        """Count ``count`` new rows of a partition, by array index or slice, as waiting in its tasks."""
        self._rows.todo[at] = len(takers)
        for task in self:
            if task in takers:
                task.unfinished[partition] += count
                task.counts[WAITING] += count
                task.waiting[partition] += count * (not task.spec.grouped)
            else:
                self._rows.task(task.spec.name, "state")[at] = APART

    def leave(self, task: Task, ids: Ids) -> None:
        """Count rows as done in a task, or ended."""
        last = False
        for partition, part in self._partitions.split(ids):
            task.unfinished[partition] -= len(part)
            last |= not task.unfinished[partition]
        if last:
            self._context.wake(task.place, *(["swap", "version"] if self._partitions.pins else []))
        if self.exhausted(task):
            self._context.wake("version")

    def count_waiting(self, task: Task, ids: Ids) -> None:
        """Count rows that got their missing columns or ended without them."""
        if not task.spec.grouped:
            for partition, part in self._partitions.split(ids):
                task.waiting[partition] -= len(part)

    def count_fit(self, task: Task, ids: Ids, sign: int) -> None:
        """Count rows that became ready (``sign`` 1) or stopped being ready (-1)."""
        if not task.spec.grouped:
            for partition, part in self._partitions.split(ids):
                task.fit[partition] += sign * len(part)

    def skip(self, task: Task, ids: Ids) -> None:
        """Count rows as done in a task without a lease: steps take them as they were put."""
        rows = self._rows
        state = rows.task(task.spec.name, "state")
        ids = ids[state[rows.at(ids)] != APART]
        at = rows.at(ids)
        for before, count in enumerate(np.bincount(state[at]).tolist()):
            task.move(count, before, DONE)
        state[at] = DONE
        rows.todo[at] -= 1
        self.leave(task, ids)

    def return_to_queue(self, task: Task, ids: Ids) -> None:
        """Put returned rows before the other ready rows. With whole groups, include rows of the
        same groups returned earlier; their older entries are skipped."""
        for partition, part in self._partitions.split(ids):
            ready = self.queue(task, partition)
            if task.whole_groups:
                part = self._rows.members(part)
                part = part[ready.is_ready(part)]
            ready.push_front(part)

    def units(self, task: Task, ids: Ids) -> Ids:
        """Return the unit of blame of each row: the row, or its group in tasks with whole groups."""
        return self._rows.first[self._rows.at(ids)] if task.whole_groups else ids

    def held(self, name: str, session: Session | None) -> int:
        """Return the number of a task's units held by a session."""
        leases = session.leases if session is not None else {}
        ids = np.concatenate(
            [self.by_name[name].suspects[:0], *(each.ids for each in leases.values() if each.task == name)]
        )
        ids = ids[self._rows.having(name, "state", LEASED, ids)]
        ids = ids[np.isin(self._rows.task(name, "token")[self._rows.at(ids)], list(leases))]
        return len(np.unique(self.units(self.by_name[name], ids)))

    def narrow(self, task: Task, ids: Ids, lost: int, *, died: bool) -> None:
        """Lease rows with fewer others, after they lost a lease among ``lost`` units. One loss is no sign against a
        prompt. ``died``: they are suspects, since their process died or hung."""
        name, together = task.spec.name, self._rows.task(task.spec.name, "together")
        ids = ids[self._rows.task(name, "attempts")[self._rows.at(ids)] > task.spec.admits]
        at = self._rows.at(ids)
        together[at] = np.maximum(np.minimum(together[at], lost) // PARTS, 1)
        task.suspects = np.union1d(task.suspects, ids) if died else task.suspects

    def unfinished(self, name: str, ids: Ids) -> Ids:
        """Return the ready and the leased rows."""
        return ids[self._rows.having(name, "state", READY, ids) | self._rows.having(name, "state", LEASED, ids)]

    def must_wait(self, task: Task, session: Session) -> bool:
        """True if a session holds as much as may be lost with its suspects, or with the ready ones."""
        if not len(task.suspects):
            return False
        at, name = self._rows.at(self.unfinished(task.spec.name, task.suspects)), task.spec.name
        its = at[np.isin(self._rows.task(name, "token")[at], [NONE, *session.leases])]
        return bool(self.held(name, session) >= self._rows.task(name, "together")[its].min(initial=ANY))

    def together(self, task: Task, ids: Ids, at_least: int) -> int:
        """Return the number of first rows to lease together: the units allowed by each of them, or ``at_least``."""
        units, limits = self.units(task, ids), self._rows.task(task.spec.name, "together")[self._rows.at(ids)]
        unit = np.cumsum(np.diff(units, prepend=units[:1]) != 0)
        unit[unit <= unit[max(at_least, 1) - 1]] = 0
        return int(np.searchsorted(unit, unit[unit >= np.minimum.accumulate(limits)].min(initial=ANY)))

    def next_partitions(self, task: Task, named: str | None) -> list[int]:
        """Return partitions that may have ready rows, in turn."""
        if named is not None:
            return [number for number in [self._partitions.number(named)] if number in task.ready]
        return sorted(task.ready, key=lambda number: (number < task.next_partition, number))
