"""Step leases: a step returns from its lease as a whole."""

from __future__ import annotations

from ..types import events as ev
from .commands import Ids
from .state import LedgerState
from .state.grants import Grant
from .state.rows import LEASED, NONE, SELECTED


class StepLeases:
    """Ends leases of steps before they are acknowledged."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state

    def give_back(self, grant: Grant, reason: str) -> None:
        """Return the rows of a step to it, and end its lease. The parts of a step in parts stay as
        they are, for the next lease."""
        steps, rows, name = self._state.steps, self._state.rows, grant.task
        ids = self._state.leases.outstanding(grant)
        if len(ids):
            publish_return(self._state, grant, ids, reason)
            at = rows.at(ids)
            rows.task(name, "token")[at] = NONE
            rows.task(name, "state")[at] = SELECTED
            self._state.leases.release(grant, len(ids))
            self._state.tasks[name].move(len(ids), LEASED, SELECTED)
            if grant.parts == NONE and len(ids) < len(grant.ids):
                steps.parts.pop(grant.step, None)  # a part of it was acknowledged under a whole lease
            steps.take_back(grant.step, ids)
        if grant.parts != NONE:
            self._state.leases.note_void(grant.token, reason)
        self._state.context.wake(self._state.tasks[name].place)


def publish_return(state: LedgerState, grant: Grant, ids: Ids, reason: str) -> None:
    """Publish the event of rows returned from a lease."""
    context, worker = state.context, state.sessions.name(grant.session)
    context.publish(
        ev.LeaseReturned(time_s=context.now, worker=worker, task=grant.task, count=len(ids), reason=reason)
    )
