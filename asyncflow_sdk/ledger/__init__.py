"""The ledger: a pure state machine over rows, tasks, leases, steps and versions."""

from ..types.reports import TERMINAL, Audit, StatusReport
from ..types.tasks import TaskSpec
from .commands import pack_ids, unpack_ids
from .ledger import Ledger
from .state.context import Effects
from .state.steps import Window

__all__ = [
    "TERMINAL",
    "Audit",
    "Effects",
    "Ledger",
    "StatusReport",
    "TaskSpec",
    "Window",
    "pack_ids",
    "unpack_ids",
]
