"""Puts: add and cancel rows, and end the stream."""

from __future__ import annotations

import numpy as np

from ..errors import ConfigError, Ended, SchemaError
from . import commands as cmd
from .assembly import StepAssembly
from .commands import Ids, pack_ids, unpack_ids
from .configuration import check_groups_fill
from .pins import VersionPins
from .state import LedgerState
from .state.context import Placed
from .state.idempotency import DIGEST_BYTES
from .state.rows import NONE
from .state.tasks import Task
from .terminations import CANCELLED, Terminations


class Puts:
    """Adds rows within the limits of the queue."""

    def __init__(
        self, state: LedgerState, terminations: Terminations, assembly: StepAssembly, pins: VersionPins
    ) -> None:
        self._state, self._terminations, self._assembly, self._pins = state, terminations, assembly, pins

    def put(self, command: cmd.AddRows) -> cmd.Reply | None:
        """Add rows. None if there is no room yet."""
        state = self._state
        if command.groups < 1 or command.group_size < 1:
            raise SchemaError(f"a put needs rows; this one has {command.groups} groups of {command.group_size}")
        if command.digest and len(command.digest) != DIGEST_BYTES * len(command.columns):
            raise SchemaError(f"the digest of {len(command.columns)} columns is not {len(command.digest)} bytes")
        lacking = state.keys.lacking(command) if command.key else None
        if lacking is not None and not lacking.size:
            known = state.keys.get(command.key)
            assert known is not None
            return cmd.PutDone(first=known.first, count=known.size, again=True)
        groups = np.arange(command.groups) if lacking is None else lacking
        of_group = groups if command.group_size == 1 else groups.repeat(command.group_size)
        takers = state.tasks.takers(command.partition)
        trained = bool(takers) and takers[-1].makes_steps
        self._check(command, of_group.size, takers, trained=trained)
        if command.version != NONE or state.partitions.pins:
            self._pins.check(command)
        if not self._fits(command, of_group.size, trained=trained):
            return None
        ids, bits = self._add(command, of_group, takers, trained=trained)
        first, again = int(ids[0]), lacking is not None
        if again:
            state.keys.add_again(command.key, first, groups)
        elif command.key:
            state.keys.add(command, first, state.rows)
        if command.key:
            state.context.wake_puts()  # a parked put with the same key need not wait
        if command.block is not None:
            state.context.effects.placed.append(Placed(ids, command.block, of_group))
        self._assembly.make_ready_new(takers, ids, bits)
        if command.version != NONE:
            self._pins.add(command)
        return cmd.PutDone(first=first, count=ids.size, again=False, groups=pack_ids(groups) if again else b"")

    def cancel(self, command: cmd.Cancel) -> cmd.Reply:
        """Cancel live rows with their groups."""
        rows, terminations = self._state.rows, self._terminations
        if bool(command.ids) + bool(command.key) + (command.partition is not None) != 1:
            raise SchemaError("cancel rows by one of: ids, key, partition")
        if command.partition is not None:
            return cmd.Cancelled(count=terminations.cancel_live(command.partition, command.reason))
        if command.key:
            if self._state.keys.get(command.key) is None:
                raise SchemaError(f"no put with key {command.key[:200]!r} is remembered")
            ids = self._state.keys.rows_of(command.key)
        else:
            if len(command.ids) % 8:
                raise SchemaError("row ids are packed int64")
            ids = np.unique(unpack_ids(command.ids))
            unknown = ids[(ids < 0) | (ids >= rows.base + rows.count)]
            if unknown.size:
                raise SchemaError(f"row {unknown[0]} was never put; the newest is {self._state.budget.put - 1}")
        return cmd.Cancelled(count=terminations.end_groups(rows.live(ids), CANCELLED, command.reason))

    def end(self, command: cmd.End) -> cmd.Reply:
        """End the stream or one partition."""
        if command.partition == "*":
            raise SchemaError('"*" is no partition; end them one by one, or all with no name')
        self._state.partitions.end(*(() if command.partition is None else [command.partition]))
        if self._pins.end(command.partition) and self._assembly.supply_ended():
            self._state.partitions.end()
        if command.cancel:
            self._terminations.cancel_live(command.partition, "cancelled at the end")
        self._state.parked.wake_all()
        return cmd.Done()

    def wanted(self, command: cmd.AwaitRowsWanted) -> cmd.Reply | None:
        """Return the number of rows the steps lack, and the feeder's lost puts; None if none."""
        steps, feeds = self._state.steps, bool(command.prefix)
        full = steps.declared and not steps.open
        if self._assembly.supply_ended() or (full if not feeds else "" in self._state.partitions.ended_names):
            raise Ended("every step is filled; no more rows are wanted")
        lost = self._state.keys.lost(command.prefix) if feeds and not full else {}
        if lost or not command.more:
            return cmd.RowsWanted(count=0, lost=lost) if lost or not self._assembly.can_lose() else None
        count = steps.window.wanted - steps.unselected if steps.declared else 0
        return cmd.RowsWanted(count=count) if count > 0 else None

    def in_line(self) -> bool:
        """True if no put may overtake a waiting one. Rows missing in the open step may: otherwise a
        put with no room beside that step would stop the run."""
        return not self._state.steps.lacks_rows

    def _check(self, command: cmd.AddRows, count: int, takers: list[Task], *, trained: bool) -> None:
        """Raise Ended, SchemaError or ConfigError for rows that can never be added."""
        limits = self._state.limits
        if self._state.partitions.ended:
            raise Ended("the stream has ended; nothing more can be put")
        if command.partition in self._state.partitions.ended_names:
            raise Ended(f"partition {command.partition!r} has ended; nothing more can be put there")
        if trained and not self._state.steps.open:
            raise Ended("every step is filled; nothing more can be put for them")
        if command.partition == "*":
            raise SchemaError('"*" is no partition: a task names it to take all of them; put rows in one')
        if command.block is not None and command.block.rows != command.groups:
            raise SchemaError(f"{command.groups} groups are put with {command.block.rows} values")
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
        if not -(1 << 31) < command.priority < 1 << 31:
            raise SchemaError(f"a priority is an int32, not {command.priority}")
        self._state.columns.check(command.columns)

    def _check_group_size(self, command: cmd.AddRows, takers: list[Task], *, trained: bool) -> None:
        """Raise ConfigError if groups of this size would leave steps that cannot fill."""
        sizes, alike = self._state.partitions.group_sizes, [command.partition]
        if trained:
            check_groups_fill(self._state.steps.window.batch_rows, command.group_size)
            alike = [name for name in sizes if self._state.steps.task.spec.takes(name)]
        for name in alike:
            if (size := sizes.get(name, command.group_size)) != command.group_size and any(
                task.grouped for task in takers
            ):
                raise ConfigError(
                    f"this run has groups of {size}; groups of {command.group_size} would leave steps that cannot fill"
                )

    def _fits(self, command: cmd.AddRows, count: int, *, trained: bool) -> bool:
        limits, budget = self._state.limits, self._state.budget
        if budget.occupied + count > limits.capacity_rows:
            return False
        first = self._state.parked.first("put")
        if first is not None and first.command is not command and not (trained and not self.in_line()):
            return False  # small puts must not overtake a large one for ever
        if budget.charged + max(count * budget.reserve, command.nbytes) <= limits.capacity_bytes:
            return True
        # otherwise no row could ever end and free bytes for this put
        return not budget.charged or (trained and self._state.steps.unselected < self._state.steps.window.free)

    def _add(self, command: cmd.AddRows, of_group: Ids, takers: list[Task], *, trained: bool) -> tuple[Ids, int]:
        """Add rows. Return their ids and the bits of their columns."""
        state, rows, count = self._state, self._state.rows, of_group.size
        partition = state.partitions.add(command.partition, command.group_size)
        ids = rows.add(count // command.group_size, command.group_size, partition, command.priority)
        new = slice(rows.count - count, rows.count)
        bits = state.columns.put(new, count, partition, command.columns)
        state.versions.put(new)
        state.budget.charge_new(new, count, command.nbytes)
        if command.measures:
            state.columns.measure(ids, command.measures, of_group)
        if command.lengths:
            state.metrics.note_lengths(ids, command.lengths, of_group)
        if trained:
            state.steps.offer(count)
        state.tasks.enter(new, count, partition, takers)
        return ids, bits
