"""Steps: the open one, full ones waiting for a trainer, and those no checkpoint covers yet."""

from __future__ import annotations

from collections import Counter, deque
from types import MappingProxyType
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...interfaces import StepWindow
from ..commands import Ids
from .rows import LIVE, NONE, Rows
from .sessions import DealtPart, Grant
from .tasks import APART, DONE, NO_ROWS, ReadyQueue, Task


class Window:
    """The step being filled, its free slots, and the rows under way, counted by deadline; None: rows put complete.

    A staleness policy reads a ``StepWindow`` and decides which rows to admit or evict."""

    def __init__(self, batch_rows: int, max_staleness: int, steps: int | None = None, first: int = 0) -> None:
        if batch_rows < 1:
            raise ConfigError(f"a step needs at least 1 row, not {batch_rows}")
        self.batch_rows = batch_rows
        self.max_staleness = max_staleness
        self.steps = steps
        self.step = first
        self.free = batch_rows
        self._admitted: Counter[int] = Counter()

    def filling(self, current: int) -> StepWindow:
        """Return the policy's view, valid until a counter changes. ``current``: the newest version's step."""
        admitted = MappingProxyType(self._admitted)
        return StepWindow(self.step, self.batch_rows, self.free, self.max_staleness, current, admitted)

    def load(self, deadline: int) -> int:
        """Return L_j: admitted, unselected, live rows with this deadline or an earlier one."""
        return sum(n for d, n in self._admitted.items() if d <= deadline)

    def has(self, deadline: int) -> bool:
        """True if admitted, unselected, live rows have this deadline."""
        return self._admitted[deadline] > 0

    @property
    def under_way(self) -> int:
        """Admitted, unselected, live rows."""
        return sum(self._admitted.values())

    @property
    def finished(self) -> bool:
        """True if every step is full."""
        return self.steps is not None and self.step >= self.steps

    @property
    def slots(self) -> int | None:
        """Free slots of this step and all later ones; None without a last step."""
        if self.steps is None:
            return None
        return 0 if self.finished else self.free + (self.steps - 1 - self.step) * self.batch_rows

    @property
    def wanted(self) -> int:
        """All slots or, without a last step, the ones of this step and of the max_staleness + 1 after it."""
        if self.slots is not None:
            return self.slots
        return self.free + (self.max_staleness + 1) * self.batch_rows

    def admit(self, rows: int, deadline: int) -> None:
        """Count admitted rows."""
        self._admitted[deadline] += rows

    def withdraw(self, rows: int, deadline: int | None) -> None:
        """Uncount admitted, unselected rows that ended or lost their admission."""
        if deadline is not None:
            self._admitted[deadline] -= rows

    def select(self, rows: int, deadline: int | None) -> None:
        """Count rows selected into the open step."""
        self.withdraw(rows, deadline)
        self.free -= rows

    def unselect(self, rows: int) -> None:
        """Free the slots of ended rows in the open step."""
        self.free += rows

    def stop(self) -> None:
        """Fill no further step; the open one is empty."""
        assert self.free == self.batch_rows
        self.steps = self.step

    def close(self) -> None:
        """Close the full step and open the next."""
        assert self.free == 0, "a step closes full"
        self.step += 1
        self.free = self.batch_rows
        self._admitted = +self._admitted

    def open_again(self, step: int, back: Counter[int]) -> None:
        """Empty this step and all later ones. ``back``: their rows, by deadline."""
        self.step, self.free = step, self.batch_rows
        self._admitted.update(back)


class Steps:
    """``task``, ``window`` and ``name`` of the task exist once a task makes steps: ``declared``.
    Example with steps of 8 rows and checkpoints: rows 0-7 are selected, so step 0 closes, and ``window.step`` is 1.
    Step 0 is in ``closed`` until a trainer leases it, and in ``uncovered`` until a checkpoint covers it. If a trainer
    resumes before that, ``requeue`` puts step 0 into ``closed`` again, with the same rows.

    ``ready``: ready rows by deadline (None: rows put complete). ``open_rows``: rows of the open step, in chunks.
    ``closed``: full steps waiting for a trainer, in order. ``held``: full steps leased in parts. ``parts``: the parts
    delivered so far by step, to be delivered again if the lease is lost, until the step is final. ``uncovered``: with
    checkpoints, the rows of each full step not covered. ``unselected``: live rows for steps, in none yet. ``due``:
    "evict" after a step closed, "select" if more rows may join the open step.

    ``covered``: earlier steps are final. ``checkpoint``: step of the newest checkpoint; NONE without one. ``saved``:
    version of each kept checkpoint, by step. ``lost_rows``: rows of uncovered steps with lost payload."""

    task: Task
    window: Window
    name: str

    def __init__(self, rows: Rows) -> None:
        self._rows, self._arrays = rows, rows.arrays("steps")
        self.declared = False
        self.ready: dict[int | None, ReadyQueue] = {}
        self.open_rows: list[Ids] = []
        self.closed: deque[tuple[int, Ids]] = deque()
        self.held: dict[int, Ids] = {}
        self.parts: dict[int, list[DealtPart]] = {}
        self.uncovered: dict[int, Ids] = {}
        self.unselected = 0
        self.due: set[str] = set()
        self.covered = 0
        self.checkpoint = NONE
        self.saved: dict[int, int] = {}
        self.lost_rows = NO_ROWS

    def declare(self, task: Task, window: Window, unselected: int) -> None:
        """Set the task of the steps."""
        self.declared, self.task, self.name = True, task, task.spec.name
        self.window, self.unselected, self.covered = window, unselected, window.step

    @property
    def open(self) -> bool:
        """True if a step can be filled."""
        return self.declared and not self.window.finished

    @property
    def lacks_rows(self) -> bool:
        """True if the open step cannot fill with the present rows: then puts for it may overtake a waiting one."""
        return self.open and self.unselected < self.window.free

    def takes(self, at: Ids) -> Any:
        """Return a mask of rows, by array index, of partitions taken by steps."""
        return self.task.state[at] != APART

    def unselected_at(self, at: Ids) -> Any:
        """Return a mask of rows, by array index, that steps take but have not selected."""
        return (self._rows.step[at] == NONE) & self.takes(at)

    def not_closed(self, at: Ids) -> Any:
        """Return a mask of rows, by array index, outside full steps. Rows of the open step that were acknowledged
        before it was opened again are not among them."""
        step = self._rows.step[at]
        return ((step == NONE) | (step == self.window.step)) & (self.task.state[at] != DONE)

    def push(self, ids: Ids, *, front: bool = False) -> None:
        """Queue ready rows for a step; ``front``: before the others."""
        deadlines = self._rows.deadline[self._rows.at(ids)]
        for deadline in np.unique(deadlines).tolist():
            key = None if deadline == NONE else deadline
            if key not in self.ready:
                self.ready[key] = ReadyQueue(self._rows, self.task)
            self.ready[key].push(ids[deadlines == deadline], front=front)

    def offer(self, count: int) -> None:
        """Count new rows for steps."""
        self.unselected += count

    def leave(self, at: Ids) -> None:
        """Uncount ending rows, by array index."""
        self.unselected -= int(np.count_nonzero(self.unselected_at(at)))

    def select(self, ids: Ids, deadline: int | None) -> None:
        """Select ready rows with a deadline into the open step."""
        self.task.select(ids)
        self._arrays["step"][self._rows.at(ids)] = self.window.step
        self.window.select(ids.size, deadline)
        self.unselected -= ids.size
        self.open_rows.append(ids)

    def remove(self, ids: Ids) -> None:
        """Withdraw ending rows, and free their slots in the open step."""
        self.withdraw(ids)
        if count := int((self._rows.step[self._rows.at(ids)] == self.window.step).sum()):
            self.window.unselect(count)
            self.open_rows = [chunk[~np.isin(chunk, ids)] for chunk in self.open_rows]
            parts = [part.without(ids) for part in self.parts.pop(self.window.step, ())]
            if parts := [part for part in parts if part.ids.size]:
                self.parts[self.window.step] = parts

    def withdraw(self, ids: Ids) -> None:
        """Remove admitted, unselected rows from the staleness rule's counts."""
        at = self._rows.at(ids)
        deadlines = self._rows.deadline[at][self._rows.step[at] == NONE]
        for deadline, count in zip(*np.unique(deadlines[deadlines != NONE], return_counts=True), strict=True):
            self.window.withdraw(int(count), int(deadline))
        self.due.add("select")

    def close(self, *, checkpoints: bool, bounded: bool) -> None:
        """Queue the open, full step for a trainer, unless one has it in parts; and open the next."""
        step, ids, window = self.window.step, np.concatenate(self.open_rows), self.window
        if checkpoints:
            self.uncovered[step] = ids
        if self.leased(step):
            self.held[step] = ids
        else:
            self.closed.append((step, ids))
        self.open_rows = []
        window.close()
        self.ready = {
            deadline: queue
            for deadline, queue in self.ready.items()
            if deadline is None or deadline >= window.step or (not bounded and window.has(deadline))
        }
        self.due.add("evict")

    def deliver(self, step: int, number: int, part: DealtPart) -> None:
        """Note a part of a step. With the first one of a full step, it waits for no other trainer."""
        self.parts.setdefault(step, [])[number : number + 1] = [part]
        if number == 0 and step != self.window.step:
            first, ids = self.closed.popleft()
            assert first == step, "the oldest step comes first"
            self.held[step] = ids

    def take_back(self, step: int, ids: Ids) -> None:
        """Queue a full step again: ``ids``, or all its rows if leased in parts. The open step keeps its rows."""
        if step != self.window.step:
            ids = self.held.pop(step, ids)
            self.closed = deque(sorted([(step, ids), *self.closed], key=lambda closed: closed[0]))

    def requeue(self, first: int) -> Ids:
        """Queue uncovered steps from ``first`` on again. Return their acknowledged rows, to be trained again."""
        self.saved = {step: version for step, version in self.saved.items() if step <= first}
        whole = {step: ids for step, ids in sorted(self.uncovered.items()) if step >= first}
        self.closed = deque([*((step, ids) for step, ids in self.closed if step < first), *whole.items()])
        ids: Ids = np.concatenate([NO_ROWS, *whole.values()])
        ids = ids[self.task.state[self._rows.at(ids)] == DONE]
        at = self._rows.at(ids)
        assert not self._rows.state[at].any(), "rows of a step that is not covered live"
        self.task.again(ids)
        self._arrays["fate"][at] = LIVE
        return ids

    def reopen(self, first: int) -> None:
        """Open this step again. Its rows and those of later steps, leased to no trainer, are ready before others."""
        chunks: list[tuple[int, Ids]] = [(self.window.step, chunk) for chunk in self.open_rows]
        chunks += [(step, ids) for step, ids in self.closed if step >= first]
        self.closed = deque((step, ids) for step, ids in self.closed if step < first)
        self.uncovered = {step: ids for step, ids in self.uncovered.items() if step < first}
        self.parts = {step: parts for step, parts in self.parts.items() if step < first}
        self.open_rows = []
        back: Counter[int] = Counter()
        for _, ids in sorted(chunks, key=lambda chunk: -chunk[0]):
            at = self._rows.at(ids)
            self.task.unselect(ids)
            self._arrays["step"][at] = NONE
            self.unselected += ids.size
            self.push(ids, front=True)
            deadlines = self._rows.deadline[at]
            back.update(deadlines[deadlines != NONE].tolist())
        self.window.open_again(first, back)
        self.due.add("select")

    def drop(self, step: int) -> None:
        """Forget a full step with ending rows."""
        self.closed = deque((number, part) for number, part in self.closed if number != step)
        self.uncovered.pop(step, None)
        self.parts.pop(step, None)

    def save(self, step: int, version: int, covers: int) -> None:
        """Note a checkpoint. Forget earlier ones, of steps before ``covers``."""
        self.checkpoint = max(self.checkpoint, step)
        self.saved = {saved: each for saved, each in {**self.saved, step: version}.items() if saved >= covers}

    def cover(self, covers: int) -> Ids:
        """Make the steps before ``covers`` final. Return their rows."""
        ids = np.concatenate([NO_ROWS, *(self.uncovered.pop(s) for s in sorted(self.uncovered) if s < covers)])
        self.covered = covers
        self.parts = {step: parts for step, parts in self.parts.items() if step >= covers}
        self.lost_rows = np.setdiff1d(self.lost_rows, ids)
        return ids

    def end_later(self, ids: Ids, state: int) -> None:
        """End rows of an uncovered step once a checkpoint covers it."""
        self._arrays["fate"][self._rows.at(ids)] = state

    def add_holes(self, ids: Ids) -> None:
        """Note rows of uncovered steps with lost payload."""
        self.lost_rows = np.union1d(self.lost_rows, ids)

    def take_holes(self) -> Ids:
        """Forget these rows, and return them."""
        holes, self.lost_rows = self.lost_rows, NO_ROWS
        return holes

    def next_to_lease(self) -> int | None:
        """Return the step of a new lease in parts: a full one, or the open one if no other lease has it."""
        if self.closed:
            return self.closed[0][0]
        free = self.open and self.window.free < self.window.batch_rows and not self.leased(self.window.step)
        return self.window.step if free else None

    def rows_of(self, step: int) -> Ids:
        """Return all rows selected for a step without an acknowledgement."""
        if step == self.window.step:
            return np.concatenate(self.open_rows)
        return self.held[step] if step in self.held else self.closed[0][1]

    def leased(self, step: int) -> bool:
        """True if a trainer has a lease of this step."""
        return any(grant.step == step for grant in self.task.leases.values())

    def delivered_whole(self, grant: Grant) -> bool:
        """True if the step of a lease is full, and all its parts are delivered."""
        return grant.step in self.held and grant.left == len(self.held[grant.step])

    def finish(self, step: int) -> None:
        """Note the acknowledgement of a whole step."""
        self.held.pop(step, None)
        if step not in self.uncovered:
            self.parts.pop(step, None)

    def next_to_train(self) -> int:
        """Return the first unacknowledged step."""
        leased = [grant.step for grant in self.task.leases.values()]
        return min([self.window.step, *leased, *(step for step, _ in self.closed)])

    def acknowledged(self) -> list[tuple[int, Ids]]:
        """Return acknowledged, uncovered steps and their rows."""
        steps = self.uncovered.items()
        return [(step, ids) for step, ids in steps if (self.task.state[self._rows.at(ids)] == DONE).all()]
