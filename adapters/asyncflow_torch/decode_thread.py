"""The one thread that owns a model and decodes; the event loop hands it jobs and gets back what finished."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from asyncflow_sdk.errors import EngineError

from .decode import Decoder
from .lanes import Finished, Work

# The most prompt tokens, padding included, read in one pass: it bounds the memory a pass takes.
_PROMPT_TOKENS = 16384


@dataclass(eq=False)
class Job:
    """A request on its way. ``inbox`` gets (Finished, its rows in there) as rows end, or an EngineError."""

    work: Work
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[tuple[Finished, list[int]] | EngineError] = field(default_factory=asyncio.Queue)
    left: int = 0


class DecodeThread:
    """Decodes what is submitted until closed. But for ``close``, its methods do not block."""

    def __init__(self, decoder: Decoder, *, max_rows: int, threads: int | None) -> None:
        self._decoder = decoder
        self._max_rows = max_rows
        self._threads = threads
        self._changed = threading.Condition()
        self._pending: deque[Job] = deque()
        self._aborted: list[Job] = []
        self._calls: list[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = []
        self._closing = False
        self._jobs: dict[int, Job] = {}  # being decoded; only the thread touches it
        self._thread = threading.Thread(target=self._run, name="asyncflow-decode", daemon=True)
        # Hazard: a thread still inside torch when the interpreter goes down takes the process with it.
        atexit.register(self.close)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job, called on its loop. Raises EngineError when closed."""
        with self._changed:
            if self._closing:
                raise EngineError("the engine is closed")
            self._pending.append(job)
        # Woken when the loop comes round again: requests made together are then read in one pass.
        job.loop.call_soon(self._wake)

    def abort(self, job: Job) -> None:
        """Drop a job; what it had finished by then may still arrive."""
        with self._changed:
            self._aborted.append(job)
            self._changed.notify()

    def call(self, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Run ``function`` between two steps, after the aborts and before the jobs submitted so far."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._changed:
            if self._closing:
                raise EngineError("the engine is closed")
            self._calls.append((function, future))
            self._changed.notify()
        return future

    @property
    def cpu_s(self) -> float:
        """CPU seconds this thread has used; torch's further threads, where it has any, are not counted."""
        if not self._thread.is_alive() or self._thread.ident is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def close(self, timeout_s: float = 60.0) -> None:
        """Stop after the step that runs and wait for that; every open job and call gets an EngineError."""
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
                admitted = [] if aborted else self._admissible()
                if aborted:
                    self._pending = deque(job for job in self._pending if job not in aborted)
            try:
                self._turn(aborted, calls, admitted)
            except BaseException as error:
                self._fail(admitted, f"decoding failed: {type(error).__name__}: {error}", error)
        self._fail([], "the engine was closed", None)

    def _has_work(self) -> bool:
        return bool(self._closing or self._aborted or self._calls or self._pending or self._decoder.rows)

    def _admissible(self) -> list[Job]:
        """Take the jobs, in order, whose rows and prompts fit now."""
        jobs: list[Job] = []
        rows, longest = self._decoder.rows, 0
        while self._pending:
            work = self._pending[0].work
            rows, longest = rows + work.n, max(longest, len(work.prompt))
            if rows > self._max_rows or (jobs and (len(jobs) + 1) * longest > _PROMPT_TOKENS):
                break
            jobs.append(self._pending.popleft())
        return jobs

    def _turn(self, aborted: list[Job], calls: list[Any], admitted: list[Job]) -> None:
        if aborted:
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
                job.left = job.work.n
                self._jobs[job.work.id] = job
            self._hand_over(self._decoder.admit([job.work for job in admitted]))
        if self._decoder.rows:
            self._hand_over(self._decoder.step())

    def _hand_over(self, finished: Finished | None) -> None:
        """Give finished rows to their jobs: one call into each event loop, however many rows there are."""
        if finished is None:
            return
        order = np.argsort(finished.work, kind="stable")
        ids, starts = np.unique(finished.work[order], return_index=True)
        parcels: dict[asyncio.AbstractEventLoop, list[tuple[Job, list[int]]]] = {}
        for work, rows in zip(ids.tolist(), np.split(order, starts[1:]), strict=True):
            job = self._jobs[work]
            job.left -= len(rows)
            if not job.left:
                del self._jobs[work]
            parcels.setdefault(job.loop, []).append((job, rows.tolist()))
        for loop, parcel in parcels.items():
            _call(loop, _deliver, finished, parcel)

    def _fail(self, admitted: list[Job], reason: str, cause: BaseException | None) -> None:
        """Every open job and call gets its own EngineError, and nothing is decoded any more."""
        self._decoder.clear()
        with self._changed:
            open_jobs = {id(job): job for job in (*self._jobs.values(), *admitted, *self._pending)}
            calls, self._calls = self._calls, []
            self._pending.clear()
        self._jobs.clear()
        for job in open_jobs.values():
            error = EngineError(reason)
            error.__cause__ = cause
            _call(job.loop, job.inbox.put_nowait, error)
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(reason))


def _deliver(finished: Finished, parcel: list[tuple[Job, list[int]]]) -> None:
    for job, rows in parcel:
        job.inbox.put_nowait((finished, rows))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    # A loop that was closed has nobody left who waits.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)
