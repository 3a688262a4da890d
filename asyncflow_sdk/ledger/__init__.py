"""The ledger: a pure state machine over rows, tasks, leases, steps and versions."""

from .commands import (
    TERMINAL,
    AnyCommand,
    AnyReply,
    Audit,
    FailedGroup,
    StatusReport,
    TaskSpec,
    pack_ids,
    unpack_ids,
)
from .ledger import Ledger
from .state.context import Effects
from .state.window import Window

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
