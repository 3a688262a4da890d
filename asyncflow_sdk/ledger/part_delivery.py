"""Part delivery: a step is leased in parts, while the rest of it is still being selected.

A part contains whole groups already selected for the step, so the staleness rule does not change.
All parts of a step have one token. The step keeps its parts: if the lease is lost, the next one
gets the same parts again, with the same shards for as many ranks.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ..errors import SchemaError
from . import commands as cmd
from .admission import LeaseAdmission
from .commands import Ids, pack_ids
from .shards import deal
from .staleness import StalenessControl
from .state import LedgerState
from .state.grants import DealtPart, Grant, ShardedLease
from .state.rows import LEASED, NONE, SELECTED
from .state.sessions import Session
from .state.tasks import Task


class PartDelivery:
    """Delivers steps in parts."""

    def __init__(self, state: LedgerState, staleness: StalenessControl, admission: LeaseAdmission) -> None:
        self._state, self._staleness, self._admission = state, staleness, admission

    def check(self, session: Session, task: Task, command: cmd.LeaseRows) -> Grant | None:
        """Return the lease whose next part is requested; None for a new lease. Raises LeaseLost,
        SchemaError, PluginError."""
        if not command.parts:
            if command.token:
                raise SchemaError(f"lease {command.token} is named in a request for another lease")
            return None
        name = task.spec.name
        if task.spec.batch_rows is None:
            raise SchemaError(f"task {name!r} has no steps to lease in parts; declare it with batch_rows")
        if task.spec.gives:
            raise SchemaError(f"task {name!r} gives columns, and a step in parts is acknowledged without columns")
        if not command.token:
            return None
        grant = self._state.leases.held(session, command.token, command.rank)
        if grant.parts == NONE or grant.task != name:
            raise SchemaError(f"lease {grant.token} is not of a step of task {name!r} in parts")
        self._check_ranks(grant, command)
        if self._state.steps.delivered_whole(grant):
            raise SchemaError(f"step {grant.step} is delivered whole under lease {grant.token}; acknowledge it")
        self._staleness.check()
        return grant

    def find(self, command: cmd.LeaseRows, grant: Grant | None, shards: int) -> tuple[int, DealtPart] | None:
        """Return the step and the next part of a lease, or of a new one; None if too few rows are
        selected. ``shards``: number of shards to deal a part to, unless it is dealt to as many."""
        steps = self._state.steps
        step = self._first() if grant is None else grant.step
        if step is None:
            return None
        number, known = (0 if grant is None else grant.parts), steps.parts.get(step, [])
        if number < len(known):
            part = known[number]
            return step, part if part.shards == shards else self._deal(part.ids, shards, number)
        if step == steps.window.step:
            filled = steps.window.batch_rows - steps.window.free
            if filled - (0 if grant is None else grant.left) < max(command.at_least, 1):
                return None
        ids = self._rows(step)
        selected = self._state.rows.task(steps.name, "state")[self._state.rows.at(ids)] == SELECTED
        return step, self._deal(ids[selected], shards, number)

    def deliver(
        self,
        session: Session,
        task: Task,
        grant: Grant | None,
        step: int,
        part: DealtPart,
        shards: ShardedLease | None = None,
    ) -> cmd.LeasedPart:
        """Lease a part found by ``find``. ``shards``: of a new lease of a rank group."""
        steps, number = self._state.steps, 0 if grant is None else grant.parts
        known = steps.parts.setdefault(step, [])
        known[number : number + 1] = [part]
        if grant is not None:
            leased = self._extend(task, grant, part)
        else:
            if step != steps.window.step:
                steps.held[step] = steps.take(step)
            leased = self._admission.grant(session, task, part.ids, step, shards=shards)
            grant = self._state.leases.by_token[leased.token]
            grant.parts = 1
        last = steps.delivered_whole(grant)
        return cmd.LeasedPart(**msgspec.structs.asdict(leased), part=number, last=last)

    def waits(self, grant: Grant) -> bool:
        """True if all holders of a lease wait for its next part."""
        place = self._state.tasks[grant.task].place
        asking = {each.command.rank for each in self._state.parked.at(place) if each.command.token == grant.token}
        return len(asking) == (1 if grant.shards is None else grant.shards.size)

    def parked(self, token: int) -> None:
        """Renew the lease of a request that waits for a part."""
        self._state.leases.renew(self._state.leases.by_token[token])

    def _check_ranks(self, grant: Grant, command: cmd.LeaseRows) -> None:
        shards = grant.shards
        held = ("", 1, 1) if shards is None else (shards.group, shards.size, len(shards.bounds) - 1)
        asked = (
            command.group if command.world_size > 1 else "",
            command.world_size,
            command.shards or command.world_size,
        )
        if asked != held:
            raise SchemaError(
                f"lease {grant.token} is of group {held[0]!r} with {held[1]} ranks and {held[2]} shards, and not of"
                f" {asked[0]!r} with {asked[1]} and {asked[2]}"
            )

    def _first(self) -> int | None:
        """Return the step of a new lease: a full one, or the open one if no other lease has it."""
        steps = self._state.steps
        if steps.closed:
            return steps.closed[0][0]
        free = steps.open and steps.window.free < steps.window.batch_rows and not steps.leased(steps.window.step)
        return steps.window.step if free else None

    def _rows(self, step: int) -> Ids:
        """Return all rows selected for a step without an acknowledgement."""
        steps = self._state.steps
        if step == steps.window.step:
            return np.concatenate(steps.open_rows)
        return steps.held[step] if step in steps.held else steps.closed[0][1]

    def _deal(self, ids: Ids, shards: int, number: int) -> DealtPart:
        if shards == 1:
            return DealtPart(ids, [0, len(ids)])
        return deal(self._state.rows, self._state.steps.task, ids, shards, whole_groups=True, first=number)

    def _extend(self, task: Task, grant: Grant, part: DealtPart) -> cmd.Leased:
        """Add a part to a lease."""
        rows, lineage = self._state.rows, self._state.versions.lineage
        at = rows.at(part.ids)
        spot = rows.write_index(at)
        grant.extend(part)
        self._state.leases.renew(grant)
        rows.task(task.spec.name, "state")[spot] = LEASED
        rows.task(task.spec.name, "token")[spot] = grant.token
        task.move(len(part.ids), SELECTED, LEASED)
        self._state.metrics.note_ages(rows.at(grant.ids), grant.step, lineage)
        return cmd.Leased(
            token=grant.token, task=grant.task, ids=pack_ids(part.ids), groups=pack_ids(rows.first[at]),
            step=grant.step, version=grant.newest, lease_s=task.spec.lease_s,
            partition=self._state.partitions.name_of(part.ids[:1]), version_step_offsets=lineage.offsets,
            completed_at=pack_ids(rows.current[at]),
        )  # fmt: skip
