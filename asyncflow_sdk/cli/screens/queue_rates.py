"""Rates of a queue: differences between its status reports.

rates = QueueRates(); rates.add(queue.status()); ...; rates.add(queue.status())
rates.arrived["reward"], rates.completed["reward"], rates.put, rates.ended, rates.written_bytes   #
per second; nan at first
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

from ...ledger import StatusReport

WINDOW_S = 5.0
HISTORY = 240


class QueueRates:
    """Rates over the last five seconds. ``history``: rows per second completed by each task, one
    value per report."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._reports: deque[StatusReport] = deque()
        self.history: dict[str, deque[float]] = {}

    def add(self, report: StatusReport) -> None:
        """Add a report. One older than the last is from a new server: discard the earlier reports."""
        if self._reports and report.time_s <= self._reports[-1].time_s:
            self._reports.clear()
        if self._reports:
            last = self._reports[-1]
            seconds = report.time_s - last.time_s
            for task, count in report.completed.items():
                rates = self.history.setdefault(task, deque(maxlen=HISTORY))
                rates.append((count - last.completed.get(task, 0)) / seconds)
        self._reports.append(report)
        while len(self._reports) > 2 and report.time_s - self._reports[1].time_s >= self._window_s:
            self._reports.popleft()

    @property
    def put(self) -> float:
        """Rows put per second."""
        return self._rate(lambda report: report.put)

    @property
    def ended(self) -> float:
        """Rows per second that reached a terminal state."""
        return self._rate(lambda report: sum(report.ended.values()))

    @property
    def written_bytes(self) -> float:
        """Bytes written per second, by puts and by tasks."""
        return self._rate(lambda report: report.written_bytes)

    @property
    def arrived(self) -> Mapping[str, float]:
        """Rows per second that became ready, by task."""
        return self._by_task(lambda report: report.arrived)

    @property
    def completed(self) -> Mapping[str, float]:
        """Rows per second completed, by task."""
        return self._by_task(lambda report: report.completed)

    def _by_task(self, counts: Callable[[StatusReport], Mapping[str, int]]) -> dict[str, float]:
        tasks = self._reports[-1].completed if self._reports else ()
        return {task: self._rate(lambda report, task=task: counts(report).get(task, 0)) for task in tasks}  # type: ignore[misc]

    def _rate(self, count: Callable[[StatusReport], int]) -> float:
        if len(self._reports) < 2:
            return math.nan
        first, last = self._reports[0], self._reports[-1]
        return (count(last) - count(first)) / (last.time_s - first.time_s)
