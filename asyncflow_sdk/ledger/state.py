"""What the ledger knows, and looking things up in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import AsyncFlowError, SchemaError
from ..types import ColumnSpec, check_column_name
from . import commands as cmd
from .commands import TERMINAL, Ids, PolicySpec
from .lineage import Lineage
from .outside import Outside
from .ready import ReadyQueue
from .records import Effects, Held, Preparation, Rule, Session, Steps, Task, Team, Waiter
from .remembering import KeyedPuts, Letters
from .rows import APART, NONE, Rows
from .timers import Timers
from .versions import Announced, Kept

CONSUMED, FILTERED, EXPIRED, FAILED, CANCELLED = range(1, 1 + len(TERMINAL))
MAX_COLUMNS = 64
MAX_NUMBER = 1 << 61  # of a version or a limit: sums of two fit int64


class State:
    """All of the ledger's state. ``_now`` is ledger seconds, never falling. Of every attribute but the ``TRANSIENT``
    ones snapshots are made, whatever classes of this room, containers, arrays and numbers it consists of."""

    TRANSIENT = frozenset({"outside", "_handlers"})

    def __init__(self) -> None:
        self.rows = Rows()
        self.tasks: dict[str, Task] = {}
        self.steps: Steps | None = None
        self.sessions: dict[int, Session] = {}
        self.leases: dict[int, Held] = {}
        self.waiters: dict[str, dict[int, Waiter]] = {}  # place → ticket → request, first come first
        self.parked: dict[int, Waiter] = {}
        self._lease_ends = Timers(self.leases)
        self._request_ends = Timers(self.parked)
        self.versions: dict[int, Kept] = {}  # the newest ones, oldest first
        self.version = NONE
        self.version_since = 0.0
        self.lineage = Lineage()
        self.committed = NONE  # by quorum
        self.publisher: dict[int, int] = {}  # rank → session
        self.publisher_size = 0
        self.announced: Announced | None = None
        self.not_coming = (NONE, "")  # the last version that was announced and will not come, and why
        self.lost: dict[
            int, str
        ] = {}  # by rank that has not heard it yet, why what it published a part of will not come
        self.not_there = ""  # why the current version cannot be fetched
        self.to_restore = NONE  # the version of a rollback that the trainer has not loaded yet
        self.restore_step = NONE  # the step of the checkpoint that has this version's optimizer state
        self.no_rollback = ""  # why the trainer of the last publisher cannot load a version
        self.replicas: dict[int, None] = {}  # sessions that take versions
        self.failing: dict[int, None] = {}  # those of them that could not fetch or load the last version they tried
        self.swapping: dict[int, float] = {}  # session → since when it may load, the longest first
        self.preparing: dict[int, Preparation] = {}  # by session
        self.keep_versions = 2
        self.max_swapping = 0  # no limit
        self.quorum = 0  # none
        self.capacity_rows = 1 << 40
        self.capacity_bytes = MAX_NUMBER
        self.row_bytes = 0
        self.charged = 0  # bytes that live rows take or may take
        self.largest_row = 0  # bytes of the largest row that has ended
        self.max_staleness = 1
        self.rule = Rule(PolicySpec("wait"))
        self.policy_failed = ""  # why no further row can be selected
        self.last_steps: int | None = None
        self.checkpoints = False
        self.covered = 0  # steps before this one are final
        self.checkpoint = NONE  # the step that the newest checkpoint goes on with
        self.saved: dict[int, int] = {}  # by the step of each checkpoint that is kept, the version it has
        self.held = 0  # live rows that every task is through with, of steps that are not final
        self.holes: Ids = np.empty(0, np.int64)  # rows of such steps whose payload is gone
        self.partitions: dict[str, int] = {"": 0}
        self.group_sizes: dict[str, int] = {}  # of a partition's last put
        self.ended = False
        self.end_said = False  # by somebody, not because every step was filled
        self.ended_partitions: set[str] = set()
        self.put_total = 0
        self.reasons: Counter[str] = Counter()
        self.unselected = 0  # live rows that the steps take and have not taken yet
        self.kinds: dict[tuple[int, int], int] = {}  # live rows by their partition and the bit set of their columns
        self.schema: dict[str, ColumnSpec] = {}
        self._places: dict[str, int] = {}  # of a column's bit
        self._reselect = False
        self._stepped = False  # a step has closed, and nobody looked yet at what is late now
        self._excused: list[tuple[str, Ids]] = []  # rows of tasks that take whole groups, that ended unready
        self.ages: cmd.StepAges | None = None
        self.lengths_known = False  # of any response
        self.pace = [0, 0.0]  # tokens and seconds of responses that were generated whole
        self._keys = KeyedPuts()
        self.letters = Letters()
        self._next_session = 1
        self._next_token = 1
        self._dirty: set[str] = set()
        self._all_woken = False  # not for rows alone
        self._judging = False  # puts, not for room alone
        self._effects = Effects()
        self._now = 0.0
        self.outside = Outside()

    @property
    def now(self) -> float:
        """Ledger seconds at the last input."""
        return self._now

    def _task(self, name: str) -> Task:
        try:
            return self.tasks[name]
        except KeyError:
            known = ", ".join(sorted(self.tasks)) or "none yet"
            raise SchemaError(f"no task {name!r}; declared: {known}") from None

    def _name(self, session: int) -> str:
        return self.sessions[session].name if session in self.sessions else f"session {session}"

    def _bit(self, column: str) -> np.uint64:
        """The bit of a column, known or to come; ``_check_places`` came first."""
        return np.uint64(1 << self._places.setdefault(column, len(self._places)))

    def _mask(self, columns: Iterable[str]) -> int:
        """The bits of columns that are known."""
        mask = 0
        for name in columns:
            if name in self.schema:
                mask |= 1 << self._places[name]
        return mask

    def _check_places(self, columns: Iterable[str]) -> None:
        if self._places.keys() >= set(columns):
            return
        new = sorted(set(columns) - self._places.keys())
        for name in new:
            check_column_name(name)
        if len(self._places) + len(new) > MAX_COLUMNS:
            raise SchemaError(f"a queue holds at most {MAX_COLUMNS} columns; {new[-1]!r} is one too many")

    def _check_columns(self, columns: cmd.Columns) -> None:
        for name, spec in columns.items():
            known = self.schema.get(name)
            if known is not None and known is not spec and known != spec:
                raise SchemaError(f"column {name!r} is {known}; it cannot take {spec}")
            if name in self.rows.measures and not spec.measurable:
                raise SchemaError(f"column {name!r} is measured by a sampler; {spec} has no number a row")
        self._check_places(columns)

    def _bits(self, columns: cmd.Columns) -> int:
        for name, spec in columns.items():
            if name not in self.schema:
                self.schema[name] = spec
                self._places.setdefault(name, len(self._places))
                self._judge_puts()  # one that says otherwise can be refused now
        return self._mask(columns)

    def _answer(self, ticket: int, reply: cmd.Reply | AsyncFlowError) -> None:
        self._effects.answers.append((ticket, reply))

    def _exhausted(self, task: Task, partition: str | None = None) -> bool:
        """Whether a task will get no further row, of one partition or of any."""
        if partition is not None:
            ended = self.ended or partition in self.ended_partitions
            return ended and not task.undone[self.partitions.get(partition, NONE)]
        ended = self.ended or self.ended_partitions.issuperset(task.spec.partitions)
        return ended and not any(task.undone.values())

    def _count_kinds(self, at: Ids, change: int) -> None:
        """Live rows with the columns they have came (``change`` 1) or went (-1)."""
        split = [(0, at)] if len(self.partitions) == 1 else self._by_partition(at + self.rows.base)
        for partition, ids in split:
            columns = self.rows.columns[at if ids is at else self.rows.at(ids)]
            if not len(columns):
                continue
            if len(columns) == 1 or (columns == columns[0]).all():  # as they nearly always are
                parts = [(int(columns[0]), len(columns))]
            else:
                kinds, counts = np.unique(columns, return_counts=True)
                parts = list(zip(kinds.tolist(), counts.tolist(), strict=True))
            for kind, count in parts:
                self._count_kind(partition, kind, change * count)

    def _count_kind(self, partition: int, kind: int, change: int) -> None:
        left = self.kinds.get((partition, kind), 0) + change
        if left:
            self.kinds[partition, kind] = left
        else:
            self.kinds.pop((partition, kind), None)

    def _supply_ended(self) -> bool:
        """Whether nothing more can be put that a step takes."""
        return self.ended or (
            self.steps is not None and self.ended_partitions.issuperset(self.steps.task.spec.partitions)
        )

    def _closed(self, partition: int) -> bool:
        """Whether nothing more can be put there."""
        return self.ended or any(self.partitions.get(name) == partition for name in self.ended_partitions)

    def _through(self, task: Task, ids: Ids) -> None:
        """Rows are through with a task: done, or ended."""
        for partition, part in self._by_partition(ids):
            task.undone[partition] -= len(part)
        self._dirty.add(f"task {task.spec.name}")
        if self._exhausted(task):
            self._dirty.add("version")

    def _by_partition(self, ids: Ids) -> list[tuple[int, Ids]]:
        """Rows apart by their partition, in order; none of an empty list."""
        if len(self.partitions) == 1 or not len(ids):
            return [(0, ids)] if len(ids) else []
        where = self.rows.partition[self.rows.at(ids)]
        if (where == where[0]).all():
            return [(int(where[0]), ids)]
        return [(int(partition), ids[where == partition]) for partition in np.unique(where)]

    def _takes(self, task: Task, partition: int) -> bool:
        names = task.spec.partitions
        return "*" in names or any(self.partitions.get(name) == partition for name in names)

    def _queue(self, task: Task, partition: int) -> ReadyQueue:
        """The ready rows of a task in one partition."""
        if partition not in task.ready:
            task.ready[partition] = ReadyQueue(self.rows, task.spec.name)
        return task.ready[partition]

    def _trained(self, at: Ids) -> Any:
        """Which rows, by place, the steps take."""
        assert self.steps is not None
        return self.rows.task(self.steps.task.spec.name, "state")[at] != APART

    def _park(self, waiter: Waiter) -> None:
        self.waiters.setdefault(waiter.place, {})[waiter.ticket] = waiter
        self.parked[waiter.ticket] = waiter
        self.sessions[waiter.session].parked[waiter.ticket] = None
        self._request_ends.add(waiter.ticket)
        if (place := _team(waiter.command)) is not None:
            team = self.tasks[place[0]].teams.setdefault(place[1], Team())
            team.asking.setdefault(waiter.command.rank, {})[waiter.ticket] = waiter

    def _forget_team(self, task: str, name: str) -> None:
        """A team that asks nothing and holds nothing need not be known."""
        team = self.tasks[task].teams[name]
        if not team.asking and not team.leases:
            del self.tasks[task].teams[name]

    def _unpark(self, waiter: Waiter) -> None:
        if (place := _team(waiter.command)) is not None:
            asking = self.tasks[place[0]].teams[place[1]].asking
            del asking[waiter.command.rank][waiter.ticket]
            if not asking[waiter.command.rank]:
                del asking[waiter.command.rank]
            self._forget_team(*place)
        del self.waiters[waiter.place][waiter.ticket], self.parked[waiter.ticket]
        del self.sessions[waiter.session].parked[waiter.ticket]
        self._dirty.add("put")  # the next in line may go

    def _hold(self, lease: Held) -> None:
        for leases in self._kept_in(lease):
            leases[lease.token] = lease
        self._lease_ends.add(lease.token)

    def _release(self, lease: Held, count: int) -> None:
        """Rows are no longer leased; without any a lease is over."""
        lease.left -= count
        if lease.over:
            self._drop(lease)

    def _drop(self, lease: Held) -> None:
        if lease.token not in self.leases:
            return
        for leases in self._kept_in(lease):
            del leases[lease.token]
        if lease.crew is not None:
            self._forget_team(lease.task, lease.crew.team)

    def _kept_in(self, lease: Held) -> list[dict[int, Held]]:
        task = self.tasks[lease.task]
        places = [self.leases, task.leases]
        places += [self.sessions[number].leases for number in lease.sessions if number in self.sessions]
        return places if lease.crew is None else [*places, task.teams.setdefault(lease.crew.team, Team()).leases]

    def _count_waiting(self, task: Task, ids: Ids) -> None:
        """Rows of a task got the columns they lacked, or ended without."""
        if not task.spec.grouped:
            for partition, part in self._by_partition(ids):
                task.waiting[partition] -= len(part)

    def _count_fit(self, task: Task, ids: Ids, sign: int) -> None:
        """Rows became ready (1), or are so no longer (-1)."""
        if not task.spec.grouped:
            for partition, part in self._by_partition(ids):
                task.fit[partition] += sign * len(part)

    def _measure(self, ids: Ids, measures: dict[str, bytes], pick: Any) -> None:
        """Rows got columns that samplers measure. ``pick``: which of the measures are theirs."""
        for column, values in measures.items():
            if column in self.rows.measures:
                self.rows.measures[column][self.rows.at(ids)] = np.frombuffer(values, "<f8")[pick]

    def _charge(self, ids: Ids, nbytes: int) -> None:
        """Rows got payload of ``nbytes`` in all."""
        if not nbytes or not len(ids):
            return
        at = self.rows.at(ids)
        share = -(-nbytes // len(ids))
        self.rows.nbytes[at] += share
        before = self.rows.charged[at]
        after = np.maximum(self.rows.nbytes[at], before)
        self.rows.charged[at] = after
        self.charged += int(after.sum()) - int(before.sum())

    def _reserve(self) -> int:
        """Bytes that a new row may come to take."""
        return self.row_bytes or self.largest_row

    def _judge_puts(self) -> None:
        """Every put that waits is looked at again, also behind one that goes on waiting."""
        self._dirty.add("put")
        self._judging = True

    def _wake_all(self) -> None:
        self._dirty.update(self.waiters)
        self._all_woken = True


def _team(command: cmd.Command) -> tuple[str, str] | None:
    """Task and name of the team that asks."""
    if not isinstance(command, cmd.Lease) or command.world_size == 1:
        return None
    return command.task, command.team
