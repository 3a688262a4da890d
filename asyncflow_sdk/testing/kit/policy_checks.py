"""Samplers and staleness policies: what ``check_sampler`` and ``check_staleness_policy`` ask."""

from __future__ import annotations

from ..samplers import check_sampler
from ..staleness import check_staleness_policy
from .check import check
from .plain_lab import PlainLab


@check(
    "sampler", "basic",
    means="rows are given twice or never, a resumed run chooses others than before, or every request waits for the sampler",
    look="choose(): a function of its arguments and options alone, over arrays",
)  # fmt: skip
def choices(lab: PlainLab) -> None:
    """Valid positions, the same for the same candidates; no more work than in proportion; every row chosen some time."""
    check_sampler(lab.made)


@check(
    "staleness", "basic",
    means="the run stands still for ever, or trains tokens older than was promised",
    look="admit(), select() and evict(): functions of the filling alone, which always let something move",
)  # fmt: skip
def schedules(lab: PlainLab) -> None:
    """Random schedules get through all their steps, in queues as small as least_rows allows, and nothing too late is kept."""
    check_staleness_policy(lab.made)
