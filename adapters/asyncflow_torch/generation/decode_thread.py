"""DecodeThread: one thread owns a model and decodes. An event loop gives it jobs and receives the
ended rows."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Completion, Completions
from asyncflow_sdk.types import Ragged

from .decode import Decoder
from .prefill import PASS_TOKENS
from .sequence_slots import DecodeWork, FinishedBatch, joined, untouched
from .version_switches import Switches, spans_of, switched

TOGETHER_S = 0.05
"""Maximum wait of an ended row for other rows of its request, in seconds."""


class FinishedRows(NamedTuple):
    """A job's rows ``first`` to ``stop`` of ``finished``. ``switches``: versions of their tokens. ``masked``:
    True if the request asked for a sampling mask."""

    finished: FinishedBatch
    first: int
    stop: int
    switches: Switches
    masked: bool

    def completed(self) -> Iterable[Completion | Completions]:
        """Return the completions of an engine, packed if one version drew all."""
        finished, rows = self.finished, slice(self.first, self.stop)
        columns = {name: each.slice(self.first, self.stop) for name, each in finished.ragged.items()}
        ids = columns.pop("token_ids")
        packed = Completions(
            finished.index[rows],
            ids,
            Ragged(columns.pop("logprobs").values, ids.offsets),
            [
                "aborted" if finished.aborted else "stop" if stop else "length"
                for stop in finished.stopped[rows].tolist()
            ],
            self.switches[0][1] if self.switches else None,
            columns if self.masked else {},
        )
        if len(self.switches) < 2:
            return [packed]
        return [replace(each, spans=spans_of(self.switches, len(each.token_ids))) for each in packed.each()]


@dataclass(eq=False)
class Job:
    """A running request. ``inbox`` receives FinishedRows as rows end, or an EngineError."""

    work: DecodeWork
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[FinishedRows | EngineError] = field(default_factory=asyncio.Queue)
    left: int = 0
    switches: Switches = ()

    @property
    def masked(self) -> bool:
        """True if its responses have the columns of SAMPLING_MASK."""
        return self.work.sampling.sampling_mask


class DecodeThread:
    """Decodes submitted jobs until closed. Methods except ``close`` do not block. ``version``: of
    the model's weights."""

    def __init__(self, decoder: Decoder, *, max_rows: int, threads: int | None, version: int) -> None:
        self._decoder = decoder
        self._max_rows = max_rows
        self._version = version
        self._refusal = ""  # reason why nothing is decoded
        self._threads = threads
        self._changed = threading.Condition()
        self._pending: deque[Job] = deque()
        self._aborted: list[Job] = []
        self._interrupted: set[Job] | None = None  # jobs that were waiting at interrupt()
        self._calls: list[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = []
        self._closing = False
        self._jobs: dict[int, Job] = {}  # being decoded; only the thread uses it and the fields below
        self._ended: list[FinishedBatch] = []  # not delivered yet
        self._ended_s = self._step_s = 0.0  # time of the first of them, duration of the last step
        self._thread = threading.Thread(target=self._run, name="asyncflow-decode", daemon=True)
        # Hazard: a thread inside torch at the end of the interpreter crashes the process.
        atexit.register(self.close)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Called on its event loop. Raises EngineError after ``close`` and ``refuse``."""
        with self._changed:
            if self._closing:
                raise EngineError("the engine is closed")
            if self._refusal:
                raise EngineError(self._refusal)
            self._pending.append(job)
            first = len(self._pending) == 1
        if first:  # wakes in the next turn of the loop: requests made together are read in one pass
            job.loop.call_soon(self._wake)

    def abort(self, job: Job) -> None:
        """Drop a job. Rows that ended before may still arrive."""
        with self._changed:
            self._aborted.append(job)
            self._changed.notify()

    def interrupt(self) -> None:
        """End all submitted jobs with the tokens drawn so far."""
        with self._changed:
            self._interrupted = set(self._pending)
            self._changed.notify()

    def call(self, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Run ``function`` between two steps, after the aborts and before the jobs submitted so
        far."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._changed:
            if self._closing:
                raise EngineError("the engine is closed")
            self._calls.append((function, future))
            self._changed.notify()
        return future

    def go_on(self, version: int) -> None:
        """Continue with ``version``, now in the model. Only within a ``call``. Running rows that
        cannot be recomputed end with an EngineError."""
        self._hand_over()  # rows that ended before belong to the old version
        self._version = version
        with self._changed:
            self._refusal = ""
        if not self._decoder.rows:
            return
        try:
            drawn = self._decoder.recompute({work: job.work.prompt for work, job in self._jobs.items()})
        except BaseException as error:
            self._drop(
                [],
                f"version {version} was loaded, but what ran could not be recomputed with it: {error!r}",
                error,
            )
            return
        for work, tokens in drawn.items():
            job = self._jobs[work]
            job.switches = switched(job.switches, tokens, version)

    def refuse(self, reason: str) -> None:
        """Decode nothing until ``go_on``. Only within a ``call``. Running and waiting jobs get an
        EngineError."""
        with self._changed:
            self._refusal = reason
            waiting, self._pending = list(self._pending), deque()
        self._drop(waiting, reason, None)

    @property
    def refusal(self) -> str:
        """Reason why nothing is decoded; "" while decoding."""
        return self._refusal

    @property
    def cpu_s(self) -> float:
        """CPU seconds of this thread, without torch's other threads."""
        if not self._thread.is_alive() or self._thread.ident is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def close(self, timeout_s: float = 60.0) -> None:
        """Stop after the running step and wait for its end. Open jobs and calls get an EngineError."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        atexit.unregister(self.close)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._closing:
                    break
                aborted, self._aborted = self._aborted, []
                calls, self._calls = self._calls, []
                interrupted, self._interrupted = self._interrupted, None
                # Ended rows make room, and a call may change the version: both come first.
                admitted = [] if aborted or calls or interrupted is not None else self._admissible()
                if aborted:
                    self._pending = deque(job for job in self._pending if job not in aborted)
                waiting = [
                    job for job in self._pending if job in (interrupted or ())
                ]  # not jobs submitted after interrupt()
                if waiting:
                    self._pending = deque(job for job in self._pending if job not in waiting)
            try:
                if interrupted is not None:
                    self._interrupt(waiting)
                self._turn(aborted, calls, admitted)
            except BaseException as error:
                self._fail([*admitted, *waiting], f"decoding failed: {type(error).__name__}: {error}", error)
        self._fail([], "the engine was closed", None)

    def _has_work(self) -> bool:
        return bool(
            self._closing
            or self._aborted
            or self._interrupted is not None
            or self._calls
            or self._pending
            or self._decoder.rows
        )

    def _admissible(self) -> list[Job]:
        """Take the jobs, in order, whose rows and prompts fit now."""
        jobs: list[Job] = []
        rows, longest = self._decoder.rows, 0
        while self._pending:
            work = self._pending[0].work
            rows, longest = rows + work.n, max(longest, len(work.prompt))
            if rows > self._max_rows or (jobs and (len(jobs) + 1) * longest > PASS_TOKENS):
                break
            jobs.append(self._pending.popleft())
        return jobs

    def _turn(self, aborted: list[Job], calls: list[Any], admitted: list[Job]) -> None:
        if aborted:
            self._hand_over()
            self._decoder.abort([job.work.id for job in aborted])
            for job in aborted:
                self._jobs.pop(job.work.id, None)
        for function, future in calls:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
        if admitted:
            for job in admitted:
                job.left, job.switches = job.work.n, ((0, self._version),)
                self._jobs[job.work.id] = job
            for finished in self._decoder.admit([job.work for job in admitted]):
                self._take(finished)
        began = time.monotonic()
        if self._decoder.rows:
            self._take(self._decoder.step())
        ended = time.monotonic()
        self._step_s = ended - began
        if self._ended and (not self._more_to_come() or ended + self._step_s - self._ended_s > TOGETHER_S):
            self._hand_over()

    def _interrupt(self, waiting: list[Job]) -> None:
        self._hand_over()
        for finished in self._decoder.interrupt():
            self._take(finished)
            self._hand_over()
        for job in waiting:
            _call(job.loop, job.inbox.put_nowait, FinishedRows(untouched(job.work), 0, job.work.n, (), job.masked))

    def _take(self, finished: FinishedBatch | None) -> None:
        """Store ended rows, to deliver them with other rows of their requests that end next."""
        if finished is None:
            return
        if not self._ended:
            self._ended_s = time.monotonic()
        self._ended.append(finished)
        for work, count in zip(*np.unique(finished.work, return_counts=True), strict=True):
            self._jobs[int(work)].left -= int(count)

    def _more_to_come(self) -> bool:
        """True if a request with ended rows has running rows."""
        return any(self._jobs[work].left for finished in self._ended for work in set(finished.work.tolist()))

    def _hand_over(self) -> None:
        """Deliver the ended rows to their jobs, with one call per event loop."""
        if not self._ended:
            return
        ended, self._ended = self._ended, []  # cleared first: an error must not deliver them twice
        finished = joined(ended)
        firsts = np.flatnonzero(np.diff(finished.work, prepend=-1)).tolist()
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Job, FinishedRows]]] = {}
        for first, stop in itertools.pairwise([*firsts, len(finished.work)]):
            work = int(finished.work[first])
            job = self._jobs[work]
            if not job.left:
                del self._jobs[work]
            by_loop.setdefault(job.loop, []).append(
                (job, FinishedRows(finished, first, stop, job.switches, job.masked))
            )
        for loop, deliveries in by_loop.items():
            _call(loop, _deliver, deliveries)

    def _fail(self, admitted: list[Job], reason: str, cause: BaseException | None) -> None:
        """End all jobs and calls with an EngineError each."""
        with self._changed:
            waiting, self._pending = list(self._pending), deque()
            calls, self._calls = self._calls, []
        self._drop([*admitted, *waiting], reason, cause)
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(reason))

    def _drop(self, waiting: list[Job], reason: str, cause: BaseException | None) -> None:
        """End running jobs, and the jobs ``waiting``, with an EngineError each."""
        self._hand_over()
        self._decoder.clear()
        dropped = {id(job): job for job in (*self._jobs.values(), *waiting)}
        self._jobs.clear()
        for job in dropped.values():
            error = EngineError(reason)
            error.__cause__ = cause
            _call(job.loop, job.inbox.put_nowait, error)


def _deliver(deliveries: list[tuple[Job, FinishedRows]]) -> None:
    for job, finished_rows in deliveries:
        job.inbox.put_nowait(finished_rows)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    # Nobody waits on a closed loop.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)
