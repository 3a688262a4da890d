"""How things come in: sessions, limits, tasks, rows, and the end of rows."""

from __future__ import annotations

import numpy as np

from ..errors import ConfigError, Ended, SchemaError
from ..types import events as ev
from . import commands as cmd
from .commands import TaskSpec, pack_ids, unpack_ids
from .declarations import check_declaration
from .records import Preparation, Rule, Session, Steps, Task
from .remembering import DIGEST
from .rows import APART, LIVE, WAITING
from .state import CANCELLED, MAX_NUMBER
from .teaming import Teaming
from .window import Window

LIMITS = {
    "capacity_rows": 1, "max_staleness": 0, "steps": 1, "capacity_bytes": 1, "row_bytes": 0, "keep_versions": 1,
    "max_swapping": 0, "quorum": 0,
}  # fmt: skip
"""What ``Configure`` sets, and the least each can be."""


class Intake(Teaming):
    """Takes sessions, settings, tasks and rows."""

    def _join(self, command: cmd.Join) -> cmd.Reply:
        session = Session(self._next_session, command.name, since=self._now)
        self._next_session += 1
        self.sessions[session.id] = session
        return cmd.Joined(session=session.id)

    def _leave(self, session: Session, command: cmd.Leave) -> cmd.Reply:
        self._drop_session(session.id, f"{session.name} left", blame=False)
        return cmd.Done()

    def _dismiss(self, session: Session, command: cmd.Dismiss) -> cmd.Reply:
        if command.session:
            named = [self.sessions[command.session]] if command.session in self.sessions else []
        else:
            named = (
                [each for each in self.sessions.values() if each.name == command.name] if command.name else [session]
            )
        for member in named:
            if command.ended and member is not session:
                self._drop_session(member.id, command.ended, blame=True)
            member.dismissed = True
        self._wake_all()  # what they wait for
        return cmd.Dismissed(count=len(named))

    def _prepare(self, session: Session, command: cmd.Prepare) -> cmd.Reply:
        if command.what:
            self.preparing[session.id] = Preparation(command.task, command.what, self._now)
        else:
            self.preparing.pop(session.id, None)
        return cmd.Done()

    def _drop_session(self, session: int, reason: str, blame: bool) -> None:
        member = self.sessions.get(session)
        if member is None:
            return
        for ticket in list(member.parked):
            self._unpark(self.parked[ticket])
        self._lost(member, reason, blame)
        self.preparing.pop(session, None)
        del self.sessions[session]

    def _configure(self, session: Session, command: cmd.Configure) -> cmd.Reply:
        for name in LIMITS:
            value = getattr(command, name)
            if value is not None and not LIMITS[name] <= value <= MAX_NUMBER:
                raise ConfigError(f"{name} cannot be {value}; it is {LIMITS[name]} or more")
        rule = (command.max_staleness, command.staleness, command.steps, command.checkpoints)
        if any(said is not None for said in rule) and self.steps is not None:
            raise ConfigError(
                "max_staleness, its policy, steps and checkpoints are set before the task with batch_rows is declared"
            )
        if self.steps is not None and command.capacity_rows is not None:
            _check_capacity(self.steps.window.batch_rows, self.rule, command.capacity_rows)
        if command.staleness is not None:
            self._set_policy(command.staleness)
        for name in LIMITS:
            if (value := getattr(command, name)) is not None:
                setattr(self, "last_steps" if name == "steps" else name, value)
        if command.checkpoints is not None:
            self.checkpoints = command.checkpoints
        self._wake_all()
        return cmd.Done()

    def _declare(self, session: Session, command: cmd.Declare) -> cmd.Reply:
        spec = command.task
        known = self.tasks.get(spec.name)
        if known is not None:
            if known.spec != spec:
                raise ConfigError(f"task {spec.name!r} is already declared as {known.spec}, not {spec}")
            return cmd.Done()
        sampling = self.sampling_of(spec)
        rule = self.rule if spec.batch_rows is None else self._rule_for(spec.batch_rows)
        self._check_task(spec, rule)
        self._check_sampling(spec, sampling)
        bits = np.uint64(0)
        for column in spec.needs:
            bits |= self._bit(column)
        for column in spec.gives:
            self._bit(column)
        rows, name = self.rows, spec.name
        rows.add_task(name)
        for partition_name in spec.partitions:
            if partition_name != "*":
                self.partitions.setdefault(partition_name, len(self.partitions))
        live = rows.live_ids()
        taken = np.zeros(len(live), bool)
        for partition, part in self._by_partition(live):
            if "*" in spec.partitions or any(self.partitions.get(each) == partition for each in spec.partitions):
                taken |= np.isin(live, part)
        rows.task(name, "state")[rows.at(live[~taken])] = APART
        self.tasks[name] = task = Task(spec, bits, sampling)
        if sampling.measure and sampling.measure not in rows.measures:
            rows.add_measure(sampling.measure)
            if command.measures:
                self._measure(self.having(sampling.measure), {sampling.measure: command.measures}, slice(None))
        if spec.batch_rows is not None:
            self.rule = rule
            self._say_rule(rule)
            self.unselected = int(taken.sum())
            self.steps = Steps(task, Window(spec.batch_rows, self.max_staleness, self.last_steps))
            self._dirty.update(f"task {t}" for t in self.tasks)
            self._dirty.add("wanted")
        self._judge_puts()  # one that waits may have become impossible
        live = live[taken]
        if self.checkpoints:  # what only a checkpoint was missing to, this task has still to do
            at = rows.at(live)
            self.held -= int(np.count_nonzero((rows.todo[at] == 0) & (rows.step[at] >= self.covered)))
        rows.todo[rows.at(live)] += 1
        for partition, part in self._by_partition(live):
            task.undone[partition] = len(part)
            task.waiting[partition] = len(part) * (not spec.grouped)
        task.counts[WAITING] = len(live)
        if sampling.whole_groups and len(live):
            rows.excuse(name, live)
        self._make_ready(live, np.zeros(len(live), np.uint64), only=task)
        if spec.admits and self.steps is not None:
            state = rows.task(self.steps.task.spec.name, "state")[rows.at(live)]
            self._skip(task, live[(state != WAITING) & (state != APART)])
        return cmd.Done()

    def _say_rule(self, rule: Rule) -> None:
        text = f"staleness policy {rule.spec.name!r} with max_staleness {self.max_staleness}: {rule.promise}"
        level = "info" if rule.bounded else "warning"
        self._effects.events.append(ev.Note(time_s=self._now, text=text, level=level))

    def _check_task(self, spec: TaskSpec, rule: Rule) -> None:
        if not (spec.lease_s > 0 and spec.max_attempts > 0):
            raise ConfigError(f"task {spec.name!r}: lease_s and max_attempts must be above 0")
        check_declaration(spec, (task.spec for task in self.tasks.values()))
        if spec.admits:
            other = next((name for name, task in self.tasks.items() if task.spec.admits), None)
            if other is not None or spec.batch_rows is not None:
                raise ConfigError(
                    f"task {spec.name!r} cannot admit: a queue has one such task"
                    + (" besides the one that makes the steps" if other is None else f", and {other!r} is it")
                )
        if spec.batch_rows is not None:
            self._check_step_task(spec, rule)
            if self.checkpoints and spec.gives:
                raise ConfigError(
                    f"task {spec.name!r} gives columns, and with checkpoints a step may be trained again, but a column is"
                    " written once: let another task give them"
                )
        self._check_places((*spec.needs, *spec.gives))

    def _check_step_task(self, spec: TaskSpec, rule: Rule) -> None:
        if self.steps is not None:
            raise ConfigError(
                f"task {self.steps.task.spec.name!r} already makes the steps; a queue has one such task"
            )
        assert spec.batch_rows is not None
        _check_capacity(spec.batch_rows, rule, self.capacity_rows)
        taken = [number for name, number in self.partitions.items() if spec.takes(name)]
        at = self.rows.at(self.rows.live_ids())
        sizes = set(self.rows.size[at][np.isin(self.rows.partition[at], taken)].tolist())
        sizes |= {size for name, size in self.group_sizes.items() if spec.takes(name)}
        if len(sizes) > 1:
            raise ConfigError(
                f"rows are in groups of {' and '.join(map(str, sorted(sizes)))}; steps need groups of one size"
            )
        for size in sizes:
            _check_groups_fill(spec.batch_rows, size)

    def _put(self, session: Session, command: cmd.Put) -> cmd.Reply | None:
        if command.digest and len(command.digest) != DIGEST * len(command.columns):
            raise SchemaError(f"the digest of {len(command.columns)} columns is not {len(command.digest)} bytes")
        lacking = self._keys.lacking(command)
        if lacking is not None and not len(lacking):
            known = self._keys.get(command.key)
            assert known is not None
            return cmd.PutDone(first=known.first, count=known.size, again=True)
        if self.ended or command.partition in self.ended_partitions:
            raise Ended(
                "the stream has ended; nothing more can be put"
                if self.ended
                else f"partition {command.partition!r} has ended; nothing more can be put there"
            )
        if command.partition == "*":
            raise SchemaError('"*" is no partition: a task names it to take them all; put rows in one')
        groups = np.arange(command.groups) if lacking is None else lacking
        count = len(groups) * command.group_size
        if command.groups < 1 or command.group_size < 1:
            raise SchemaError(f"a put needs rows; this one has {command.groups} groups of {command.group_size}")
        if count > self.capacity_rows:
            raise SchemaError(
                f"{count} rows in one put are more than the whole queue holds (capacity_rows="
                f"{self.capacity_rows}); put fewer at a time"
            )
        if max(count * self.row_bytes, command.nbytes) > self.capacity_bytes:
            raise SchemaError(
                f"{count} rows of {max(count * self.row_bytes, command.nbytes)} bytes are more than the whole queue"
                f" holds (capacity_bytes={self.capacity_bytes}); put fewer at a time"
            )
        takers = [task for task in self.tasks.values() if task.spec.takes(command.partition)]
        trained = self.steps is not None and self.steps.task in takers
        if trained:
            assert self.steps is not None
            _check_groups_fill(self.steps.window.batch_rows, command.group_size)
        alike = [name for name in self.group_sizes if name == command.partition]
        if trained:
            assert self.steps is not None
            alike = [name for name in self.group_sizes if self.steps.task.spec.takes(name)]
        other = next((size for name in alike if (size := self.group_sizes[name]) != command.group_size), None)
        if other is not None and any(task.spec.grouped for task in takers):
            raise ConfigError(
                f"this run has groups of {other}; groups of {command.group_size} would leave steps that cannot fill"
            )
        if not command.columns:
            raise SchemaError("a put needs at least one column")
        if abs(command.priority) >= 1 << 31:
            raise SchemaError(f"a priority is an int32, not {command.priority}")
        self._check_columns(command.columns)
        if self.put_total - self.rows.over - self.held + count > self.capacity_rows or self._must_queue(
            command, trained
        ):
            return None
        if self.charged + max(count * self._reserve(), command.nbytes) > self.capacity_bytes:
            lacks_rows = trained and self.steps is not None and self.unselected < self.steps.window.free
            if self.charged and not lacks_rows:  # else nothing would ever free the bytes this waits for
                return None
        bits = self._bits(command.columns)
        self.group_sizes[command.partition] = command.group_size
        partition = self.partitions.setdefault(command.partition, len(self.partitions))
        rows = self.rows
        ids = rows.add(len(groups), command.group_size)
        new = slice(rows.count - count, rows.count)
        rows.columns[new] = bits
        rows.current[new] = self.version
        rows.todo[new] = len(takers)
        rows.partition[new] = partition
        rows.nbytes[new] = share = -(-command.nbytes // count)
        rows.charged[new] = charged = max(share, self._reserve())
        self.charged += count * charged
        if command.priority:
            rows.priority[new] = command.priority
            rows.ranked = True
        if command.measures:
            self._measure(ids, command.measures, np.repeat(groups, command.group_size))
        if command.lengths:
            self._note_lengths(ids, command.lengths, np.repeat(groups, command.group_size))
        self.put_total += count
        self.unselected += count * trained
        self._count_kind(partition, bits, count)
        for task in self.tasks.values():
            if task in takers:
                task.undone[partition] += count
                task.counts[WAITING] += count
                task.waiting[partition] += count * (not task.spec.grouped)
            else:
                rows.task(task.spec.name, "state")[new] = APART
        first = int(ids[0])
        reply = cmd.PutDone(
            first=first, count=count, again=False, groups=b"" if lacking is None else pack_ids(groups)
        )
        if lacking is not None:
            self._keys.add_again(command.key, first, groups)
        elif command.key:
            self._keys.add(command, first, rows)
        if command.key:
            self._judge_puts()  # one that waits with the same key need not
        self._make_ready_alike(takers, ids, bits, 0)
        return reply

    def _must_queue(self, command: cmd.Put, trained: bool) -> bool:
        """Whether parked puts go first: no large put is overtaken for ever. But where the open step lacks
        rows, any put that fits may bring them, or a put too large to fit beside that step would stop the run."""
        parked = self.waiters.get("put")
        if not parked or next(iter(parked.values())).command is command:
            return False
        return not trained or self._in_line()

    def _in_line(self) -> bool:
        """Whether no put may go before one that waits for room."""
        return self.steps is None or self.steps.window.finished or self.unselected >= self.steps.window.free

    def _cancel(self, session: Session, command: cmd.Cancel) -> cmd.Reply:
        if bool(command.ids) + bool(command.key) + (command.partition is not None) != 1:
            raise SchemaError("say what to cancel by one of: rows, the key of their put, their partition")
        if command.partition is not None:
            return cmd.Cancelled(count=self._cancel_live(command.partition, command.reason))
        if command.key:
            if self._keys.get(command.key) is None:
                raise SchemaError(f"no put with key {command.key!r} is remembered")
            ids = self._keys.rows_of(command.key)
        else:
            if len(command.ids) % 8:
                raise SchemaError("row ids are packed int64")
            ids = np.unique(unpack_ids(command.ids))
            unknown = ids[(ids < 0) | (ids >= self.rows.base + self.rows.count)]
            if len(unknown):
                raise SchemaError(f"row {unknown[0]} was never put; the newest is {self.put_total - 1}")
        ids = ids[ids >= self.rows.base]
        ids = ids[self.rows.state[self.rows.at(ids)] == LIVE]
        return cmd.Cancelled(count=self._end_groups(ids, CANCELLED, command.reason))

    def _end(self, session: Session, command: cmd.End) -> cmd.Reply:
        if command.partition == "*":
            raise SchemaError('"*" is no partition; end them one by one, or all with no name')
        if command.partition is None:
            self.ended = self.end_said = True
        else:
            self.ended_partitions.add(command.partition)
        if command.cancel:
            self._cancel_live(command.partition, "cancelled at the end")
        self._wake_all()
        return cmd.Done()


def _check_capacity(batch_rows: int, rule: Rule, capacity_rows: int) -> None:
    if not 1 <= batch_rows <= capacity_rows:
        raise ConfigError(f"a step of {batch_rows} rows cannot fill in a queue of capacity_rows={capacity_rows}")
    if rule.least_rows > capacity_rows:
        raise ConfigError(
            f"steps of {batch_rows} rows under staleness policy {rule.spec.name!r} may wait for ever in a queue of"
            f" capacity_rows={capacity_rows}: it needs {rule.least_rows}"
        )


def _check_groups_fill(batch_rows: int, group_size: int) -> None:
    if batch_rows % group_size:
        below, above = batch_rows // group_size * group_size, -(-batch_rows // group_size) * group_size
        raise ConfigError(
            f"no number of groups of {group_size} fills a batch of {batch_rows} rows; use a batch of"
            f" {' or '.join(str(n) for n in (below, above) if n)}, or another group size"
        )
