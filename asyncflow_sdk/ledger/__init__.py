"""The ledger: a pure state machine over rows, tasks, leases, steps and versions."""

from ..types.reports import TERMINAL, Audit, FailedGroup, StatusReport
from ..types.tasks import TaskSpec
from .commands import AnyCommand, AnyReply, pack_ids, unpack_ids
from .ledger import Ledger
from .state.context import Effects
from .state.steps import Window

__all__ = [
    "TERMINAL",
    "AnyCommand",
    "AnyReply",
    "Audit",
    "Effects",
    "FailedGroup",
    "Ledger",
    "StatusReport",
    "TaskSpec",
    "Window",
    "pack_ids",
    "unpack_ids",
]
