"""Tasks and their leases: rows pass by the transitions of ``Task``; each does all the bookkeeping of its change."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import LeaseLost, SchemaError
from ...types.tasks import TaskSpec
from ..commands import Ids, SamplerTraits
from .context import Context
from .rows import NONE, Partitions, Rows
from .sessions import Grant, Session, Sessions, ShardedLease, Timers, discard

WAITING, READY, SELECTED, LEASED, DONE, APART = range(6)  # of a row in a task; APART: it never sees the row
TASK_STATES = ("waiting", "ready", "selected", "leased", "done")
ANY = 2**31 - 1
PARTS = 4  # units lost together are leased in this many parts next
NO_ROWS: Ids = np.empty(0, np.int64)
CHUNK = 512  # rows of a chunk; a take reads at most one chunk too many
MAX_VOIDED = 100
"""Number of ended leases with a known reason."""

_FIELDS: dict[str, tuple[Any, int]] = {
    "state": (np.uint8, WAITING),
    "token": (np.int64, NONE),  # of the lease that holds the row
    "attempts": (np.int32, 0),  # leases lost
    "together": (np.int32, ANY),  # most units (rows, or whole groups) that one worker may hold with it
    "arrivals": (np.int32, 0),  # of a group's first row: its rows that were ready once, with whole groups
}


class Task:
    """A task. ``place``: the place of requests for its rows. ``makes_steps``: True for the task with ``batch_rows``.
    ``grouped``: see the spec. ``whole_groups``: True if its rows become ready and are leased in whole groups.
    ``need``: bits of the needed columns. ``by_partition``: for each partition, the number of its live rows in each
    state; ``queues``: its ready rows; ``redo``: its admitted rows with a lost producer. ``became_ready``,
    ``completed``, ``leases_granted``: counts over all time. ``suspects``: rows whose process died or hung, until
    their next lease has ended well. ``leases``, ``group_leases``: leases by token, oldest first, and by rank group.
    ``next_partition``: the partition where a lease without one looks first."""

    def __init__(
        self, context: Context, rows: Rows, partitions: Partitions, spec: TaskSpec, need: Any, sampling: SamplerTraits
    ) -> None:
        self._context, self._rows, self._partitions = context, rows, partitions
        self.spec, self.need, self.sampling = spec, need, sampling
        self.place = f"task {spec.name}"
        self.makes_steps = spec.batch_rows is not None
        self.grouped = spec.grouped
        self.whole_groups = spec.grouped or sampling.whole_groups
        self._unleased = SELECTED if self.makes_steps else READY  # the state of rows before their lease
        self._arrays = rows.arrays(self.place, _FIELDS)
        self._shared = rows.arrays("tasks")
        self.by_partition: dict[int, list[int]] = {}
        self.queues: dict[int, ReadyQueue] = {}
        self.redo: dict[int, deque[Ids]] = {}
        self.next_partition = 0
        self.leases_granted = 0
        self.became_ready = 0
        self.completed = 0
        self.leases: dict[int, Grant] = {}
        self.group_leases: dict[str, dict[int, Grant]] = {}
        self.suspects = NO_ROWS

    @property
    def state(self) -> npt.NDArray[np.uint8]:
        """The state of each row."""
        return self._arrays["state"]

    @property
    def token(self) -> Ids:
        """The lease of each row."""
        return self._arrays["token"]

    @property
    def counts(self) -> list[int]:
        """Live rows by state."""
        return [sum(counts) for counts in zip(*self.by_partition.values(), strict=True)] or [0] * len(TASK_STATES)

    def left(self, partition: int | None = None) -> int:
        """Return the number of live rows not completed, of one partition or of all."""
        parts = self.by_partition.values() if partition is None else [self.by_partition.get(partition, [])]
        return sum(sum(counts[:DONE]) for counts in parts)

    @property
    def fit(self) -> dict[int, int]:
        """Ready rows by partition, if leased singly."""
        return {} if self.grouped else {number: counts[READY] for number, counts in self.by_partition.items()}

    # ---- transitions

    def enter(self, partition: int, count: int) -> None:
        """Let ``count`` rows of a partition wait for their columns."""
        self.by_partition.setdefault(partition, [0] * len(TASK_STATES))[WAITING] += count

    def ignore(self, at: Any) -> None:
        """Never see rows, by array index or slice."""
        self._arrays["state"][at] = APART

    def ready(self, ids: Ids) -> Ids:
        """Make rows ready; with whole groups, the groups now complete. Return them: a step selects from its own."""
        rows = self._rows
        if self.whole_groups:
            ids = self._arrive(ids)
            ids = ids[rows.having(self.state, WAITING, ids)]  # some were skipped or have ended
            if not ids.size:
                return ids
        self.became_ready += ids.size
        for partition, part in self._move(ids, WAITING, READY):
            if not self.makes_steps:
                self.queue(partition).push(part)
        if not self.makes_steps:
            self._context.wake(self.place)
        return ids

    def grant(self, ids: Ids, token: int) -> None:
        """Lease ready rows, or selected ones of a step."""
        self._move(ids, self._unleased, LEASED, token)

    def give_back(self, ids: Ids, *, blame: bool = False) -> None:
        """Take rows from their lease: they are ready or, in a step, selected as before."""
        self._move(ids, LEASED, self._unleased)
        self._arrays["attempts"][self._rows.at(ids)] += blame

    def done(self, ids: Ids) -> None:
        """Complete leased rows."""
        self._shared["todo"][self._rows.spot(ids)] -= 1
        self.completed += ids.size
        for partition, _ in self._move(ids, LEASED, DONE):
            self._check_last(self.by_partition[partition])
        if self.suspects.size:
            self.suspects = self.suspects[self._in_hand(self.suspects)]
            self._context.wake(self.place)

    def skip(self, ids: Ids) -> tuple[Ids, Ids]:
        """Make rows done without a completion: steps take them as they are. Return like ``leave``."""
        ids = ids[self._arrays["state"][self._rows.at(ids)] < DONE]
        waited, tokens = self.leave(ids)
        at = self._rows.at(ids)
        self._arrays["state"][at], self._arrays["token"][at] = DONE, NONE
        self._shared["todo"][at] -= 1
        for partition, part in self._partitions.split(ids):
            self.by_partition[partition][DONE] += part.size
        return waited, tokens

    def select(self, ids: Ids) -> None:
        """Select ready rows for a step."""
        self._move(ids, READY, SELECTED)

    def unselect(self, ids: Ids) -> None:
        """Make selected rows ready again."""
        self._move(ids, SELECTED, READY)

    def again(self, ids: Ids) -> None:
        """Let a step have completed rows again."""
        self._shared["todo"][self._rows.at(ids)] += 1
        self._move(ids, DONE, SELECTED)

    def leave(self, ids: Ids) -> tuple[Ids, Ids]:
        """Forget ending rows. Return the ones without their columns, and the leases of all; NONE: none."""
        for partition, part in self._partitions.split(ids):
            counts = self.by_partition.get(partition, [])  # APART: of a partition that it does not take
            left = np.bincount(self.state[self._rows.at(part)], minlength=APART).tolist()
            for state in range(len(counts)):
                counts[state] -= left[state]
            if any(left[:DONE]):
                self._check_last(counts)
        at = self._rows.at(ids)
        states = self.state[at]
        return ids[states == WAITING], np.where(states == LEASED, self.token[at], NONE)

    def forget(self, partition: int, count: int) -> None:
        """Forget completed, ending rows of a partition."""
        self.by_partition[partition][DONE] -= count

    def _move(self, ids: Ids, before: int, after: int, token: int = NONE) -> list[tuple[int, Ids]]:
        spot = self._rows.spot(ids)
        self._arrays["state"][spot], self._arrays["token"][spot] = after, token
        split = self._partitions.split(ids)
        for partition, part in split:
            counts, count = self.by_partition[partition], part.size
            counts[before] -= count
            counts[after] += count
        return split

    def _check_last(self, counts: list[int]) -> None:
        """Retry requests waiting for the end of a partition's rows, after the last one."""
        if not any(counts[:DONE]):
            self._context.wake(self.place, *(["swap", "version"] if self._partitions.pins or self.closed else []))

    def _arrive(self, ids: Ids) -> Ids:
        """Note ready rows. Return the rows of groups now complete."""
        rows, arrivals = self._rows, self._arrays["arrivals"]
        firsts = rows.at(rows.first[rows.at(ids)])
        np.add.at(arrivals, firsts, 1)
        whole = firsts[arrivals[firsts] == rows.size[firsts]]
        return rows.members(np.unique(whole) + rows.base) if whole.size else whole

    def take(self, live: Ids) -> None:
        """Let live rows enter, as a new task. With whole groups, ended rows count as arrived."""
        rows = self._rows
        self._shared["todo"][rows.at(live)] += 1
        for partition, part in self._partitions.split(live):
            self.enter(partition, part.size)
        if self.sampling.whole_groups and live.size:
            firsts, there = np.unique(rows.first[rows.at(live)], return_counts=True)
            self._arrays["arrivals"][rows.at(firsts)] = rows.size[rows.at(firsts)] - there

    def takes(self, partition: int) -> bool:
        """True if it takes the partition with this number."""
        return self.spec.takes(self._partitions.names[partition])

    def queue(self, partition: int) -> ReadyQueue:
        """Return the ready rows of one partition."""
        if partition not in self.queues:
            self.queues[partition] = ReadyQueue(self._rows, self)
        return self.queues[partition]

    def next_partitions(self, named: str | None) -> list[int]:
        """Return partitions with a queue of ready rows, in turn."""
        if named is not None:
            return [number for number in [self._partitions.number(named)] if number in self.queues]
        if len(self.queues) == 1:
            return list(self.queues)
        return sorted(self.queues, key=lambda number: (number < self.next_partition, number))

    def turn_from(self, partition: int) -> None:
        """Look in the partition after this one first, next time."""
        self.next_partition = partition + 1

    @property
    def closed(self) -> bool:
        """True if no more rows can be put for it."""
        ended = self._partitions.ended_names
        return self._partitions.ended or bool(ended and ended.issuperset(self.spec.partitions))

    def exhausted(self, partition: str | None = None) -> bool:
        """True if it gets no further row, of one partition or of any."""
        if partition is None:
            return self.closed and not self.left()
        return self._partitions.closed(partition) and not self.left(self._partitions.number(partition))

    def return_to_queue(self, ids: Ids) -> None:
        """Put returned rows before the other ready rows. With whole groups, include rows of the same groups returned
        earlier; their older entries are skipped."""
        for partition, part in self._partitions.split(ids):
            ready = self.queue(partition)
            if self.whole_groups:
                part = self._rows.members(part)
                part = part[ready.is_ready(part)]
            ready.push(part, front=True)

    def hold(self, grant: Grant) -> None:
        """Add a lease."""
        self.leases[grant.token] = grant
        if grant.shards is not None:
            self.group_leases.setdefault(grant.shards.group, {})[grant.token] = grant
        self.leases_granted += 1
        if self.suspects.size:  # others need not wait for these any more
            self._context.wake(self.place)

    def drop(self, grant: Grant) -> None:
        """Remove a lease."""
        del self.leases[grant.token]
        if grant.shards is not None:
            discard(self.group_leases, grant.shards.group, grant.token)

    def units(self, ids: Ids) -> Ids:
        """Return the unit of blame of each row: the row, or its group in tasks with whole groups."""
        return self._rows.first[self._rows.at(ids)] if self.whole_groups else ids

    def held(self, session: Session | None) -> int:
        """Return the number of units held by a session."""
        leases = session.leases if session is not None else {}
        mine = [each.ids for each in leases.values() if each.task == self.spec.name]
        ids = np.concatenate([NO_ROWS, *mine])
        ids = ids[self._rows.having(self.state, LEASED, ids)]
        ids = ids[np.isin(self.token[self._rows.at(ids)], list(leases))]
        return len(np.unique(self.units(ids)))

    def narrow(self, ids: Ids, lost: int, *, died: bool) -> None:
        """Lease rows with fewer others, after they lost a lease among ``lost`` units. One loss is no sign against a
        prompt. ``died``: they are suspects, since their process died or hung."""
        together = self._arrays["together"]
        ids = ids[self._arrays["attempts"][self._rows.at(ids)] > self.spec.admits]
        at = self._rows.at(ids)
        together[at] = np.maximum(np.minimum(together[at], lost) // PARTS, 1)
        self.suspects = np.union1d(self.suspects, ids) if died else self.suspects

    def spent(self, ids: Ids, most: int) -> Ids:
        """Return the rows with ``most`` lost leases."""
        spent: Ids = ids[self._arrays["attempts"][self._rows.at(ids)] >= most]
        return spent

    def must_wait(self, session: Session) -> bool:
        """True if a session holds as much as may be lost with its suspects, or with the ready ones."""
        if not self.suspects.size:
            return False
        at = self._rows.at(self.suspects[self._in_hand(self.suspects)])
        its = at[np.isin(self.token[at], [NONE, *session.leases])]
        return bool(self.held(session) >= self._arrays["together"][its].min(initial=ANY))

    def together(self, ids: Ids, at_least: int) -> int:
        """Return the number of first rows to lease together: the units allowed by each of them, or ``at_least``."""
        units, limits = self.units(ids), self._arrays["together"][self._rows.at(ids)]
        unit = np.cumsum(np.diff(units, prepend=units[:1]) != 0)
        unit[unit <= unit[max(at_least, 1) - 1]] = 0
        return int(np.searchsorted(unit, unit[unit >= np.minimum.accumulate(limits)].min(initial=ANY)))

    def _in_hand(self, ids: Ids) -> npt.NDArray[np.bool_]:
        return self._rows.having(self.state, READY, ids) | self._rows.having(self.state, LEASED, ids)


class Tasks:
    """Tasks by name, in order of declaration."""

    def __init__(self, context: Context, rows: Rows, partitions: Partitions) -> None:
        self._context, self._rows, self._partitions = context, rows, partitions
        self._arrays = rows.arrays("tasks")
        self.by_name: dict[str, Task] = {}
        self._takers: dict[str, list[Task]] = {}

    def __iter__(self) -> Iterator[Task]:
        return iter(self.by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def __getitem__(self, name: str) -> Task:
        """Return a task. Raises SchemaError for an unknown name."""
        if name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or "none yet"
            raise SchemaError(f"no task {name!r}; declared: {known}")
        return self.by_name[name]

    def add(self, spec: TaskSpec, need: np.uint64, sampling: SamplerTraits) -> Task:
        """Add a task. It ignores live rows of partitions it does not take."""
        task = self.by_name[spec.name] = Task(self._context, self._rows, self._partitions, spec, need, sampling)
        self._takers = {}
        for partition, part in self._partitions.split(self._rows.live_ids()):
            if not task.takes(partition):
                task.ignore(self._rows.at(part))
        return task

    def takers(self, partition: str) -> list[Task]:
        """Return the tasks of a partition, the step task last: rows that it ends must not become ready in others."""
        takers = self._takers.get(partition)
        if takers is None:
            takers = sorted((task for task in self if task.spec.takes(partition)), key=attrgetter("makes_steps"))
            if partition in self._partitions.numbers:
                self._takers[partition] = takers
        return takers

    def enter(self, new: slice, count: int, partition: int, takers: list[Task]) -> None:
        """Let ``count`` new rows of a partition wait in its tasks."""
        self._arrays["todo"][new] = len(takers)
        for task in takers:
            task.enter(partition, count)
        if len(takers) < len(self.by_name):
            for task in self:
                if task not in takers:
                    task.ignore(new)

    @property
    def admitting(self) -> Task | None:
        """The task with groups admitted by the staleness rule (rollout)."""
        return next((task for task in self if task.spec.admits), None)

    def wake_replicas(self) -> None:
        """Retry the requests of replicas: the staleness rule may now admit rows."""
        if (task := self.admitting) is not None:
            self._context.wake(task.place)

    def wake_replica(self, session: int) -> None:
        """Retry the requests of one replica: it alone may now get prompts."""
        for task in self:
            if task.spec.admits or self._partitions.pins:
                self._context.wake_session(task.place, session)


class ReadyQueue:
    """Ready rows of a task: highest priority first, then in order of arrival. They are kept in chunks of ids; a
    taken chunk is split, never scanned row by row. Rows no longer ready stay in it and are skipped at their turn."""

    def __init__(self, rows: Rows, task: Task) -> None:
        self._rows = rows
        self._task = task
        self._queues: dict[int, deque[Ids]] = {}
        self._order: list[int] = []  # negated priorities, ascending

    def __bool__(self) -> bool:
        """True if there are rows, maybe only ones no longer ready."""
        return bool(self._order)

    def push(self, ids: Ids, *, front: bool = False) -> None:
        """Append ready rows; ``front``: put them before all others of their priority."""
        for priority, part in self._ranked(ids):
            if priority not in self._queues:
                self._queues[priority] = deque()
                insort(self._order, -priority)
            chunks = [part] if part.size <= CHUNK else self._split(part)
            if front:
                self._queues[priority].extendleft(reversed(chunks))
            else:
                self._queues[priority].extend(chunks)

    def is_ready(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return a mask of rows still ready."""
        return self._rows.having(self._task.state, READY, ids)

    def take(self, count: int, room: int | None = None) -> Ids:
        """Remove and return up to ``count`` rows. ``room``: whole groups instead, at least one, up to this."""
        limit = count if room is None else min(count, room)
        parts: list[Ids] = []
        taken = 0
        while taken < limit and (queue := self._first(limit - taken if room is None else 0)) is not None:
            chunk = queue[0]
            cut = min(chunk.size, limit - taken)
            if room is not None:
                ends = np.append(self._ends(chunk), chunk.size)
                fits = ends[ends <= cut]
                if fits.size:
                    cut = int(fits[-1])
                elif not taken and ends[0] <= room:
                    cut = int(ends[0])
                else:
                    break
            queue.popleft()
            if cut < chunk.size:
                queue.appendleft(chunk[cut:])
            parts.append(chunk[:cut])
            taken += cut
        if len(parts) < 2:
            return parts[0] if parts else NO_ROWS
        ids = np.concatenate(parts)
        if room is None:
            return ids
        _, where = np.unique(ids, return_index=True)  # a group returned in pieces was pushed with each piece
        return ids if where.size == ids.size else ids[np.sort(where)]

    def peek_group(self) -> Ids:
        """Return the rows of the first group, and drop rows before it; empty if nothing is ready."""
        queue = self._first()
        return NO_ROWS if queue is None else queue[0][self._firsts(queue[0]) == self._firsts(queue[0][:1])]

    def _ranked(self, ids: Ids) -> list[tuple[int, Ids]]:
        if not self._rows.ranked or not ids.size:
            return [(0, ids)]
        priorities = self._rows.priority[self._rows.at(ids)]
        return [(int(p), ids[priorities == p]) for p in np.unique(priorities)]

    def _firsts(self, ids: Ids) -> Ids:
        return self._rows.first[self._rows.at(ids)]

    def _ends(self, ids: Ids) -> Ids:
        firsts = self._firsts(ids)
        return np.flatnonzero(firsts[1:] != firsts[:-1]) + 1

    def _split(self, ids: Ids) -> list[Ids]:
        ends = self._ends(ids)
        after = np.searchsorted(ends, np.arange(CHUNK, ids.size, CHUNK))
        return np.split(ids, np.unique(ends[after[after < len(ends)]]))

    def _first(self, wanted: int = 0) -> deque[Ids] | None:
        """Return the queue to take from next; its first chunk has only ready rows. ``wanted``: number of rows for
        which small chunks are joined, and so checked together."""
        while self._order:
            queue = self._queues[-self._order[0]]
            while queue:
                chunk = queue.popleft()
                if chunk.size < wanted and queue:
                    chunks, rows = [chunk], chunk.size
                    while rows < wanted and queue:
                        chunks.append(queue.popleft())
                        rows += chunks[-1].size
                    chunk = np.concatenate(chunks)
                ready = self.is_ready(chunk).nonzero()[0]
                if ready.size < chunk.size:
                    chunk = chunk[ready]
                if chunk.size:
                    queue.appendleft(chunk)
                    return queue
            del self._queues[-self._order.pop(0)]
        return None


class Leases:
    """Rows held by sessions, and their time limits. ``by_token``: all leases, oldest first. ``voided``: the newest
    leases of steps in parts that ended before their acknowledgement, with the reason, by token.
    Example with ``lease_s`` 60: rows 0-3 are leased at 10 s under token 1, until 70 s. Rows 0-2 are completed.
    ``renew`` at 50 s: until 110 s. Then row 3 is ready again: token 1 raises LeaseLost, token 2 has it."""

    def __init__(self, context: Context, rows: Rows, sessions: Sessions, tasks: Tasks) -> None:
        self._context, self._rows, self._sessions, self._tasks = context, rows, sessions, tasks
        self.by_token: dict[int, Grant] = {}
        self.deadlines = Timers(self.by_token)
        self.voided: dict[int, str] = {}
        self._next = 1

    def add(
        self, holder: Session, task: Task, ids: Ids, step: int, newest: int, offsets: int, shards: ShardedLease | None
    ) -> Grant:
        """Lease rows to a session, or to the sessions of ``shards``."""
        token, self._next, now, name = self._next, self._next + 1, self._context.now, task.spec.name
        expires = now + task.spec.lease_s
        grant = Grant(token, name, holder.id, ids, now, expires, ids.size, step, shards, offsets, newest)
        for leases in [self.by_token, *(self._sessions.by_id[number].leases for number in grant.sessions)]:
            leases[token] = grant
        self.deadlines.add(token)
        task.hold(grant)
        task.grant(ids, token)
        return grant

    def held(self, session: Session, token: int, rank: int) -> Grant:
        """Return the lease named by a session. Raises LeaseLost."""
        grant = self.by_token.get(token)
        if grant is None or grant.session_of(rank) != session.id:
            why = self.voided.get(token, "completed, expired, returned, or its rows ended")
            raise LeaseLost(f"lease {token} is not held by {session.name}: {why}")
        return grant

    def renew(self, grant: Grant) -> None:
        """Restart the time limit of a lease."""
        grant.renew(self._context.now + self._tasks[grant.task].spec.lease_s)
        self.deadlines.add(grant.token)

    def having(self, grant: Grant, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return a mask of rows still held by the lease."""
        return self._rows.having(self._tasks[grant.task].token, grant.token, ids)

    def outstanding(self, grant: Grant) -> Ids:
        """Return the rows still held by the lease."""
        return grant.ids[self.having(grant, grant.ids)]

    def of_step(self, first: int) -> list[Grant]:
        """Return leases of a step and of later ones."""
        return [grant for grant in self.by_token.values() if grant.step >= first]

    def release(self, grant: Grant, count: int) -> None:
        """Count ``count`` rows as no longer leased. The last one ends the lease."""
        if grant.release(count):
            self.remove(grant)

    def remove(self, grant: Grant) -> None:
        """End a lease, if it has not ended."""
        if self.by_token.pop(grant.token, None) is None:
            return
        self._tasks[grant.task].drop(grant)
        for number in grant.sessions:
            if number in self._sessions.by_id:
                del self._sessions.by_id[number].leases[grant.token]

    def note_void(self, token: int, reason: str) -> None:
        """Keep the reason why a lease ended."""
        self.voided[token] = reason
        if len(self.voided) > MAX_VOIDED:
            del self.voided[next(iter(self.voided))]

    def lose_rows(self, ids: Ids, tokens: Ids) -> list[tuple[Grant, Ids]]:
        """Remove ended rows from ``tokens``; notify holders. Return leases of steps in parts and their rows."""
        broken = []
        for token in np.unique(tokens[tokens != NONE]).tolist():
            grant, lost = self.by_token[token], ids[tokens == token]
            for number in grant.sessions:
                session = self._sessions.by_id.get(number)
                if session is not None and session.lose(lost):
                    self._context.wake("lost")
            self.release(grant, lost.size)
            if grant.parts != NONE:
                broken.append((grant, lost))
        return broken


def positions(index: bytes | None, count: int) -> Ids:
    """Return positions named by a client (int32; None: all ``count``). Raises SchemaError."""
    if index is None:
        return np.arange(count)
    if len(index) % 4:
        raise SchemaError("positions are packed int32")
    at = np.frombuffer(index, "<i4")
    if at.size and (at.min() < 0 or at.max() >= count or len(np.unique(at)) != at.size):
        raise SchemaError(f"positions must lie in 0..{count - 1}, each once")
    return at.astype(np.int64)
