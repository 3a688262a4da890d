"""Waits of a run: their description, and their limits; the limit of failed groups."""

from __future__ import annotations

import threading
import time
from collections import deque

from ...errors import ConfigError
from ...ledger import StatusReport
from ...ledger.payload_loss import LOST_REASON
from ...queue import QueueClient
from ...types import Event
from ...types import events as ev
from ...types.defaults import STALL_S
from ..specs import TRAINED
from .event_sinks import EventSink

MOST = 5  # number of waiting clients that a text names
ENDING_S = STALL_S  # least time for a trainer's last checkpoint and export after its last step (seconds)
LOOK_S = 1.0  # a wait for a change lasts at most this long (seconds)
WINDOW = 100  # least number of ended groups to take the share of failed ones of
KEPT = 1000  # number of failed groups kept by the queue
EXAMPLES = 3  # most examples in an error
EXAMPLE_LENGTH = 1500


def waits_text(report: StatusReport, *workers: str) -> str:
    """Describe the waiting clients with cause and duration; if none waits, the longest lease. The
    rows and waits of ``workers`` come first, then clients in preparation."""
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
        longest = f"{held.name} has held {held.rows} rows of task {held.task!r} for {held.since_s:.1f} s"
        return f"nobody waits for the queue; {longest}"
    return "nobody waits for the queue, and nobody holds rows"


def is_complete(report: StatusReport, task: str = "train") -> bool:
    """True if the stream has ended and a task is done with all of its rows."""
    return report.over and not any(rows for state, rows in report.rows.get(task, {}).items() if state != "done")


class Changes:
    """A counter of changes, to wait for the next change of a condition. Thread-safe.

    seen = changes.count                       # read before the check: a later change ends the wait
    ... check ...
    changes.wait(seen, timeout_s=3.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def notify(self) -> None:
        """Count a change and wake all waiting threads."""
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> None:
        """Wait for a change since ``seen``, or for ``timeout_s``."""
        until = time.monotonic() + timeout_s
        with self._changed:
            # Hazard: a signal that arrives while the main thread falls asleep does not wake it before LOOK_S.
            while self.count == seen and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(min(left_s, LOOK_S))


class StallTimer(EventSink):
    """Time since the last trained step. Thread-safe."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.steps = 0
        self.complete = False
        """True once the queue has no step left to train: the trainer then has at least ``ENDING_S``."""
        self._since = time.monotonic()

    def event(self, event: Event) -> None:
        """Restart the timer if a step was trained."""
        if isinstance(event, ev.StepTrained):
            self.steps += 1
            self._since = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds until the stall."""
        return self._since + self._allowed_s - time.monotonic()

    @property
    def _allowed_s(self) -> float:
        return max(self.timeout_s, ENDING_S) if self.complete else self.timeout_s

    def __str__(self) -> str:
        if self.complete:
            late = f"{self._allowed_s:g} s after the last of {self.steps} steps"
            return f"{late} the trainer has not ended: it saves or exports"
        return f"nothing was trained for {self.timeout_s:g} s, after {self.steps} steps (stall_timeout_s)"


class FailureLimit(EventSink):
    """Counts the failed among the last ended groups of training: ``WINDOW`` of them, or those of a step if it has
    more. Lost payload is nobody's fault, and not counted.

    With ``max_failed`` 0.1 and a window of 100 the eleventh failure ends the run, also if no more than eleven groups
    ended so far; with 0 the first does.
    """

    def __init__(self, max_failed: float, step_groups: int, group_size: int) -> None:
        self._max_failed, self._group_size = max_failed, group_size
        self._window = max(WINDOW, step_groups)
        self._ended: deque[bool] = deque(maxlen=self._window)  # True: failed

    def event(self, event: Event) -> None:
        """Count groups that ended."""
        if isinstance(event, ev.RowsEnded) and event.state != "cancelled" and event.partition in TRAINED:
            failed = event.state == "failed" and not event.reason.startswith(LOST_REASON)
            self._ended.extend([failed] * -(-event.count // self._group_size))

    def check(self, queue: QueueClient) -> None:
        """Raise ConfigError with examples if too many groups failed."""
        failed, limit = sum(tuple(self._ended)), self._max_failed * self._window
        if failed <= limit:
            return
        letters = [each for each in queue.failed(KEPT) if each.partition in TRAINED and each.task][-failed:]
        if len(letters) <= limit:
            return
        text = f"{len(letters)} of the last {self._window} groups failed, and max_failed is {self._max_failed:g}"
        lines = [f"{text}; the last ones:"]
        for each in letters[-EXAMPLES:]:
            newest = ["no reason", *each.reasons][::-1]
            reason = next((reason for reason in newest if "\n" in reason), newest[0])  # one with frames or a log
            lines.append(f"row {each.first} in task {each.task!r}: {reason[:EXAMPLE_LENGTH]}")
        raise ConfigError("\n".join(lines))
