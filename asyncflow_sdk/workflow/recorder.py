"""What a run leaves behind: its events, the rows of every step, and a summary, in one directory.

workflow.json       what was asked for
events.jsonl        one event a line
steps/000017.safetensors
                    the rows of step 17, every column: ids, groups, and a ragged column as name and name.offsets;
                    what was current when each row was completed, and the publish lag of each replica
summary.json        the outcome
logs/               what each worker wrote
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import ConfigError
from ..memory import make_private_directory, private_opener
from ..types import (
    LOSS_MASK,
    VERSION_SPANS,
    Batch,
    Column,
    ColumnSpec,
    Event,
    Ragged,
    TokenAges,
    carrier,
    dtype_name,
)
from ..types import events as ev
from .arrays import reading, write_arrays
from .tally import Tally

MOST_WAITING = 256
"""Steps that may wait to be written. Beyond it, ``step`` writes the oldest in its caller's thread: training waits for the disk."""
MOST_EVENTS = 200_000
"""So many may wait for a listener that blocks, such as a terminal that is held; of the rest only trained steps are kept."""
CLOSE_S = 60.0
GATHER_S = 0.25
"""Events come in bursts: so long they are gathered, since each wake-up takes the interpreter from the queue's server."""
STEP_FILE = "*.safetensors"
COMPLETED_AT, PUBLISH_LAG = "completed_at", "publish_lag"
Sink = Callable[[Event], None]


_tallied = msgspec.json.Decoder(ev.Begun | ev.RowsEnded | ev.Published | ev.Loaded)
_TALLIED = re.compile(rb'{"event":"(begun|rows|published|loaded)"')
_TIME = re.compile(rb'"time_s":(\d+\.?\d*)')


class _Known(msgspec.Struct):
    """A step as it was written. JSON has no NaN: such a metric is null."""

    step: int
    metrics: dict[str, float | None]


class Recorder:
    """Writes in a thread of its own, so that neither the queue nor a trainer waits for the disk; but that a step was trained is
    written before it is acknowledged, so that a run that is killed and goes on has every step. ``sinks`` are
    called there too, one event at a time. ``again``: go on with what is there. A sink or a disk that fails stops being used, and is named once."""

    def __init__(self, directory: Path, sinks: list[Sink], *, again: bool = False) -> None:
        if (directory / "events.jsonl").exists() and not again:
            raise ConfigError(f"{directory} already holds a run; choose another directory, or move it away")
        make_private_directory(directory)
        make_private_directory(directory / "steps")
        self._directory = directory
        self._sinks = list(sinks)
        self._torn = False  # events.jsonl cannot be written any more
        self._log = open(directory / "events.jsonl", "ab", opener=private_opener)  # noqa: SIM115 - closed by close
        self._inbox: queue.SimpleQueue[Event | int | None] = queue.SimpleQueue()  # a number: of a step in ``_steps``
        self._steps: deque[tuple[int, Callable[[], Batch]]] = deque()  # to be written, the oldest first
        self._writing = threading.Lock()  # of steps: they are written one by one, in order
        self._counting = threading.Lock()  # of ``tally``, rewards and staleness
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._rewards: dict[int, float] = {}  # by step: one that was trained again counts once
        self.staleness_max = 0
        self.tally = Tally()
        self._unheard = 0  # events left out
        self._lost, self._last_lost = 0, ""  # steps that could not be written
        self.errors: list[str] = []
        if again:
            self._recall()
        self._thread.start()

    @property
    def steps(self) -> int:
        return len(self._rewards)

    @property
    def rewards(self) -> list[float]:
        """Mean rewards, step by step."""
        return [self._rewards[step] for step in sorted(self._rewards)]

    def _recall(self) -> None:
        """What was trained before; the last line may be torn, and a step may not be recorded."""
        line = b"\n"
        newest: deque[bytes] = deque(maxlen=2)  # a torn one may not say when it was
        with (self._directory / "events.jsonl").open("rb") as lines:
            for line in lines:  # of a run of days: more than memory may hold
                with contextlib.suppress(msgspec.MsgspecError):
                    if b'"event":"step"' in line:
                        known = msgspec.json.decode(line, type=_Known)
                        self._trained(known.step, known.metrics)
                    elif _TALLIED.match(line):
                        event = _tallied.decode(line)
                        if isinstance(event, ev.Begun):
                            self._reached(newest)
                        self.tally.add(event)
                newest.append(line)
        self._reached(newest)
        if not line.endswith(b"\n"):
            self._log.write(b"\n")
        for path in (self._directory / "steps").glob(STEP_FILE):
            with contextlib.suppress(OSError, ValueError, KeyError):
                batch = read_batch(path, only=(VERSION_SPANS, LOSS_MASK))
                if VERSION_SPANS in batch:
                    self.tally.step(int(path.stem), batch.ages(int(path.stem)))

    def _unrecorded(self, step: int, error: Exception) -> None:
        """The first is named here, and when all is over how many followed: a disk that is full loses every step."""
        self._lost, self._last_lost = self._lost + 1, f"step {step} was not recorded: {error}"
        if self._lost == 1:
            self.errors.append(self._last_lost)

    def _reached(self, lines: Iterable[bytes]) -> None:
        for found in filter(None, map(_TIME.search, lines)):
            self.tally.reached(float(found[1]))

    def _trained(self, step: int, metrics: Mapping[str, float | None]) -> None:
        reward = metrics.get("reward")
        if step in self._rewards:  # training went back to it: what was trained after it is lost, and will be again
            self._rewards = {known: value for known, value in self._rewards.items() if known < step}
        self._rewards[step] = float("nan") if reward is None else reward
        self.staleness_max = max(self.staleness_max, int(metrics.get("staleness_max") or 0))

    def event(self, event: Event) -> None:
        if isinstance(event, ev.StepTrained):
            self._write(event, at_once=True)
        elif self._inbox.qsize() >= MOST_EVENTS:
            self._unheard += 1
            return
        self._inbox.put(event)

    def step(self, step: int, read: Callable[[], Batch]) -> None:
        """Have the rows of a step written, by the recorder's thread; in this one when ``MOST_WAITING`` wait already."""
        self._steps.append((step, read))
        while len(self._steps) > MOST_WAITING:
            with self._writing:
                self._record()
        self._inbox.put(step)

    def settle(self, before: int) -> None:
        """Return when no step below ``before`` waits to be written: nobody tells of it again."""
        with self._writing:
            while any(step < before for step, _ in self._steps):
                self._record()

    def close(self) -> None:
        """Write what is left. A sink that blocks is waited for a minute; then the steps behind it are written here."""
        self._closing.set()
        self._inbox.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self.errors.append("a listener still blocks; its last events were left out")
            if self._writing.acquire(timeout=CLOSE_S):
                while self._steps:
                    self._record()
                self._writing.release()
            else:
                self.errors.append(f"{self._directory} takes nothing; {len(self._steps)} steps were not recorded")
        if self._unheard:
            self.errors.append(f"{self._unheard} events were left out while a listener blocked")
        if self._lost > 1:
            self.errors.append(f"{self._lost} steps were not recorded, the last: {self._last_lost}")
        if self._thread.is_alive():  # it may still write
            return
        try:
            if not self._log.closed and not os.fstat(self._log.fileno()).st_nlink:
                self.errors.append(f"{self._directory} was removed while the run went on: its events are gone")
            self._log.close()
        except OSError as error:
            if not self._torn:
                self.errors.append(f"events.jsonl is not whole: {error}")

    def _run(self) -> None:
        while (item := self._next()) is not None:
            if isinstance(item, int):
                with self._writing:
                    self._record()
                continue
            if not isinstance(item, ev.StepTrained):
                self._write(item)
            with self._counting:
                if isinstance(item, ev.StepTrained):
                    self._trained(item.step, item.metrics)
                self.tally.add(item)
            self._tell(item)
        if bias := self.tally.lengths.bias:
            note = ev.Note(time_s=time.monotonic(), text=bias, level="warning")
            self._write(note)
            self._tell(note)
            self.errors.append(bias)

    def _next(self) -> Event | int | None:
        if self._inbox.empty():
            self._closing.wait(GATHER_S)
        return self._inbox.get()

    def _tell(self, event: Event) -> None:
        for sink in list(self._sinks):
            try:
                sink(event)
            except Exception as error:
                self._sinks.remove(sink)
                self.errors.append(f"{getattr(sink, '__qualname__', sink)} failed and was left out: {error!r}")

    def _write(self, event: Event, at_once: bool = False) -> None:
        """In any thread: a line of its own."""
        if self._torn:
            return
        try:
            self._log.write(msgspec.json.encode(event) + b"\n")
            if at_once or self._inbox.empty():
                self._log.flush()
        except Exception as error:
            self._torn = True
            self.errors.append(f"events.jsonl is not whole: {error}")

    def _record(self) -> None:
        """Write the oldest step that waits, if one does. In any thread that has ``_writing``."""
        if not self._steps:
            return
        step, read = self._steps.popleft()
        try:
            batch = read()
            ages = batch.ages(step) if VERSION_SPANS in batch else None
            with self._counting:
                if ages is not None:
                    self.tally.step(step, ages)
                    self.staleness_max = max(self.staleness_max, int(ages.total.max(initial=0)))
                lags = np.array(list(self.tally.lags.values()), np.int64)
            write_batch(self._directory / "steps" / f"{step:06d}.safetensors", batch, **{PUBLISH_LAG: lags})
        except Exception as error:
            self._unrecorded(step, error)


def write_batch(path: Path, batch: Batch, **more: Any) -> None:
    """A file that is whole or not there. ``more``: arrays beside the rows."""
    arrays: dict[str, Any] = {"ids": batch.ids, "groups": batch.groups, **more}
    if batch.completed_at is not None:
        arrays[COMPLETED_AT] = batch.completed_at
    if batch.version_step_offsets:
        arrays["version_step_offsets"] = np.array(batch.version_step_offsets, np.int64)
    for name, column in batch.columns.items():
        arrays[f"{name}:{column.spec.kind}:{dtype_name(column.values.dtype)}"] = column.values
        if column.offsets is not None:
            arrays[f"{name}.offsets"] = column.offsets
    write_arrays(path, arrays)


def read_batch(path: Path, only: tuple[str, ...] | None = None) -> Batch:
    """What ``write_batch`` wrote. ``only``: these columns, where they are. Raises OSError, ValueError, KeyError."""
    with reading(path) as stored:
        columns: dict[str, Column] = {}
        for key in stored:
            if ":" not in key:
                continue
            name, kind, dtype = key.rsplit(":", 2)
            if only is not None and name not in only:
                continue
            values = stored[key]
            if values.dtype != carrier(dtype):  # bfloat16 and the like, as bytes
                values = values.view(carrier(dtype))[..., 0]
            offsets = stored.get(f"{name}.offsets")
            spec = ColumnSpec(kind, dtype, values.shape[1:])  # type: ignore[arg-type]
            columns[name] = Column(spec, values, offsets)
        batch = Batch(stored["ids"], stored["groups"], columns)
        if "version_step_offsets" in stored:
            batch.version_step_offsets = tuple(
                (int(first), int(shift)) for first, shift in stored["version_step_offsets"]
            )
        batch.completed_at = stored.get(COMPLETED_AT)
        return batch


def read_steps(directory: str | Path) -> Iterator[tuple[int, Batch]]:
    """The rows of every recorded step of a run directory: (step = version trained, batch), in order."""
    for path in sorted(Path(directory, "steps").glob(STEP_FILE)):
        yield int(path.stem), read_batch(path)


def staleness_of(directory: str | Path) -> Ragged:
    """Staleness of every trained token, from the stored version spans: int64, one row a step."""
    late = [batch.ages(step).total for step, batch in read_steps(directory)]
    return Ragged.of(late, np.int64)


def ages_of(directory: str | Path) -> Iterator[tuple[int, TokenAges]]:
    """Of every recorded step, how stale its tokens were: in flight and in the queue."""
    for step, batch in read_steps(directory):
        yield step, batch.ages(step)
