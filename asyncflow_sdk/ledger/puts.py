"""Puts: rows come in, are cancelled, and the stream of them ends."""

from __future__ import annotations

import numpy as np

from ..errors import ConfigError, Ended, SchemaError
from . import commands as cmd
from .assembly import StepAssembly
from .commands import Ids, pack_ids, unpack_ids
from .configuration import check_groups_fill
from .state import LedgerState
from .state.idempotency import DIGEST_BYTES
from .state.rows import APART, LIVE, WAITING
from .state.tasks import Task
from .terminations import CANCELLED, Terminations


class Puts:
    """Adds rows, as far as the limits of the queue allow."""

    def __init__(self, state: LedgerState, terminations: Terminations, assembly: StepAssembly) -> None:
        self._context, self._rows, self._columns, self._partitions = (
            state.context,
            state.rows,
            state.columns,
            state.partitions,
        )
        self._limits, self._budget, self._tasks, self._steps = state.limits, state.budget, state.tasks, state.steps
        self._versions, self._parked, self._metrics, self._keys = (
            state.versions,
            state.parked,
            state.metrics,
            state.keys,
        )
        self._terminations, self._assembly = terminations, assembly

    def put(self, command: cmd.Put) -> cmd.Reply | None:
        """Add rows. None if there is no room for them yet."""
        if command.digest and len(command.digest) != DIGEST_BYTES * len(command.columns):
            raise SchemaError(f"the digest of {len(command.columns)} columns is not {len(command.digest)} bytes")
        lacking = self._keys.lacking(command)
        if lacking is not None and not len(lacking):
            known = self._keys.get(command.key)
            assert known is not None
            return cmd.PutDone(first=known.first, count=known.size, again=True)
        groups = np.arange(command.groups) if lacking is None else lacking
        count = len(groups) * command.group_size
        takers = [task for task in self._tasks if task.spec.takes(command.partition)]
        trained = self._steps.declared and self._steps.task in takers
        self._check(command, count, takers, trained=trained)
        if not self._fits(command, count, trained=trained):
            return None
        ids = self._add(command, groups, takers, trained=trained)
        first, again = int(ids[0]), lacking is not None
        if again:
            self._keys.add_again(command.key, first, groups)
        elif command.key:
            self._keys.add(command, first, self._rows)
        if command.key:
            self._context.wake_puts()  # a parked put with the same key need not wait
        self._assembly.make_ready_alike(takers, ids, self._columns.mask(command.columns), 0)
        return cmd.PutDone(first=first, count=count, again=False, groups=pack_ids(groups) if again else b"")

    def cancel(self, command: cmd.Cancel) -> cmd.Reply:
        """Cancel live rows with their groups."""
        rows, terminations = self._rows, self._terminations
        if bool(command.ids) + bool(command.key) + (command.partition is not None) != 1:
            raise SchemaError("say what to cancel by one of: rows, the key of their put, their partition")
        if command.partition is not None:
            return cmd.Cancelled(count=terminations.cancel_live(command.partition, command.reason))
        if command.key:
            if self._keys.get(command.key) is None:
                raise SchemaError(f"no put with key {command.key!r} is remembered")
            ids = self._keys.rows_of(command.key)
        else:
            if len(command.ids) % 8:
                raise SchemaError("row ids are packed int64")
            ids = np.unique(unpack_ids(command.ids))
            unknown = ids[(ids < 0) | (ids >= rows.base + rows.count)]
            if len(unknown):
                raise SchemaError(f"row {unknown[0]} was never put; the newest is {self._budget.put - 1}")
        ids = ids[ids >= rows.base]
        ids = ids[rows.state[rows.at(ids)] == LIVE]
        return cmd.Cancelled(count=terminations.end_groups(ids, CANCELLED, command.reason))

    def end(self, command: cmd.End) -> cmd.Reply:
        """End the stream, or one partition."""
        if command.partition == "*":
            raise SchemaError('"*" is no partition; end them one by one, or all with no name')
        if command.partition is None:
            self._partitions.ended = self._partitions.end_requested = True
        else:
            self._partitions.ended_names.add(command.partition)
        if command.cancel:
            self._terminations.cancel_live(command.partition, "cancelled at the end")
        self._parked.wake_all()
        return cmd.Done()

    def wanted(self) -> cmd.Reply | None:
        """The number of rows that the steps lack; None while they lack none."""
        if self._assembly.supply_ended():
            raise Ended("every step is filled; no more rows are wanted")
        if not self._steps.declared:
            return None
        count = self._steps.window.wanted - self._steps.unselected
        return cmd.RowsWanted(count=count) if count > 0 else None

    def in_line(self) -> bool:
        """True if no put may go before one that waits for room. A put of rows that the open step lacks may: else a put that does not fit
        beside that step would stop the run."""
        return not self._steps.lacks_rows

    def _check(self, command: cmd.Put, count: int, takers: list[Task], *, trained: bool) -> None:
        """Raise Ended, SchemaError or ConfigError for rows that can never be added."""
        limits = self._limits
        if self._partitions.ended:
            raise Ended("the stream has ended; nothing more can be put")
        if command.partition in self._partitions.ended_names:
            raise Ended(f"partition {command.partition!r} has ended; nothing more can be put there")
        if command.partition == "*":
            raise SchemaError('"*" is no partition: a task names it to take them all; put rows in one')
        if command.groups < 1 or command.group_size < 1:
            raise SchemaError(f"a put needs rows; this one has {command.groups} groups of {command.group_size}")
        if count > limits.capacity_rows:
            raise SchemaError(
                f"{count} rows in one put are more than the whole queue holds (capacity_rows="
                f"{limits.capacity_rows}); put fewer at a time"
            )
        nbytes = max(count * limits.row_bytes, command.nbytes)
        if nbytes > limits.capacity_bytes:
            raise SchemaError(
                f"{count} rows of {nbytes} bytes are more than the whole queue"
                f" holds (capacity_bytes={limits.capacity_bytes}); put fewer at a time"
            )
        self._check_group_size(command, takers, trained=trained)
        if not command.columns:
            raise SchemaError("a put needs at least one column")
        if abs(command.priority) >= 1 << 31:
            raise SchemaError(f"a priority is an int32, not {command.priority}")
        self._columns.check(command.columns)

    def _check_group_size(self, command: cmd.Put, takers: list[Task], *, trained: bool) -> None:
        sizes = self._partitions.group_sizes
        alike = [name for name in sizes if name == command.partition]
        if trained:
            check_groups_fill(self._steps.window.batch_rows, command.group_size)
            alike = [name for name in sizes if self._steps.task.spec.takes(name)]
        other = next((size for name in alike if (size := sizes[name]) != command.group_size), None)
        if other is not None and any(task.spec.grouped for task in takers):
            raise ConfigError(
                f"this run has groups of {other}; groups of {command.group_size} would leave steps that cannot fill"
            )

    def _fits(self, command: cmd.Put, count: int, *, trained: bool) -> bool:
        """True if the rows may be added now."""
        limits, budget = self._limits, self._budget
        if budget.occupied + count > limits.capacity_rows:
            return False
        first = self._parked.first("put")
        if first is not None and first.command is not command and not (trained and not self.in_line()):
            return False  # a large put that waits is not overtaken for ever
        if budget.charged + max(count * budget.reserve, command.nbytes) <= limits.capacity_bytes:
            return True
        # else nothing would ever free the bytes that this put waits for
        return not budget.charged or (trained and self._steps.unselected < self._steps.window.free)

    def _add(self, command: cmd.Put, groups: Ids, takers: list[Task], *, trained: bool) -> Ids:
        rows, count = self._rows, len(groups) * command.group_size
        bits = self._columns.add(command.columns)
        self._partitions.group_sizes[command.partition] = command.group_size
        partition = self._partitions.add(command.partition)
        ids = rows.add(len(groups), command.group_size)
        new = slice(rows.count - count, rows.count)
        rows.columns[new] = bits
        rows.current[new] = self._versions.current
        rows.todo[new] = len(takers)
        rows.partition[new] = partition
        self._budget.charge_new(new, count, command.nbytes)
        if command.priority:
            rows.priority[new] = command.priority
            rows.ranked = True
        of_group = np.repeat(groups, command.group_size)
        if command.measures:
            self._columns.measure(ids, command.measures, of_group)
        if command.lengths:
            self._metrics.note_lengths(ids, command.lengths, of_group)
        self._budget.put += count
        self._steps.unselected += count * trained
        self._columns.count_kind(partition, bits, count)
        for task in self._tasks:
            if task in takers:
                task.undone[partition] += count
                task.counts[WAITING] += count
                task.waiting[partition] += count * (not task.spec.grouped)
            else:
                rows.task(task.spec.name, "state")[new] = APART
        return ids
