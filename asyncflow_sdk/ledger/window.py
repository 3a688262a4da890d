"""The staleness rule: which groups may be generated now, and which may join the step being filled.

k is the step being filled (it trains version k), s its free slots of B; a row's deadline is the version its
replica had loaded plus max_staleness; L_j counts admitted, unselected, live rows of deadline j or less.
Invariant H: for all j >= k, L_j <= s + (j - k)·B. Both checks below keep it; so no row outlives its
deadline unselected, and none can block a step for ever.
"""

from __future__ import annotations

from collections import Counter

from ..errors import ConfigError


class Window:
    """Counters of the rule; the rows themselves are the ledger's. ``deadline`` None: no limit."""

    def __init__(self, batch_rows: int, max_staleness: int, steps: int | None = None) -> None:
        if batch_rows < 1:
            raise ConfigError(f"a step needs at least 1 row, not {batch_rows}")
        self.batch_rows = batch_rows
        self.max_staleness = max_staleness
        self.steps = steps
        self.step = 0
        self.free = batch_rows
        self._admitted: Counter[int] = Counter()

    def load(self, deadline: int) -> int:
        """L_j: admitted, unselected, live rows of this deadline or an earlier one."""
        return sum(n for d, n in self._admitted.items() if d <= deadline)

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

    def room(self, deadline: int) -> int:
        """How many rows may be admitted with this deadline."""
        if deadline < self.step or self.finished:
            return 0
        room = min(self._slack(j) for j in {deadline, *self._admitted} if j >= deadline)
        if self.slots is not None:
            room = min(room, self.slots - sum(self._admitted.values()))
        return max(0, room)

    def selectable(self, deadline: int | None) -> int:
        """How many ready rows of this deadline may join the step, leaving room for earlier ones."""
        if self.finished:
            return 0
        earlier = [j for j in {self.step, *self._admitted} if j >= self.step and (deadline is None or j < deadline)]
        return max(0, min([self.free, *(self._slack(j) for j in earlier)]))

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
        assert self.free == 0 and self.load(self.step) == 0, "a step closes full, leaving nothing overdue"
        self.step += 1
        self.free = self.batch_rows
        self._admitted = +self._admitted

    def open_again(self, step: int, back: Counter[int]) -> None:
        """This step and all later ones are empty again. ``back``: the rows that were in them, by deadline."""
        self.step, self.free = step, self.batch_rows
        self._admitted.update(back)
        assert self.holds()

    def holds(self) -> bool:
        """Whether invariant H holds now."""
        due = [j for j in {self.step, *self._admitted} if j >= self.step]
        return all(self._slack(j) >= 0 for j in due) and self.load(self.step - 1) == 0

    def _slack(self, j: int) -> int:
        """What H leaves at j. Between admitted deadlines it only grows, so they are all that need checking."""
        return self.free + (j - self.step) * self.batch_rows - self.load(j)
