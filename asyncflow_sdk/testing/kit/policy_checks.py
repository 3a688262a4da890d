"""Checks of samplers and staleness policies, by ``check_sampler`` and ``check_staleness_policy``."""

from __future__ import annotations

from ..samplers import check_sampler
from ..staleness import check_staleness_policy
from .check import check
from .plain_lab import PlainLab


@check(
    "sampler", "basic",
    impact="rows are given twice or never, a resumed run chooses others than before, or every request waits for the sampler",
    hint="choose(): a function of its arguments and options alone, over arrays",
)  # fmt: skip
def choices(lab: PlainLab) -> None:
    """Positions are valid, the same for equal candidates, chosen in time proportional to the
    candidates, and reach every row in the end."""
    check_sampler(lab.made)


@check(
    "staleness", "basic",
    impact="the run stands still for ever, or trains tokens older than was promised",
    hint="admit(), select() and evict(): functions of the filling alone; in each state one of them must permit progress",
)  # fmt: skip
def schedules(lab: PlainLab) -> None:
    """Random schedules finish all their steps, in queues of least_rows, and rows too late for any
    step are evicted."""
    check_staleness_policy(lab.made)
