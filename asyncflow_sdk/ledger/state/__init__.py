"""The state of a ledger, in parts that own their attributes. The rules decide about changes."""

from __future__ import annotations

from .context import Context
from .homes import Homes
from .idempotency import IdempotencyKeys
from .metrics import DeadLetters, RowMetrics
from .rows import Budget, Columns, Partitions, QueueLimits, Rows
from .sessions import ParkedRequests, Sessions
from .steps import Steps
from .tasks import Leases, Tasks
from .versions import Versions


class LedgerState:
    """For the arguments see ``Ledger``."""

    def __init__(self, initial_rows: int, kept_keys: int) -> None:
        self.context = Context()
        self.rows = Rows(initial_rows)
        self.partitions = Partitions(self.rows)
        self.columns = Columns(self.context, self.rows, self.partitions)
        self.limits = QueueLimits()
        self.budget = Budget(self.rows, self.limits)
        self.sessions = Sessions()
        self.homes = Homes(self.context, self.limits, self.sessions)
        self.parked = ParkedRequests(self.context, self.sessions)
        self.tasks = Tasks(self.context, self.rows, self.partitions)
        self.leases = Leases(self.context, self.rows, self.sessions, self.tasks)
        self.steps = Steps(self.rows)
        self.versions = Versions(self.rows)
        self.metrics = RowMetrics(self.context, self.rows, self.tasks)
        self.dead_letters = DeadLetters()
        self.keys = IdempotencyKeys(kept_keys)
