"""LiveFigures: the figures of a run for its live page, as one JSON object: those of ``asyncflow top``, of the run's
events, and the newest samples.

    figures = LiveFigures("runs/demo")
    figures.json()      # at most one reading of the run a second, however many pages ask
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from ...errors import AsyncFlowError
from ...ledger import StatusReport
from ...types.defaults import CALL_S
from ...workflow.events.event_file import EVENTS
from ...workflow.events.samples import sample_rows
from ...workflow.events.step_files import step_path
from ...workflow.run_directory import RunDirectory
from ..formats import by_name
from ..report.summary import outcome
from ..screens.queue_screen import client_lines
from ..screens.run_progress import RunProgress
from ..screens.run_screen import doing
from ..screens.top import QueueMonitor
from .live_record import WINDOW_S, LiveRecord

FRESH_S = 1.0
"""Figures younger than this are sent again (seconds)."""
MOST_WORKERS = 64
_RECONNECT_S = 0.2
_NUMBERS = ("total_steps", "done", "reward", "reward_mean", "staleness_mean", "staleness_max", "seconds_left")
_OTHERS = ("published", "lag", "tokens_per_s", "ended", "evaluated", "best")


class LiveFigures:
    """The run at ``where``, an address or a directory. ``key``, ``insecure``: as for ``connect``. Raises the
    errors of ``connect``, unless the directory holds the events of an ended run. Thread-safe."""

    def __init__(self, where: str, key: Path | None = None, insecure: bool = False) -> None:
        self._run = where, FRESH_S, key, insecure
        self._directory = None if "://" in where else RunDirectory(Path(where))
        self.title = where if self._directory is None else self._directory.path.resolve().name
        self._record = LiveRecord(None if self._directory is None else self._directory.path / EVENTS)
        self._lock = threading.Lock()
        self._sent, self._sent_s = b"", -math.inf
        self._sampled: tuple[int, list[Any]] = (-1, [])
        self._monitor: QueueMonitor | None = None
        try:
            self._monitor = QueueMonitor(*self._run, CALL_S)
        except AsyncFlowError:
            if not self._record.exists:
                raise

    def close(self) -> None:
        """Disconnect from the run."""
        with self._lock:
            self._disconnect()

    def json(self) -> bytes:
        """Return the figures. Blocks for at most the time of one call to the queue."""
        with self._lock:
            if time.monotonic() - self._sent_s >= FRESH_S:
                self._sent = msgspec.json.encode(self._read())
                self._sent_s = time.monotonic()
            return self._sent

    def _read(self) -> dict[str, Any]:
        report = self._report()
        self._record.read()
        run, summary = self._record.progress, {} if self._directory is None else self._directory.read_summary()
        run.total_steps = (report.steps if report is not None else summary.get("steps_wanted")) or 0
        status, tone, sentence = ("running", "good", "") if report is not None else outcome(summary)
        now_s = run.now_s if report is None else time.monotonic()
        return {
            "title": self.title,
            "status": status,
            "tone": tone,
            "sentence": sentence,
            "error": summary.get("error") if report is None else None,
            "elapsed_s": now_s - run.start_s,
            "window_s": WINDOW_S,
            "run": {name: getattr(run, name) for name in (*_NUMBERS, *_OTHERS)},
            "queue": None if report is None or self._monitor is None else self._monitor.plain(report),
            "workers": self._workers(run, report, now_s),
            "curves": self._record.curves(),
            "samples": self._samples(),
            "notes": self._record.notes(),
        }

    def _report(self) -> StatusReport | None:
        """Return the status of the queue; None without a server. Finds the next server of a resumed
        run."""
        try:
            self._monitor = self._monitor or QueueMonitor(*self._run, _RECONNECT_S)
            return self._monitor.sample()
        except AsyncFlowError:
            self._disconnect()
            return None

    def _disconnect(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self._monitor = None

    def _workers(self, run: RunProgress, report: StatusReport | None, now_s: float) -> list[dict[str, Any]]:
        """The workers and other clients: their last work, and what they hold or wait for."""
        clients = {} if report is None else {name: line for line in client_lines(report) for name in line.names}
        lanes, found = self._record.lanes(now_s), []
        for name in sorted({*run.workers, *lanes, *clients}, key=by_name)[:MOST_WORKERS]:
            worker, line = run.workers.get(name), clients.get(name)
            spends = "" if worker is None else doing(worker, "", now_s, 0)[0]
            found.append(
                {
                    "name": name,
                    "state": "" if worker is None else worker.state,
                    "spends": spends,
                    "version": None if worker is None else worker.version,
                    "now": "" if line is None else line.text,
                    "since_s": None if line is None else line.since_s,
                    "waits": line is not None and line.waits,
                    "lane": lanes.get(name, []),
                }
            )
        return found

    def _samples(self) -> dict[str, Any]:
        """The first rows of the newest recorded step."""
        known, newest = self._sampled[0], self._record.step
        for step in range(newest, max(known, newest - 3), -1):
            with contextlib.suppress(OSError, ValueError, KeyError):  # not yet written
                self._sampled = step, sample_rows(step_path(self._record.path.parent, step))
                break
        return {"step": self._sampled[0], "rows": self._sampled[1]}
