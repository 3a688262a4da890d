"""The window: the step being filled, its free slots, and the rows under way, counted by deadline.

A staleness policy (``policies``) reads a ``StepWindow`` and decides which rows to admit or evict.
"""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType

from ...errors import ConfigError
from ...interfaces import StepWindow


class Window:
    """Counters only; the ledger keeps the rows. ``deadline`` None: rows put complete."""

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
        """Return the policy's view, valid until a counter changes. ``current``: the step trained by
        the newest version."""
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
        """Slots to put rows for: all slots or, without a last step, those of this step and of the
        max_staleness + 1 steps after it."""
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
