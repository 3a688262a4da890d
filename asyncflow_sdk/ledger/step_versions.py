"""Step versions: the version trained by each step."""

from __future__ import annotations

from .state import LedgerState
from .state.grants import Grant
from .state.rows import NONE


class StepVersions:
    """Relates steps to versions: they diverge after rollbacks and when steps are trained again."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state

    def version_of(self, step: int) -> int:
        """Return the version that a step trains. It is no lower than the version announced to its holder, nor than
        implied by versions announced to holders of earlier steps, when the offset may have been larger."""
        told = (
            grant.newest + step - grant.step for grant in self._state.steps.task.leases.values() if grant.step <= step
        )
        return max([self._state.versions.lineage.version(step), *told])

    def in_training(self) -> int:
        """Return the first step with an unpublished update."""
        steps, versions = self._state.steps, self._state.versions
        step, waiting = steps.next_to_train(), {step for step, _ in steps.closed}
        last = steps.window.step
        while versions.current > versions.lineage.version(step) and step + 1 < last and step + 1 not in waiting:
            step += 1  # published but not acknowledged, while the next one is trained
        return step

    def lease(self, step: int) -> None:
        """Note that a step is leased. If its update is current, it trains the next version."""
        versions = self._state.versions
        if versions.current > versions.lineage.version(step):
            versions.lineage.resume(versions.current, step)

    def place(self, version: int) -> None:
        """Note that a version becomes current. It is trained by the step after the one in training,
        or by an earlier one; the first version by the first step."""
        if not self._state.steps.declared:
            return
        versions, step = self._state.versions, self.in_training()
        most = step if versions.current == NONE else min(versions.lineage.step(version), step + 1)
        versions.lineage.place(version, most)

    def acknowledge(self, grant: Grant) -> None:
        """Note that a step is acknowledged. If its update was never published (the step was leased
        before a rollback, or trained again), the next step trains the current version."""
        versions = self._state.versions
        lineage, last = versions.lineage, versions.lineage.last
        if versions.current != last.first:
            return
        before = grant.offsets < len(lineage.changes)
        if last.resumed != NONE:  # later steps may have been acknowledged before it
            lost = grant.step == last.resumed
        elif last.rolled_back:
            lost = before or grant.step < lineage.step(lineage.origin(last.parent))
        else:
            lost = before and grant.newest < versions.current
        if lost:
            last.offset = min(last.offset, versions.current - self._state.steps.next_to_train())
            self._state.tasks.wake_replicas()
