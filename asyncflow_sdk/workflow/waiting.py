"""Waiting: what a run stands still for, in words, and how long it may."""

from __future__ import annotations

import threading
import time

from ..ledger import StatusReport
from ..types import Event
from ..types import events as ev

MOST = 5
"""So many who wait are named."""
ENDING_S = 3600.0
"""What a trainer may take after its last step, for a last checkpoint and its model, where a stall is not given longer."""
LOOK_S = 1.0
"""How long a wait for news lasts at most before the next look (seconds)."""


def what_stands(report: StatusReport, *workers: str) -> str:
    """Who waits for what and since when; where nobody does, who has held rows the longest. ``workers``: what they wait for, or
    hold, comes first; then who is not prepared yet."""
    own = [
        f"{each.name} has held {each.rows} rows of task {each.task!r} for {each.held_s:.1f} s"
        for each in report.sessions
        if each.name in workers and each.rows
    ]
    own += [
        f"{each.name} is {each.prepares} for {each.prepares_s:.1f} s" for each in report.sessions if each.prepares
    ]
    first = sorted(report.waiting, key=lambda name: name not in workers)
    waits = [f"{name} waits {report.waiting[name]}" for name in first]
    more = f"; {len(waits) - MOST} more wait" if len(waits) > MOST else ""
    if own or waits:
        return "; ".join([*own, *waits[:MOST]]) + more
    held = report.oldest
    if held is not None:
        return f"nobody waits for the queue; {held.name} has held {held.rows} rows of task {held.task!r} for {held.since_s:.1f} s"
    return "nobody waits for the queue, and nobody holds rows"


def is_through(report: StatusReport, task: str = "train") -> bool:
    """Whether a task has done all that it will ever be given."""
    return report.over and not any(rows for state, rows in report.rows.get(task, {}).items() if state != "done")


class News:
    """That something has changed, for any number of threads that look, wait, and look again. Thread-safe.

    seen = news.count                       # before one looks: what comes after that ends the wait
    ... look ...
    news.wait(seen, timeout_s=3.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def set(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        with self._changed:
            # Hazard: a signal that arrives while the main thread falls asleep does not wake it. It is handled at the next look.
            while self.count == seen and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(min(left_s, LOOK_S))


class Stall:
    """When a step was trained last. ``hear`` is called with every event, from any thread."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.steps = 0
        self.through = False
        """Whether every step was trained, as the queue has it: then its trainer has ``ENDING_S`` at least."""
        self._since = time.monotonic()

    def hear(self, event: Event) -> None:
        if isinstance(event, ev.StepTrained):
            self.steps += 1
            self._since = time.monotonic()

    @property
    def left_s(self) -> float:
        """Until too much time has passed without a step."""
        allowed_s = max(self.timeout_s, ENDING_S) if self.through else self.timeout_s
        return self._since + allowed_s - time.monotonic()

    def __str__(self) -> str:
        if self.through:
            return f"{max(self.timeout_s, ENDING_S):g} s after the last of {self.steps} steps the trainer has not ended: it saves or exports"
        return f"nothing was trained for {self.timeout_s:g} s, after {self.steps} steps (stall_timeout_s)"
