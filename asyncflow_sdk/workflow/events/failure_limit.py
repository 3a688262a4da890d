"""FailureLimit: the share of failed groups above which a run ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...errors import ConfigError
from ...ledger.payload_loss import LOST_REASON
from ...queue import QueueClient
from ...types import Event
from ...types import events as ev
from ..specs import TRAINED
from .event_sinks import EventSink

WINDOW = 100
"""Least number of ended groups to take the share of."""
KEPT = 1000
"""Number of failed groups kept by the queue."""
EXAMPLES = 3
"""Most examples in an error."""
EXAMPLE_LENGTH = 1500


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
        examples = [
            f"row {each.first} in task {each.task!r}: {_told(each.reasons)[:EXAMPLE_LENGTH]}"
            for each in letters[-EXAMPLES:]
        ]
        raise ConfigError("\n".join([f"{text}; the last ones:", *examples]))


def _told(reasons: Sequence[str]) -> str:
    """Return the newest reason with frames or a log; without one, the newest."""
    return next((each for each in reversed(reasons) if "\n" in each), reasons[-1] if reasons else "no reason")
