"""Steps: the one being filled, full ones that wait for a trainer, and those that a checkpoint does not cover yet."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from ..commands import Ids
from .ready import ReadyQueue
from .rows import APART, DONE, NONE, Rows
from .tasks import Task
from .window import Window


class Steps:
    """``declared`` is False before the task with ``batch_rows`` is declared; ``task`` and ``window`` may then not be used.

    ``ready``: ready rows by deadline (None: rows that were put complete). ``open_rows``: rows of the open step, in parts. ``closed``: full
    steps that wait for a trainer, in order. ``uncovered``: with checkpoints, the rows of every full step that none covers. ``unselected``:
    live rows that steps take and that are in none. ``reselect``: True if rows may join the open step that could not before.
    ``just_closed``: True if a step closed, and late rows were not evicted yet.

    ``covered``: steps before this one are final. ``checkpoint``: the step of the newest checkpoint; NONE without one. ``saved``: by the
    step of each checkpoint that is kept, its version. ``holes``: rows of steps that are not covered, whose payload is lost.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._task: Task | None = None
        self._window: Window | None = None
        self.ready: dict[int | None, ReadyQueue] = {}
        self.open_rows: list[Ids] = []
        self.closed: deque[tuple[int, Ids]] = deque()
        self.uncovered: dict[int, Ids] = {}
        self.unselected = 0
        self.reselect = False
        self.just_closed = False
        self.covered = 0
        self.checkpoint = NONE
        self.saved: dict[int, int] = {}
        self.lost_rows: Ids = np.empty(0, np.int64)

    def declare(self, task: Task, window: Window, unselected: int) -> None:
        self._task, self._window, self.unselected = task, window, unselected

    @property
    def declared(self) -> bool:
        return self._task is not None

    @property
    def task(self) -> Task:
        """The task with ``batch_rows``."""
        assert self._task is not None
        return self._task

    @property
    def name(self) -> str:
        return self.task.spec.name

    @property
    def window(self) -> Window:
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
        """True if the open step cannot fill with the rows there are."""
        return self.open and self.unselected < self.window.free

    def takes(self, at: Ids) -> npt.NDArray[np.bool_]:
        """True for each row, by place, that steps take."""
        taken: npt.NDArray[np.bool_] = self._rows.task(self.name, "state")[at] != APART
        return taken

    def unselected_at(self, at: Ids) -> npt.NDArray[np.bool_]:
        """True for each row, by place, that steps take and that is in none."""
        selected: npt.NDArray[np.bool_] = (self._rows.step[at] == NONE) & self.takes(at)
        return selected

    def not_closed(self, at: Ids) -> npt.NDArray[np.bool_]:
        """True for each row, by place, that is in no full step."""
        step = self._rows.step[at]
        free: npt.NDArray[np.bool_] = (step == NONE) | (step == self.window.step)
        return free

    def push(self, ids: Ids, *, front: bool = False) -> None:
        """Rows are ready for a step; ``front``: before those that are."""
        deadlines = self._rows.deadline[self._rows.at(ids)]
        for deadline in np.unique(deadlines).tolist():
            key = None if deadline == NONE else deadline
            if key not in self.ready:
                self.ready[key] = ReadyQueue(self._rows, self.name)
            queue, part = self.ready[key], ids[deadlines == deadline]
            queue.push_front(part) if front else queue.push(part)

    def withdraw(self, ids: Ids) -> None:
        """Remove admitted, unselected rows from the counts of the staleness rule."""
        at = self._rows.at(ids)
        deadlines = self._rows.deadline[at][self._rows.step[at] == NONE]
        for deadline, count in zip(*np.unique(deadlines[deadlines != NONE], return_counts=True), strict=True):
            self.window.withdraw(int(count), int(deadline))
        self.reselect = True

    def remove_from_open(self, ids: Ids) -> None:
        """Free the slots of rows of the open step that end."""
        count = int((self._rows.step[self._rows.at(ids)] == self.window.step).sum())
        if count:
            self.window.unselect(count)
            self.reselect = True
            self.open_rows = [part[~np.isin(part, ids)] for part in self.open_rows]

    def take_back(self, step: int, ids: Ids) -> None:
        """A full step waits for a trainer again."""
        self.closed = deque(sorted([(step, ids), *self.closed], key=lambda closed: closed[0]))

    def next_to_train(self) -> int:
        """The first step that is not acknowledged."""
        leased = [grant.step for grant in self.task.leases.values()]
        return min([self.window.step, *leased, *(step for step, _ in self.closed)])

    def acknowledged(self) -> list[tuple[int, Ids]]:
        """Acknowledged steps that no checkpoint covers, with their rows."""
        if not self.declared:
            return []
        rows = self._rows
        return [
            (step, ids)
            for step, ids in self.uncovered.items()
            if (rows.task(self.name, "state")[rows.at(ids)] == DONE).all()
        ]
