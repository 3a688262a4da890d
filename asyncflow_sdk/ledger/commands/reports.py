"""Commands that ask a ledger about itself."""

from __future__ import annotations

from ...types.reports import FailedGroup
from .roots import Command, Reply


class GetAudit(Command, frozen=True, tag="get_audit"):
    """Ask for the balance: ``Audit``."""


class GetStatus(Command, frozen=True, tag="get_status"):
    """Ask for rows by task and state, and for the requests that wait: ``StatusReport``."""


class GetFailed(Command, frozen=True, tag="get_failed"):
    """Ask for the newest ``count`` groups that failed for good."""

    count: int = 100


class Failed(Reply, frozen=True, tag="failed"):
    """``groups``: oldest first. ``forgotten``: number of older ones that are no longer kept."""

    groups: tuple[FailedGroup, ...]
    forgotten: int
