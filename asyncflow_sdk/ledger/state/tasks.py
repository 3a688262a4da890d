"""Tasks: their ready rows, their counters, and the leases of each."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ...errors import SchemaError
from ...types.tasks import TaskSpec
from ..commands import Ids, SamplerTraits
from .context import Context
from .grants import Grant
from .partitions import Partitions
from .ready import ReadyQueue
from .rows import APART, DONE, TASK_STATES, Rows


@dataclass
class Task:
    """A task.

    ``need``: the bits of the columns it needs. ``ready``: its ready rows. ``undone``: live rows it has not completed.
    ``waiting``, ``fit``: live rows that lack columns, and ready ones, where rows are taken singly. ``redo``: admitted rows whose
    producer was lost. These by partition. ``counts``: live rows by their state in the task. ``came``, ``passed``: how often a row
    became ready, and was completed. ``given``: leases granted. ``leases``, ``group_leases``: by token, the oldest first; and those of
    each rank group. ``turn``: the partition where a lease that names none looks first.
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

    @property
    def place(self) -> str:
        """Where requests for its rows wait."""
        return f"task {self.spec.name}"

    @property
    def whole_groups(self) -> bool:
        """True if its rows become ready, and are leased, in whole groups."""
        return self.spec.grouped or self.sampling.whole_groups

    def move(self, count: int, before: int, after: int) -> None:
        """Count ``count`` live rows in another state."""
        self.counts[before] -= count
        self.counts[after] += count


class Tasks:
    """Tasks by name, in the order of their declaration."""

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
        """The task that a client names. Raises SchemaError."""
        try:
            return self.by_name[name]
        except KeyError:
            known = ", ".join(sorted(self.by_name)) or "none yet"
            raise SchemaError(f"no task {name!r}; declared: {known}") from None

    @property
    def admitting(self) -> Task | None:
        """The task whose groups the staleness rule admits (rollout)."""
        return next((task for task in self if task.spec.admits), None)

    def wake_replicas(self) -> None:
        """Try the requests of replicas again: the staleness rule may now admit their rows."""
        if (task := self.admitting) is not None:
            self._context.wake(task.place)

    def takes(self, task: Task, partition: int) -> bool:
        """True if a task takes the rows of the partition with this number."""
        names = task.spec.partitions
        return "*" in names or any(self._partitions.numbers.get(name) == partition for name in names)

    def queue(self, task: Task, partition: int) -> ReadyQueue:
        """The ready rows of a task in one partition."""
        if partition not in task.ready:
            task.ready[partition] = ReadyQueue(self._rows, task.spec.name)
        return task.ready[partition]

    def exhausted(self, task: Task, partition: str | None = None) -> bool:
        """True if a task will get no further row, of one partition or of any."""
        partitions = self._partitions
        if partition is not None:
            ended = partitions.ended or partition in partitions.ended_names
            return ended and not task.unfinished[partitions.number(partition)]
        ended = partitions.ended or partitions.ended_names.issuperset(task.spec.partitions)
        return ended and not any(task.unfinished.values())

    def leave(self, task: Task, ids: Ids) -> None:
        """Count rows as done in a task, or ended."""
        for partition, part in self._partitions.split(ids):
            task.unfinished[partition] -= len(part)
        self._context.wake(task.place)
        if self.exhausted(task):
            self._context.wake("version")

    def count_waiting(self, task: Task, ids: Ids) -> None:
        """Count rows of a task that got the columns they lacked, or ended without them."""
        if not task.spec.grouped:
            for partition, part in self._partitions.split(ids):
                task.waiting[partition] -= len(part)

    def count_fit(self, task: Task, ids: Ids, sign: int) -> None:
        """Count rows that became ready (1), or are so no longer (-1)."""
        if not task.spec.grouped:
            for partition, part in self._partitions.split(ids):
                task.fit[partition] += sign * len(part)

    def skip(self, task: Task, ids: Ids) -> None:
        """Count rows as done in a task without leasing them: a step can take them as they were put."""
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
        """Put rows that came back before the other ready rows of a task. Where groups stay whole, together with rows of their groups
        that came back before: these were queued then, and are passed over there."""
        for partition, part in self._partitions.split(ids):
            ready = self.queue(task, partition)
            if task.whole_groups:
                part = self._rows.members(part)
                part = part[ready.is_ready(part)]
            ready.push_front(part)

    def next_partitions(self, task: Task, named: str | None) -> list[int]:
        """Partitions where a task may have ready rows, the one whose turn it is first."""
        if named is not None:
            return [number for number in [self._partitions.number(named)] if number in task.ready]
        return sorted(task.ready, key=lambda number: (number < task.next_partition, number))
