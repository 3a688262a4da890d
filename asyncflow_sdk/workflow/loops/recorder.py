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
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from ...errors import ConfigError
from ...memory import make_private_directory, private_opener
from ...queue.listeners import GROUPS_PER_SAMPLE, StepRows
from ...queue.protocol import plain_text
from ...types import LOSS_MASK, VERSION_SPANS, Batch, Event
from ...types import events as ev
from ...types.spans import FINISH_REASON
from .event_sinks import MOST_EVENTS, EventThread
from .record_files import EVENTS, LASTING, STEP_FILE, decode_event, read_batch, step_path, write_batch
from .statistics import RunStatistics

MOST_WAITING = 256
"""Most steps waiting for the disk. Beyond it ``step`` writes the oldest in its caller's thread, and training
waits; not in a run with rows on other hosts, for which that thread must not wait: there, checkpoints wait."""
CLOSE_S = 60.0
FIRST_STEPS = 3
NOTHING = "nothing can be learned so far"
PUBLISH_LAG = "publish_lag"
SAMPLED = (
    f"steps/ has a sample of each step's rows, one group in {GROUPS_PER_SAMPLE}, and so has the staleness of the"
    " summary: the rows are on other hosts"
)

_COUNTED = re.compile(rb'{"event":"(begun|rows|published|loaded|step)"|' + LASTING)
_TIME = re.compile(rb'"time_s":(\d+\.?\d*)')


class _Found(NamedTuple):
    reward: float  # of all rows; NaN if rewards differ
    idle: bool  # no row has a gradient
    cut: bool  # every response


class FirstSteps:
    """Warns, once, if the first ``FIRST_STEPS`` steps of a run give nothing to learn from.

    first.trained(step, metrics)         # each trained step, before its rows
    first.add(step, batch)               # the warning, else ""
    """

    def __init__(self) -> None:
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._found: dict[int, _Found] = {}

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        if step < FIRST_STEPS:
            self._metrics[step] = metrics

    def add(self, step: int, batch: Batch) -> str:
        """Return the warning, with an example, after the last of these steps. ``batch``: the rows of the step, or a
        sample of them."""
        if not 0 <= step < FIRST_STEPS or "reward" not in batch or not batch.rows:
            return ""
        rewards, metrics = np.asarray(batch.array("reward"), np.float64), self._metrics.get(step, {})
        first = float(rewards[0])
        same = (rewards == first).all() and math.isclose(metrics.get("reward", first), first, abs_tol=1e-9)
        idle = 0 in (metrics.get("rows_used"), metrics.get("grad_norm"))
        long = "response_ids" in batch and batch.ragged("response_ids").lengths.max() > 1  # else one token is meant
        cut = bool(long and metrics.get("truncated_fraction") == 1)
        self._found[step] = _Found(first if same else math.nan, idle, cut)
        if len(self._found) < FIRST_STEPS:
            return ""
        found, self._found = list(self._found.values()), {}
        steps, hard = f"the first {FIRST_STEPS} steps", "a task too hard or too easy for this model"
        cut = all(each.cut for each in found)
        if all(each.reward == found[0].reward for each in found):  # NaN equals nothing
            causes = f"a reward function blind to the answer in the response, {hard}"
            text = f"all rewards of {steps} are {first:g}. Likely causes: {causes}"
        elif all(each.idle for each in found):
            text = f"in no group of {steps} do rewards differ, so no row had a gradient. Likely causes: {hard}"
            text += ", a temperature too low"
        elif cut:
            text = f"the token limit cut every response of {steps}"
        else:
            return ""
        if cut:
            text += "; no response ended by itself: max_tokens too small, a wrong chat template or end token"
        return f"{NOTHING}: {text}. An example: {_example(batch)}"


def _example(batch: Batch) -> str:
    prompts = ("prompt", *(name for name in batch if batch.spec(name).kind in ("text", "json")), "prompt_ids")
    prompt = next((name for name in prompts if name in batch and name not in ("response", FINISH_REASON)), "")
    names = [prompt, "response" if "response" in batch else "response_ids", FINISH_REASON, "reward"]
    values = {name: batch[name][0] for name in names if name in batch}
    plain = {n: v.tolist() if isinstance(v, (np.ndarray, np.generic)) else v for n, v in values.items()}
    return ", ".join(f"{name} {plain_text(repr(value), 300)}" for name, value in plain.items())


class Recorder(EventThread):
    """Writes events and steps in its own thread, so that neither the queue nor a trainer waits for the disk. Only
    ``StepTrained`` is written before the step's acknowledgement, so that a killed and resumed run has every step.

    ``again``: continue the files of an earlier process; else ConfigError is raised if there are some. After an error
    of the disk a file is not written any more; ``errors`` names it once.
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
        self._report: Callable[[Event], None] = super().event
        self._lost, self._last_lost = 0, ""  # steps that could not be written
        self.errors: list[str] = []
        self.notes: list[Event] = []  # events of its own, for the other sinks, after ``close``
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

    def event(self, event: Event | int) -> None:
        """Write a trained step at once, any other event in the recorder's thread."""
        if isinstance(event, ev.StepTrained):
            self._first.trained(event.step, event.metrics)
            self._write(event, at_once=True)
        super().event(event)

    def connect(self, report: Callable[[Event], None]) -> None:
        """Have notes of its own sent to all sinks of the run by ``report``."""
        self._report = report

    def step(self, step: int, rows: StepRows) -> None:
        """Have the rows of a step written by the recorder's thread; by this one if ``MOST_WAITING`` wait."""
        self._steps.append((step, rows))
        if rows.sample is not None and not self._sampled:
            self._sampled = True
            self.event(ev.Note(time_s=time.monotonic(), text=SAMPLED))
        while len(self._steps) > MOST_WAITING and not self._sampled:
            with self._writing:
                self._record()
        super().event(step)

    def take(self, item: Event | int) -> None:
        """Write an event, or a step by its number."""
        if isinstance(item, int):
            with self._writing:
                self._record()
            self._warn()
            return
        if not isinstance(item, ev.StepTrained):
            self._write(item)
        with self._counting:
            self._count(item)

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
        ended = self.finish(CLOSE_S)
        if not ended and self._writing.acquire(timeout=CLOSE_S):
            while self._steps:
                self._record()
            self._writing.release()
        elif not ended:
            self.errors.append(f"{self._directory} takes nothing; {len(self._steps)} steps were not recorded")
        if self.dropped:
            self.errors.append(f"{self.dropped} events were not recorded: the disk is slower than the run")
        if self._lost > 1:
            self.errors.append(f"{self._lost} steps were not recorded, the last: {self._last_lost}")
        if not ended:  # it may still write
            return
        try:
            if not self._log.closed and not os.fstat(self._log.fileno()).st_nlink:
                self.errors.append(f"{self._directory} was removed while the run went on: its events are gone")
            self._log.close()
        except OSError as error:
            if not self._torn:
                self.errors.append(f"events.jsonl is not whole: {error}")

    def _recall(self) -> None:
        """Read the history of an earlier process. Its last line may be torn, and a step may lack a file."""
        line = b"\n"
        newest: deque[bytes] = deque(maxlen=2)  # a torn last line may have no time
        with (self._directory / EVENTS).open("rb") as lines:
            for line in lines:  # the file may exceed the memory
                if _COUNTED.search(line) and (event := decode_event(line)) is not None:
                    if isinstance(event, ev.Begun):
                        self._reached(newest)
                    self._count(event)
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

    def _count(self, event: Event) -> None:
        """Count an event of this process, or of an earlier one."""
        if isinstance(event, ev.StepTrained):
            if event.step in self._rewards:  # training went back to it: later steps will be trained again
                self._rewards = {known: value for known, value in self._rewards.items() if known < event.step}
            self._rewards[event.step] = event.metrics.get("reward", math.nan)
            self.staleness_max = int(max(self.staleness_max, event.metrics.get("staleness_max", 0)))
        elif isinstance(event, ev.Note) and event.lasting:
            begins = event.text.partition(":")[0]
            if not any(each.startswith(begins) for each in self.errors):
                self.errors.append(event.text)
        self.statistics.add(event)

    def _warn(self) -> None:
        """Report the warning of the first steps. Call it without a lock: the report waits for the server."""
        with self._counting:
            text, self._shown = self._shown, ""
        if text:
            self._report(ev.Note(time_s=time.monotonic(), text=text, level="warning", lasting=True))

    def _write(self, event: Event, at_once: bool = False) -> None:
        if self._torn:
            return
        try:
            self._log.write(msgspec.json.encode(event) + b"\n")
            if at_once or self.idle:
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
