"""A naive ledger: says what the right answer to a command is, from what ``commands`` promises.

naive.judge(session, Put(...), reply)    # raises AssertionError if the reply is wrong; else it is so here too
naive.settle()                           # what follows by itself: rows join steps, rows end
"""

from __future__ import annotations

from typing import Any

from naive_leases import PARKED
from naive_meetings import NaiveMeetings
from naive_rows import Row

from asyncflow_sdk.errors import ConfigError, Ended, LeaseLost, PluginError, SchemaError
from asyncflow_sdk.ledger import commands as cmd


class Naive(NaiveMeetings):
    def judge(self, session: int, command: Any, outcome: Any) -> None:
        """Assert that ``outcome`` (a reply, an error or PARKED) is right now, and carry it out."""
        if isinstance(command, cmd.Join):
            assert isinstance(outcome, cmd.Joined), outcome
            assert outcome.session not in self.loaded
            self.loaded[outcome.session] = None
            self.names[outcome.session] = command.name
            return
        if session not in self.loaded:
            assert isinstance(outcome, LeaseLost), outcome
            return
        name = "cancel_rows" if isinstance(command, cmd.Cancel) else type(command).__name__.lower()
        getattr(self, f"_{name}")(session, command, outcome)

    def _configure(self, session: int, c: cmd.Configure, outcome: Any) -> None:
        errors: list[type[Exception]] = []
        train = self.train()
        if c.capacity_rows is not None and c.capacity_rows < (train.batch_rows or 1 if train else 1):
            errors.append(ConfigError)
        if c.capacity_bytes is not None and c.capacity_bytes < 1:
            errors.append(ConfigError)
        if (c.max_staleness is not None and c.max_staleness < 0) or (c.steps is not None and c.steps < 1):
            errors.append(ConfigError)
        if train is not None and (c.max_staleness, c.steps, c.staleness, c.checkpoints) != (None,) * 4:
            errors.append(ConfigError)
        if c.staleness is not None and c.staleness.name not in ("wait", "drop", "count"):
            errors.append(PluginError)
        if self._is_error(outcome, errors):
            return
        self._is(outcome, cmd.Done())
        self.capacity = self.capacity if c.capacity_rows is None else c.capacity_rows
        self.max_staleness = self.max_staleness if c.max_staleness is None else c.max_staleness
        self.steps = self.steps if c.steps is None else c.steps
        self.checkpoints = self.checkpoints if c.checkpoints is None else c.checkpoints
        self.policy = self.policy if c.staleness is None else c.staleness.name
        self.capacity_bytes = self.capacity_bytes if c.capacity_bytes is None else c.capacity_bytes
        self.row_bytes = self.row_bytes if c.row_bytes is None else c.row_bytes
        self.keep_versions = self.keep_versions if c.keep_versions is None else c.keep_versions
        self.max_swapping = self.max_swapping if c.max_swapping is None else c.max_swapping
        self.quorum = self.quorum if c.quorum is None else c.quorum
        self.committed = self.committed if self.quorum else -1
        self.decide()

    def _declare(self, session: int, c: cmd.Declare, outcome: Any) -> None:
        task, errors = c.task, []
        if task.name in self.tasks:
            if self._is_error(outcome, [ConfigError] if self.tasks[task.name] != task else []):
                return
            self._is(outcome, cmd.Done())
            return
        if len(self.named_columns | {*task.needs, *task.gives}) > 64:
            errors.append(SchemaError)
        if not task.lease_s > 0 or task.max_attempts < 1:
            errors.append(ConfigError)
        if task.admits and (self.rollouts() or task.batch_rows is not None):
            errors.append(ConfigError)
        if not task.partitions or not all(self.passes(partition, task) for partition in self.where_of(task)):
            errors.append(ConfigError)
        if task.batch_rows is not None and self.checkpoints and task.gives:
            errors.append(ConfigError)
        if task.batch_rows is not None:
            sizes = {len(row.group) for row in self.live().values() if task.takes(row.partition)}
            sizes |= {size for partition, size in self.last_group_size.items() if task.takes(partition)}
            if (
                self.train() is not None
                or not 1 <= task.batch_rows <= self.capacity
                or len(sizes) > 1
                or any(task.batch_rows % size for size in sizes)
            ):
                errors.append(ConfigError)
        if self._is_error(outcome, errors):
            return
        self._is(outcome, cmd.Done())
        self.tasks[task.name] = task
        self.named_columns |= {*task.needs, *task.gives}
        for row in self.rows.values():
            row.state[task.name] = "open" if task.takes(row.partition) else "apart"

    def _put(self, session: int, c: cmd.Put, outcome: Any) -> None:
        if c.key in self.keys:
            put, known = self.keys[c.key]
            same = all(
                getattr(put, name) == getattr(c, name) for name in ("groups", "group_size", "partition", "digest")
            )
            if self._is_error(outcome, [] if same and set(put.columns) == set(c.columns) else [SchemaError]):
                return
            self._is(outcome, cmd.PutDone(first=known.first, count=known.count, again=True))
            return
        count, train, errors = c.groups * c.group_size, self.train(), []
        if self.ended or c.partition in self.ended_partitions:
            errors.append(Ended)
        if max(count * self.row_bytes, c.nbytes) > self.capacity_bytes:
            errors.append(SchemaError)
        trains = train is not None and train.takes(c.partition)
        if c.groups < 1 or c.group_size < 1 or count > self.capacity or not c.columns:
            errors.append(SchemaError)
        if any(self.schema.get(name, spec) != spec for name, spec in c.columns.items()):
            errors.append(SchemaError)
        if len(self.named_columns | set(c.columns)) > 64 or abs(c.priority) >= 1 << 31:
            errors.append(SchemaError)
        if c.digest and len(c.digest) != 16 * len(c.columns):
            errors.append(SchemaError)
        if train is not None and trains and c.group_size > 0 and (train.batch_rows or 0) % c.group_size:
            errors.append(ConfigError)
        grouped = any((t.admits or t.batch_rows) and t.takes(c.partition) for t in self.tasks.values())
        if grouped and self.last_group_size.get(c.partition) not in (None, c.group_size):
            errors.append(ConfigError)
        if self._is_error(outcome, errors):
            return
        waiting = [p for p in self.parked if isinstance(p.command, cmd.Put)]
        others_first = bool(waiting) and waiting[0].command is not c
        step_lacks_rows = trains and not self.finished and self.unselected < self.free
        no_bytes = self.charged > 0 and self.charged + max(count * self.reserve(), c.nbytes) > self.capacity_bytes
        if len(self.live()) - self.kept_back() + count > self.capacity or (
            (others_first or no_bytes) and not step_lacks_rows
        ):
            self._is(outcome, PARKED)
            return
        reserve = self.reserve()
        first = len(self.rows)  # ids are given out once, in order
        self._is(outcome, cmd.PutDone(first=first, count=count, again=False))
        for start in range(first, first + count, c.group_size):
            group = tuple(range(start, start + c.group_size))
            for i in group:
                state = {name: "open" if t.takes(c.partition) else "apart" for name, t in self.tasks.items()}
                self.rows[i] = Row(group, set(c.columns), c.priority, state, c.partition, charge=reserve)
        self.charge(list(range(first, first + count)), c.nbytes)
        self._write_schema(c.columns)
        self.last_group_size[c.partition] = c.group_size
        if c.key:
            self.keys[c.key] = c, outcome

    def _wanted(self, session: int, c: cmd.Wanted, outcome: Any) -> None:
        if self._is_error(outcome, [Ended] if self.supply_ended() else []):
            return
        train = self.train()
        if train is None:
            self._is(outcome, PARKED)
            return
        further = (self.max_staleness + 1) * (train.batch_rows or 0)
        lacks = (self.free + further if self.slots is None else self.slots) - self.unselected
        self._is(outcome, cmd.RowsWanted(count=lacks) if lacks > 0 else PARKED)

    def _end(self, session: int, c: cmd.End, outcome: Any) -> None:
        self._is(outcome, cmd.Done())
        if c.partition is None:
            self.ended = True
        else:
            self.ended_partitions.add(c.partition)
        for i, row in self.live().items():
            if c.cancel and c.partition in (None, row.partition):
                self._end_group(i, "cancelled")

    def _cancel_rows(self, session: int, c: cmd.Cancel, outcome: Any) -> None:
        errors: list[type[Exception]] = []
        if bool(c.ids) + bool(c.key) + (c.partition is not None) != 1 or (c.key and c.key not in self.keys):
            errors.append(SchemaError)
        ids = cmd.unpack_ids(c.ids).tolist()
        if c.key in self.keys:
            _, put = self.keys[c.key]
            ids = list(range(put.first, put.first + put.count))
        elif c.partition is not None:
            ids = [i for i, row in self.live().items() if row.partition == c.partition]
        if any(i not in self.rows for i in ids):
            errors.append(SchemaError)
        if self._is_error(outcome, errors):
            return
        before = len(self.live())
        for i in ids:
            self._end_group(i, "cancelled")
        self._is(outcome, cmd.Cancelled(count=before - len(self.live())))

    def _dismiss(self, session: int, c: cmd.Dismiss, outcome: Any) -> None:
        named = [s for s, name in self.names.items() if name == c.name and s in self.loaded] if c.name else [session]
        self._is(outcome, cmd.Dismissed(count=len(named)))
        self.dismissed |= set(named)
        for each in named:
            if c.ended and each != session:
                self.drop(each, blame=True)

    def _leave(self, session: int, c: cmd.Leave, outcome: Any) -> None:
        self._is(outcome, cmd.Done())
        self.drop(session, blame=False)

    def _getaudit(self, session: int, c: cmd.GetAudit, outcome: Any) -> None:
        assert isinstance(outcome, cmd.Audit)
        assert outcome.balanced
        assert (outcome.put, outcome.live) == (len(self.rows), len(self.live()))
        for state, count in outcome.terminal.items():
            assert count == sum(row.ended == state for row in self.rows.values())

    def _getstatus(self, session: int, c: cmd.GetStatus, outcome: Any) -> None:
        assert isinstance(outcome, cmd.StatusReport)
        assert (outcome.live, outcome.version) == (len(self.live()), self.version)
        assert outcome.staleness == self.policy
        for name, task in self.tasks.items():
            shown = [self.shown_state(i, task) for i in self.live()]
            assert outcome.rows[name] == {s: shown.count(s) for s in outcome.rows[name]}
