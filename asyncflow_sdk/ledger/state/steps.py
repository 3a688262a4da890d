"""Steps: the open one, full ones waiting for a trainer, and those no checkpoint covers yet."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from ..commands import Ids
from .grants import DealtPart, Grant
from .ready import ReadyQueue
from .rows import APART, DONE, NONE, Rows
from .tasks import Task
from .window import Window


class Steps:
    """``task`` and ``window`` may not be used before ``declared`` is True.

    ``ready``: ready rows by deadline (None: rows put complete). ``open_rows``: rows of the open step, in chunks.
    ``closed``: full steps waiting for a trainer, in order. ``held``: full steps leased in parts. ``parts``: by step,
    the parts delivered so far, to be delivered again if the lease is lost; until the step is final. ``uncovered``:
    with checkpoints, the rows of each full step not covered. ``unselected``: live rows for steps, in none yet.
    ``reselect``: True if more rows may join the open step. ``just_closed``: True if late rows must be evicted after a
    step closed.

    ``covered``: earlier steps are final. ``checkpoint``: step of the newest checkpoint; NONE without one. ``saved``:
    version of each kept checkpoint, by step. ``lost_rows``: rows of uncovered steps with lost payload.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._task: Task | None = None
        self._window: Window | None = None
        self.ready: dict[int | None, ReadyQueue] = {}
        self.open_rows: list[Ids] = []
        self.closed: deque[tuple[int, Ids]] = deque()
        self.held: dict[int, Ids] = {}
        self.parts: dict[int, list[DealtPart]] = {}
        self.uncovered: dict[int, Ids] = {}
        self.unselected = 0
        self.reselect = False
        self.just_closed = False
        self.covered = 0
        self.checkpoint = NONE
        self.saved: dict[int, int] = {}
        self.lost_rows: Ids = np.empty(0, np.int64)

    def declare(self, task: Task, window: Window, unselected: int) -> None:
        """Set the task that makes the steps."""
        self._task, self._window, self.unselected, self.covered = task, window, unselected, window.step

    @property
    def declared(self) -> bool:
        """True once a task makes steps."""
        return self._task is not None

    @property
    def task(self) -> Task:
        """The task with ``batch_rows``."""
        assert self._task is not None
        return self._task

    @property
    def name(self) -> str:
        """The name of that task."""
        return self.task.spec.name

    @property
    def window(self) -> Window:
        """The window of the open step."""
        assert self._window is not None
        return self._window

    def makes(self, task: Task) -> bool:
        """True if this task makes the steps."""
        return task is self._task

    @property
    def open(self) -> bool:
        """True if a step can be filled."""
        return self._window is not None and not self._window.finished

    @property
    def lacks_rows(self) -> bool:
        """True if the open step cannot fill with the present rows."""
        return self.open and self.unselected < self.window.free

    def takes(self, at: Ids) -> npt.NDArray[np.bool_]:
        """Return a mask of rows, by array index, of partitions that steps take."""
        taken: npt.NDArray[np.bool_] = self._rows.task(self.name, "state")[at] != APART
        return taken

    def unselected_at(self, at: Ids) -> npt.NDArray[np.bool_]:
        """Return a mask of rows, by array index, that steps take but have not selected."""
        selected: npt.NDArray[np.bool_] = (self._rows.step[at] == NONE) & self.takes(at)
        return selected

    def not_closed(self, at: Ids) -> npt.NDArray[np.bool_]:
        """Return a mask of rows, by array index, outside full steps. Rows of the open step that were
        acknowledged before it was opened again are not among them."""
        step = self._rows.step[at]
        free = (step == NONE) | (step == self.window.step)
        outside: npt.NDArray[np.bool_] = free & (self._rows.task(self.name, "state")[at] != DONE)
        return outside

    def push(self, ids: Ids, *, front: bool = False) -> None:
        """Queue ready rows for a step; ``front``: before the others."""
        deadlines = self._rows.deadline[self._rows.at(ids)]
        for deadline in np.unique(deadlines).tolist():
            key = None if deadline == NONE else deadline
            if key not in self.ready:
                self.ready[key] = ReadyQueue(self._rows, self.name)
            queue, part = self.ready[key], ids[deadlines == deadline]
            queue.push_front(part) if front else queue.push(part)

    def withdraw(self, ids: Ids) -> None:
        """Remove admitted, unselected rows from the staleness rule's counts."""
        at = self._rows.at(ids)
        deadlines = self._rows.deadline[at][self._rows.step[at] == NONE]
        for deadline, count in zip(*np.unique(deadlines[deadlines != NONE], return_counts=True), strict=True):
            self.window.withdraw(int(count), int(deadline))
        self.reselect = True

    def remove_from_open(self, ids: Ids) -> None:
        """Free the slots of ending rows in the open step."""
        count = int((self._rows.step[self._rows.at(ids)] == self.window.step).sum())
        if count:
            self.window.unselect(count)
            self.reselect = True
            self.open_rows = [chunk[~np.isin(chunk, ids)] for chunk in self.open_rows]
            parts = [part.without(ids) for part in self.parts.pop(self.window.step, ())]
            if parts := [part for part in parts if len(part.ids)]:
                self.parts[self.window.step] = parts

    def close(self) -> None:
        """Queue the open step, which is full, for a trainer, unless one has it in parts."""
        step, ids = self.window.step, np.concatenate(self.open_rows)
        if self.leased(step):
            self.held[step] = ids
        else:
            self.closed.append((step, ids))
        self.open_rows = []

    def take(self, step: int) -> Ids:
        """Remove the first full step waiting for a trainer, ``step``. Return its rows."""
        first, ids = self.closed.popleft()
        assert first == step, "the oldest step comes first"
        return ids

    def take_back(self, step: int, ids: Ids) -> None:
        """Queue a full step for a trainer again: ``ids``, or all its rows if it was leased in parts.
        The open step keeps its rows."""
        if step != self.window.step:
            ids = self.held.pop(step, ids)
            self.closed = deque(sorted([(step, ids), *self.closed], key=lambda closed: closed[0]))

    def leased(self, step: int) -> bool:
        """True if a trainer has a lease of this step."""
        return any(grant.step == step for grant in self.task.leases.values())

    def delivered_whole(self, grant: Grant) -> bool:
        """True if the step of a lease is full, and all its parts are delivered."""
        return grant.step in self.held and grant.left == len(self.held[grant.step])

    def finish(self, step: int) -> None:
        """Note that a step is acknowledged whole."""
        self.held.pop(step, None)
        if step not in self.uncovered:
            self.parts.pop(step, None)

    def next_to_train(self) -> int:
        """Return the first unacknowledged step."""
        leased = [grant.step for grant in self.task.leases.values()]
        return min([self.window.step, *leased, *(step for step, _ in self.closed)])

    def acknowledged(self) -> list[tuple[int, Ids]]:
        """Return acknowledged, uncovered steps and their rows."""
        if not self.declared:
            return []
        rows = self._rows
        return [
            (step, ids)
            for step, ids in self.uncovered.items()
            if (rows.task(self.name, "state")[rows.at(ids)] == DONE).all()
        ]
