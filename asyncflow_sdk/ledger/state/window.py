"""The window: which step is being filled, its free slots, and the rows under way for it and for later ones, counted.

What may come in and what has to go is a staleness policy's to say (``policies``); what it is shown is a ``StepWindow``.
"""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType

from ...errors import ConfigError
from ...interfaces import StepWindow


class Window:
    """Counters of the rows; the rows themselves are the ledger's. ``deadline`` None: of rows that came complete."""

    def __init__(self, batch_rows: int, max_staleness: int, steps: int | None = None) -> None:
        if batch_rows < 1:
            raise ConfigError(f"a step needs at least 1 row, not {batch_rows}")
        self.batch_rows = batch_rows
        self.max_staleness = max_staleness
        self.steps = steps
        self.step = 0
        self.free = batch_rows
        self._admitted: Counter[int] = Counter()

    def filling(self, current: int) -> StepWindow:
        """What a policy is shown; good until a counter changes. ``current``: the step that the newest version trains."""
        admitted = MappingProxyType(self._admitted)
        return StepWindow(self.step, self.batch_rows, self.free, self.max_staleness, current, admitted)

    def load(self, deadline: int) -> int:
        """L_j: admitted, unselected, live rows of this deadline or an earlier one."""
        return sum(n for d, n in self._admitted.items() if d <= deadline)

    def has(self, deadline: int) -> bool:
        """Whether admitted, unselected, live rows have this deadline."""
        return self._admitted[deadline] > 0

    @property
    def under_way(self) -> int:
        """Admitted, unselected, live rows."""
        return sum(self._admitted.values())

    @property
    def finished(self) -> bool:
        """Whether every step has been filled."""
        return self.steps is not None and self.step >= self.steps

    @property
    def slots(self) -> int | None:
        """Free slots of this step and all later ones; None without a last step."""
        if self.steps is None:
            return None
        return 0 if self.finished else self.free + (self.steps - 1 - self.step) * self.batch_rows

    @property
    def wanted(self) -> int:
        """Slots that are worth bringing rows for: all there are, or, without a last step, those of this step and of
        as many later ones as may be generated for now, and one more."""
        if self.slots is not None:
            return self.slots
        return self.free + (self.max_staleness + 1) * self.batch_rows

    def admit(self, rows: int, deadline: int) -> None:
        self._admitted[deadline] += rows

    def withdraw(self, rows: int, deadline: int | None) -> None:
        """Admitted, unselected rows ended or lost their admission."""
        if deadline is not None:
            self._admitted[deadline] -= rows

    def select(self, rows: int, deadline: int | None) -> None:
        self.withdraw(rows, deadline)
        self.free -= rows

    def unselect(self, rows: int) -> None:
        """Rows of the step being filled ended: their slots are free again."""
        self.free += rows

    def stop(self) -> None:
        """No step will be filled from here on; the open one is empty again."""
        assert self.free == self.batch_rows
        self.steps = self.step

    def close(self) -> None:
        """The step is full; the next one fills."""
        assert self.free == 0, "a step closes full"
        self.step += 1
        self.free = self.batch_rows
        self._admitted = +self._admitted

    def open_again(self, step: int, back: Counter[int]) -> None:
        """This step and all later ones are empty again. ``back``: the rows that were in them, by deadline."""
        self.step, self.free = step, self.batch_rows
        self._admitted.update(back)
