"""The staleness policies that come with the SDK. ``docs/staleness.md`` compares them."""

from __future__ import annotations

from ..interfaces import StalenessPolicy, StepWindow


class Wait(StalenessPolicy):
    """No trained token is older than max_staleness, and no row is lost for it: steps wait for stragglers.

    k is the step being filled (it trains version k), s its free slots of B, L_j the rows under way with deadline j or less.
    Invariant H: for all j >= k, L_j <= s + (j - k)·B. Both checks keep it; so no row outlives its deadline
    unselected, and none can block a step for ever.
    """

    promise = "no trained token is older than max_staleness, and no row is given up: steps wait for stragglers"

    def admit(self, window: StepWindow, deadline: int) -> int:
        # between admitted deadlines slack only grows, so they are all that need checking
        return min(window.slack(j) for j in {deadline, *window.admitted} if j >= deadline)

    def select(self, window: StepWindow, deadline: int | None) -> int:
        """Leaves the room that rows with an earlier deadline need."""
        due = {window.step, *window.admitted}
        earlier = [j for j in due if j >= window.step and (deadline is None or j < deadline)]
        return min([window.free, *(window.slack(j) for j in earlier)])

    @staticmethod
    def holds(window: StepWindow) -> bool:
        """Whether invariant H holds."""
        due = [j for j in {window.step, *window.admitted} if j >= window.step]
        return all(window.slack(j) >= 0 for j in due) and window.load(window.step - 1) == 0


class Drop(StalenessPolicy):
    """No trained token is older than max_staleness, and nothing waits for stragglers: a step takes what is complete, the
    earliest deadline first, and groups that it leaves behind past their deadline expire and are replaced.

    Rows under way are bounded in all: with deadline d, n more may begin while L + n <= s + (d - k)·B. So when a step
    closes at most max_staleness·B rows are under way, and no more than those can expire with it: of all rows at most
    max_staleness / (max_staleness + 1), and none at 0. What takes long expires first: look at the lengths of what is trained.
    """

    promise = "no trained token is older than max_staleness: rows that take too long expire and are replaced"

    def admit(self, window: StepWindow, deadline: int) -> int:
        return window.free + (deadline - window.step) * window.batch_rows - window.total


class Count(StalenessPolicy):
    """Bounds how many rows are under way, and no token's age: AReaL's capacity (arXiv 2505.24298, section 5.1).

    (max_staleness + v + 1)·B rows may have been begun while version v is the newest; accepted ones and those under
    way count, filtered and failed ones do not. On average tokens are no older than max_staleness; any one of them may be: a row that
    takes long is trained whenever it is done, and a replica that lags goes on.
    """

    promise = "only the number of rows under way is bounded: a trained token may be older than max_staleness"
    bounded = False

    def admit(self, window: StepWindow, deadline: int) -> int:
        steps = window.max_staleness + window.current + 1 - window.step  # past the one being filled
        taken = window.batch_rows - window.free
        return steps * window.batch_rows - taken - window.total
