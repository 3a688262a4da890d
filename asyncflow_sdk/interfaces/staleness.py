"""StalenessPolicy: decides the groups to generate, to train, and to expire. Pass one of your own or register it as an
adapter of kind "staleness", and check it with ``asyncflow_sdk.testing.check_staleness_policy``; the guide of
staleness has an example.

    af.serve("runs/mine", max_staleness=2, staleness_policy=Patient)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StepWindow:
    """The step being filled, and the rows in progress for this and later steps. Read-only. ``step``: its number k; it
    trains version k. ``batch_rows``: rows of a step, B. ``free``: rows missing from this step. ``current``: the step
    training the newest published version; -1 before the first. ``admitted``: admitted live rows outside of steps, by
    *deadline*: the last step to train them without a token older than ``max_staleness``, the version loaded by their
    replica at the lease plus ``max_staleness``."""

    step: int
    batch_rows: int
    free: int
    max_staleness: int
    current: int
    admitted: Mapping[int, int]

    @property
    def total(self) -> int:
        """Rows in progress: admitted, live, in no step."""
        return sum(self.admitted.values())

    def load(self, deadline: int) -> int:
        """Return L_j, the rows in progress with this deadline or an earlier one."""
        return sum(rows for due, rows in self.admitted.items() if due <= deadline)

    def slack(self, deadline: int) -> int:
        """Return the spare slots up to ``deadline``: s + (j - k)·B - L_j, with s = ``free``."""
        return self.free + (deadline - self.step) * self.batch_rows - self.load(deadline)


class StalenessPolicy(ABC):
    """Makes decisions from a ``StepWindow``. Methods must depend on their arguments and the policy's options only: no
    clock, no random state, no state between calls. The queue's server makes the policy from plain options and calls
    it in its own thread: it delays all clients. After a server restart, recorded answers are replayed instead of new
    calls. An exception, or an answer other than a number, fails all lease requests with PluginError.

    ``promise``: the guarantee for every trained token and its cost, in one line for people. ``bounded``: True if no
    token is older than max_staleness; the ledger then admits no row into a step past its deadline, also against
    ``select``.
    """

    promise: str = ""
    bounded: bool = True

    @abstractmethod
    def admit(self, window: StepWindow, deadline: int) -> int:
        """Return the number of rows to be started by a replica, as whole groups; 0 or less: none now. If the answer
        never reaches a group's size, the replica starves. Also called for a newer version. ``deadline``: of these
        rows, the replica's version plus max_staleness. With ``bounded``, it has not passed."""

    def select(self, window: StepWindow, deadline: int | None) -> int:
        """Return the number of complete rows with this ``deadline`` to join the step, at most ``free`` (the default).
        ``deadline`` None: rows put complete, without a version. Called for the earliest deadline first."""
        return window.free

    def evict(self, window: StepWindow) -> Collection[int]:
        """Return deadlines to give up. Called when a step has closed and the next one, ``window.step``, is being
        filled. Groups with these deadlines expire, also during generation, and are replaced, unless in a step.
        Default with ``bounded``: the passed ones."""
        return [due for due in window.admitted if due < window.step] if self.bounded else ()

    def least_rows(self, batch_rows: int, max_staleness: int) -> int:
        """Return the least capacity in rows without a deadlock; a smaller queue is refused."""
        return batch_rows
