"""Flow: rates of a queue, from the differences between its status reports.

flow = Flow(); flow.add(queue.status()); ...; flow.add(queue.status())
flow.came["reward"], flow.passed["reward"], flow.put, flow.ended, flow.written      # per second; nan at first
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

from ..ledger import StatusReport

WINDOW_S = 5.0
HISTORY = 240


class Flow:
    """Rates over the last five seconds, and how many rows a second passed each task, sample by sample."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._reports: deque[StatusReport] = deque()
        self.history: dict[str, deque[float]] = {}

    def add(self, report: StatusReport) -> None:
        """Take a report in. One that is older than the last is of another server: it begins anew."""
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
        """Rows put a second."""
        return self._rate(lambda report: report.put)

    @property
    def ended(self) -> float:
        """Rows a second that reached a terminal state."""
        return self._rate(lambda report: sum(report.ended.values()))

    @property
    def written(self) -> float:
        """Bytes a second that were put and given."""
        return self._rate(lambda report: report.written_bytes)

    @property
    def came(self) -> Mapping[str, float]:
        """By task: rows a second that became ready for it."""
        return {task: self._rate(_came(task)) for task in self._tasks()}

    @property
    def passed(self) -> Mapping[str, float]:
        """By task: rows a second that it completed."""
        return {task: self._rate(_passed(task)) for task in self._tasks()}

    def _tasks(self) -> list[str]:
        return list(self._reports[-1].completed) if self._reports else []

    def _rate(self, count: Callable[[StatusReport], int]) -> float:
        if len(self._reports) < 2:
            return math.nan
        first, last = self._reports[0], self._reports[-1]
        return (count(last) - count(first)) / (last.time_s - first.time_s)


def _came(task: str) -> Callable[[StatusReport], int]:
    return lambda report: report.arrived.get(task, 0)


def _passed(task: str) -> Callable[[StatusReport], int]:
    return lambda report: report.completed.get(task, 0)
