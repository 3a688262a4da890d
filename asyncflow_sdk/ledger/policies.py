"""The built-in staleness policies. ``docs/staleness.md`` compares them."""

from __future__ import annotations

from ..interfaces import StalenessPolicy, StepWindow


class Wait(StalenessPolicy):
    """No trained token is older than max_staleness and no row expires: steps wait for stragglers.

    k is the step being filled (it trains version k), s its free slots of B, L_j the rows under way
    with deadline j or earlier. Invariant H: for all j >= k, L_j <= s + (j - k)·B. Both methods
    preserve it, so no row passes its deadline unselected, and no row can block a step for ever.
    """

    promise = "no trained token is older than max_staleness, and no row is given up: steps wait for stragglers"

    def admit(self, filling: StepWindow, deadline: int) -> int:
        """Return how many rows with ``deadline`` may start."""
        # slack grows between admitted deadlines: check only these
        return min(filling.slack(j) for j in {deadline, *filling.admitted} if j >= deadline)

    def select(self, filling: StepWindow, deadline: int | None) -> int:
        """Return how many ready rows may join, less the room that earlier deadlines need."""
        due = {filling.step, *filling.admitted}
        earlier = [j for j in due if j >= filling.step and (deadline is None or j < deadline)]
        return min([filling.free, *(filling.slack(j) for j in earlier)])

    @staticmethod
    def holds(filling: StepWindow) -> bool:
        """True if invariant H holds."""
        due = [j for j in {filling.step, *filling.admitted} if j >= filling.step]
        return all(filling.slack(j) >= 0 for j in due) and filling.load(filling.step - 1) == 0


class Drop(StalenessPolicy):
    """No trained token is older than max_staleness, and nothing waits for stragglers: a step takes
    complete groups, the earliest deadline first. Groups left past their deadline expire and are
    replaced.

    Rows under way are bounded in all: with deadline d, n more may start while L + n <= s + (d -
    k)·B. So when a step closes, at most max_staleness·B rows are under way and can expire: at most
    max_staleness / (max_staleness + 1) of all rows, none at 0. Long rows expire first: watch the
    lengths of trained rows.
    """

    promise = "no trained token is older than max_staleness: rows that take too long expire and are replaced"

    def admit(self, filling: StepWindow, deadline: int) -> int:
        """Return how many rows with ``deadline`` may start."""
        return filling.free + (deadline - filling.step) * filling.batch_rows - filling.total


class Count(StalenessPolicy):
    """Bounds the number of rows under way, not the age of a token: AReaL's capacity (arXiv
    2505.24298, section 5.1).

    While version v is the newest, (max_staleness + v + 1)·B rows may have started. Accepted rows
    and rows under way count; filtered and failed ones do not. Tokens are no older than
    max_staleness on average, but a single one may be: a slow row is trained whenever it is
    complete, and a lagging replica continues.
    """

    promise = "only the number of rows under way is bounded: a trained token may be older than max_staleness"
    bounded = False

    def admit(self, filling: StepWindow, deadline: int) -> int:
        """Return how many rows may start, whatever their deadline."""
        steps = filling.max_staleness + filling.current + 1 - filling.step  # after the open one
        taken = filling.batch_rows - filling.free
        return steps * filling.batch_rows - taken - filling.total
