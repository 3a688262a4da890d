"""Recorder: the event sink of a run's directory.

workflow.json       the workflow as asked for
events.jsonl        one event a line
steps/000017.safetensors
                    the rows of step 17, every column: ids, groups, and a ragged column as name and name.offsets;
                    the version that was current when each row was completed, and the publish lag of each replica
summary.json        the outcome
logs/               the output of each worker
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from ...errors import ConfigError
from ...memory import make_private_directory, private_opener
from ...queue.listeners import GROUPS_PER_SAMPLE, StepRows
from ...types import LOSS_MASK, VERSION_SPANS, Event
from ...types import events as ev
from .event_file import EVENTS, LASTING
from .event_sinks import MOST_EVENTS, EventThread
from .first_steps import FirstSteps
from .statistics import RunStatistics
from .step_files import STEP_FILE, read_batch, step_path, write_batch

MOST_WAITING = 256
"""Most steps that wait for the disk. Beyond it ``step`` writes the oldest in its caller's thread, and training
waits; not in a run with rows on other hosts, for which that thread must not wait: there, checkpoints wait."""
CLOSE_S = 60.0
PUBLISH_LAG = "publish_lag"
SAMPLED = (
    f"steps/ has a sample of each step's rows, one group in {GROUPS_PER_SAMPLE}, and so has the staleness of the summary:"
    " the rows are on other hosts"
)

_counted = msgspec.json.Decoder(ev.Begun | ev.RowsEnded | ev.Published | ev.Loaded)
_COUNTED = re.compile(rb'{"event":"(begun|rows|published|loaded)"')
_TIME = re.compile(rb'"time_s":(\d+\.?\d*)')


class _RecordedStep(msgspec.Struct):
    """A trained step in events.jsonl. JSON has no NaN: such a metric is null."""

    step: int
    metrics: dict[str, float | None]


class Recorder(EventThread):
    """Writes events and steps in its own thread, so that neither the queue nor a trainer waits for
    the disk. Only ``StepTrained`` is written before the step's acknowledgement, so that a killed
    and resumed run has every step.

    ``again``: continue the files of an earlier process; else ConfigError is raised if there are some.
    After an error of the disk a file is not written any more; ``errors`` names it once.
    """

    records_steps = True

    def __init__(self, directory: Path, *, again: bool = False) -> None:
        super().__init__("recorder", MOST_EVENTS)
        make_private_directory(directory)
        make_private_directory(directory / "steps")
        self._directory = directory
        self._torn = False  # events.jsonl is not written any more
        try:
            self._log = open(directory / EVENTS, "ab" if again else "xb", opener=private_opener)  # noqa: SIM115
        except FileExistsError:
            raise ConfigError(f"{directory} already holds a run; choose another directory, or move it away") from None
        self._steps: deque[tuple[int, StepRows]] = deque()  # waiting for the disk, the oldest first
        self._sampled = False  # True if rows of a step were on other hosts
        self._writing = threading.Lock()  # steps are written one by one, in order
        self._counting = threading.Lock()  # guards ``statistics``, rewards and staleness
        self._rewards: dict[int, float] = {}  # by step: a step trained again counts once
        self.staleness_max = 0
        self.statistics = RunStatistics()
        self._first, self._shown = FirstSteps(), ""  # and its warning, not reported yet
        self._report: Callable[[Event], None] = self.put
        self._lost, self._last_lost = 0, ""  # steps that could not be written
        self.errors: list[str] = []
        self.notes: list[Event] = []
        """Events of its own, for the other sinks, after ``close``."""
        if again:
            self._recall()
        self.thread.start()

    @property
    def steps(self) -> int:
        """Number of steps trained."""
        return len(self._rewards)

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step, in order."""
        return [self._rewards[step] for step in sorted(self._rewards)]

    def event(self, event: Event) -> None:
        """Write a trained step at once, any other event in the recorder's thread."""
        if isinstance(event, ev.StepTrained):
            self._first.trained(event.step, event.metrics)
            self._write(event, at_once=True)
        self.put(event)

    def connect(self, report: Callable[[Event], None]) -> None:
        """Have notes of its own sent to all sinks of the run by ``report``."""
        self._report = report

    def step(self, step: int, rows: StepRows) -> None:
        """Have the rows of a step written by the recorder's thread; by this one if ``MOST_WAITING``
        wait."""
        self._steps.append((step, rows))
        if rows.sample is not None and not self._sampled:
            self._sampled = True
            self.event(ev.Note(time_s=time.monotonic(), text=SAMPLED))
        while len(self._steps) > MOST_WAITING and not self._sampled:
            with self._writing:
                self._record()
        self.put(step)

    def take(self, item: Event | int) -> bool:
        """Write an event, or a step by its number."""
        if isinstance(item, int):
            with self._writing:
                self._record()
            self._warn()
            return True
        if not isinstance(item, ev.StepTrained):
            self._write(item)
        with self._counting:
            if isinstance(item, ev.StepTrained):
                self._trained(item.step, item.metrics)
            elif isinstance(item, ev.Note):
                self._noted(item)
            self.statistics.add(item)
        return True

    def end(self) -> None:
        """Write a warning if trained responses differ in length from generated ones."""
        if bias := self.statistics.lengths.bias:
            note = ev.Note(time_s=time.monotonic(), text=bias, level="warning")
            self._write(note)
            self.notes.append(note)
            self.errors.append(bias)

    def settle(self, before: int) -> None:
        """Return once all steps below ``before`` are written."""
        with self._writing:
            while any(step < before for step, _ in self._steps):
                self._record()
        self._warn()

    def close(self) -> None:
        """Write the rest. If the disk blocks the thread for ``CLOSE_S``, write waiting steps here."""
        self.finish()
        self.thread.join(CLOSE_S)
        if self.thread.is_alive():
            if self._writing.acquire(timeout=CLOSE_S):
                while self._steps:
                    self._record()
                self._writing.release()
            else:
                self.errors.append(f"{self._directory} takes nothing; {len(self._steps)} steps were not recorded")
        if self.dropped:
            self.errors.append(f"{self.dropped} events were not recorded: the disk is slower than the run")
        if self._lost > 1:
            self.errors.append(f"{self._lost} steps were not recorded, the last: {self._last_lost}")
        if self.thread.is_alive():  # it may still write
            return
        try:
            if not self._log.closed and not os.fstat(self._log.fileno()).st_nlink:
                self.errors.append(f"{self._directory} was removed while the run went on: its events are gone")
            self._log.close()
        except OSError as error:
            if not self._torn:
                self.errors.append(f"events.jsonl is not whole: {error}")

    def _recall(self) -> None:
        """Read the history of an earlier process. Its last line may be torn, and a step may lack a
        file."""
        line = b"\n"
        newest: deque[bytes] = deque(maxlen=2)  # a torn last line may have no time
        with (self._directory / EVENTS).open("rb") as lines:
            for line in lines:  # the file may exceed the memory
                with contextlib.suppress(msgspec.MsgspecError):
                    if b'"event":"step"' in line:
                        known = msgspec.json.decode(line, type=_RecordedStep)
                        self._trained(known.step, known.metrics)
                    elif LASTING in line:
                        self._noted(msgspec.json.decode(line, type=ev.Note))
                    elif _COUNTED.match(line):
                        event = _counted.decode(line)
                        if isinstance(event, ev.Begun):
                            self._reached(newest)
                        self.statistics.add(event)
                newest.append(line)
        self._reached(newest)
        if not line.endswith(b"\n"):
            self._log.write(b"\n")
        for path in (self._directory / "steps").glob(STEP_FILE):
            with contextlib.suppress(OSError, ValueError, KeyError):
                batch = read_batch(path, only=(VERSION_SPANS, LOSS_MASK))
                if VERSION_SPANS in batch:
                    self.statistics.step(int(path.stem), batch.ages(int(path.stem)))

    def _reached(self, lines: Iterable[bytes]) -> None:
        for found in filter(None, map(_TIME.search, lines)):
            self.statistics.reached(float(found[1]))

    def _trained(self, step: int, metrics: Mapping[str, float | None]) -> None:
        reward = metrics.get("reward")
        if step in self._rewards:  # training went back to it: later steps are lost and will be trained again
            self._rewards = {known: value for known, value in self._rewards.items() if known < step}
        self._rewards[step] = float("nan") if reward is None else reward
        self.staleness_max = max(self.staleness_max, int(metrics.get("staleness_max") or 0))

    def _warn(self) -> None:
        """Report the warning of the first steps. Call it without a lock: the report waits for the server."""
        with self._counting:
            text, self._shown = self._shown, ""
        if text:
            self._report(ev.Note(time_s=time.monotonic(), text=text, level="warning", lasting=True))

    def _noted(self, note: ev.Note) -> None:
        begins = note.text.partition(":")[0]
        if note.lasting and not any(each.startswith(begins) for each in self.errors):
            self.errors.append(note.text)

    def _write(self, event: Event, at_once: bool = False) -> None:
        """Write one line. Called in any thread."""
        if self._torn:
            return
        try:
            self._log.write(msgspec.json.encode(event) + b"\n")
            if at_once or self.is_idle:
                self._log.flush()
        except Exception as error:
            self._torn = True
            self.errors.append(f"events.jsonl is not whole: {error}")

    def _record(self) -> None:
        """Write the oldest waiting step, if any. The caller holds ``_writing``."""
        if not self._steps:
            return
        step, rows = self._steps.popleft()
        try:
            batch = (rows.sample or rows)()
            ages = batch.ages(step) if VERSION_SPANS in batch else None
            with self._counting:
                if ages is not None:
                    self.statistics.step(step, ages)
                    self.staleness_max = max(self.staleness_max, int(ages.total.max(initial=0)))
                lags = np.array(list(self.statistics.lags.values()), np.int64)
            write_batch(step_path(self._directory, step), batch, **{PUBLISH_LAG: lags})
            self._shown = self._shown or self._first.add(step, batch)
        except Exception as error:
            self._lost, self._last_lost = self._lost + 1, f"step {step} was not recorded: {error}"
            if self._lost == 1:  # a full disk loses every step: ``close`` names the last and the count
                self.errors.append(self._last_lost)
