"""Calls of users' functions, of stages, rewards and agents: their time limits, their errors as text, absent services.

with CallLimit(60.0).call("score() of row 7"):     # the call may hold the GIL, or block its event loop
    score(...)
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import math
import os
import queue
import random
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Any, cast

from ...errors import AsyncFlowError, ConfigError
from ...queue.protocol import FRAMES, SDK, error_text, user_trace

MAX_S = 1e8  # largest limit of timers (seconds): three years
GRACE_S = 10.0  # an awaited call may take this long to end after its cancellation (seconds)
_BEATS = 10  # signs of life of an event loop within the limit
SERVICE_S = 600.0  # a service may be away for this long (seconds)
AWAY = {"ConnectionError", "TimeoutError", "Timeout", "TransportError", "ClientConnectionError", "APIConnectionError"}
"""Classes of errors of an absent service: built in, and of requests, httpx, aiohttp and openai."""
LAST_ATTEMPT = 5  # a call with this many failed attempts fails if others were answered meanwhile
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_LIBRARIES = (sysconfig.get_path("stdlib"), *_INSTALLED)


def user_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames outside of the SDK and of libraries; without any, also those of installed libraries."""
    own = [frame for frame in stack if not frame.filename.startswith((SDK, "<frozen"))]
    users = [frame for frame in own if not frame.filename.startswith(("<", *_LIBRARIES))]
    return users or [f for f in own if f.filename.startswith(_INSTALLED) or not f.filename.startswith(_LIBRARIES)]


def frames_of(thread: int | None) -> list[traceback.FrameSummary]:
    """Return the user's frames of a running thread, by its ident."""
    frame = sys._current_frames().get(thread or 0)
    return user_frames(traceback.extract_stack(frame)) if frame is not None else []


def user_error_text(what: str, error: BaseException) -> str:
    """Return ``what`` was wrong, with the frames of the user's code."""
    return f"{what}\n{user_trace(error)}".rstrip()


class CallLimit:
    """``expire``: a function called with the reason, to give up the worker's thread. None: the process is the
    worker's own, and ends after it has written the stacks of its threads into its log."""

    def __init__(self, timeout_s: float, expire: Callable[[str], None] | None = None) -> None:
        self.timeout_s = min(timeout_s, MAX_S)
        self._expire = expire

    @contextlib.contextmanager
    def call(self, what: str, *, beside: bool = False) -> Iterator[None]:
        """Limit a call in this thread. A process has one such call at a time, and any number ``beside`` it, each in
        a thread beside an event loop."""
        expire = self._expire or (_end_process if beside else None)
        if expire is not None:
            with self._watched(what, expire):
                yield
            return
        faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=sys.__stderr__ or 2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def give_up(self, what: str, call: asyncio.Task[Any]) -> None:
        """End the process, or give up the worker's thread, for an awaited call still running after its
        cancellation."""
        text = f"{self._late(what)}, nor in {GRACE_S:g} s after its cancellation"
        frames, awaited = list[tuple[FrameType, int]](), cast("Any", call.get_coro())
        while frame := getattr(awaited, "cr_frame", None):
            frames.append((frame, frame.f_lineno))
            awaited = getattr(awaited, "cr_await", None)
        (self._expire or _end_process)(_with_stack(text, user_frames(traceback.StackSummary.extract(frames))))

    @contextlib.asynccontextmanager
    async def loop(self, what: str) -> AsyncIterator[None]:
        """Limit the time of a call in the way of this event loop."""

        async def _beat() -> None:
            while True:
                with self.call(f"the event loop of {what}"):
                    await asyncio.sleep(self.timeout_s / _BEATS)

        beating = asyncio.create_task(_beat())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    @contextlib.contextmanager
    def _watched(self, what: str, expire: Callable[[str], None]) -> Iterator[None]:
        own = threading.get_ident()
        timer = threading.Timer(self.timeout_s, lambda: expire(_with_stack(self._late(what), frames_of(own))))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _late(self, what: str) -> str:
        return f"{what} did not return in {self.timeout_s:g} s (timeout_s)"


def _with_stack(text: str, frames: list[traceback.FrameSummary]) -> str:
    return f"{text}\n{''.join(traceback.format_list(frames[-FRAMES:]))}"


def _end_process(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)


class ServiceAway(ConfigError):
    """Internal: raised if a service stayed away too long. It ends the run: no row is the cause."""


class ServiceWatch:
    """Decides after failed calls to a service: wait, because it is away, or give up the call's rows.

    ``what``: the name of the service. ``deadline_s``: the longest time of waiting. Used on one event loop at a time.
    """

    def __init__(self, what: str, deadline_s: float, note: Callable[[str], None] | None = None) -> None:
        self._what, self._deadline_s = what, deadline_s
        self._note = note or (lambda text: print(text, file=sys.stderr))
        self._answered = -math.inf
        self._failing: set[Hashable] = set()  # calls without an answer since ``_answered``

    def report_to(self, note: Callable[[str], None]) -> None:
        """Send warnings to ``note``; default: standard error."""
        self._note = note

    def succeed(self) -> None:
        """Note an answer."""
        self._answered = time.monotonic()
        self._failing.clear()

    async def pause(self, call: Hashable, began: float, failed: list[float], error: BaseException) -> bool:
        """Wait before the next attempt of ``call``, which ``began`` and ``failed`` at these times. The first failure
        of an absence is a warning. Return False if the call's rows are the cause: others were answered after its
        first failure, or it is the only one at the deadline. Raises ServiceAway at the deadline."""
        failed.append(time.monotonic())
        if not self._failing:
            text = f"{self._what} is away: {error_text(error)}. It is asked again for up to {self._deadline_s:g} s"
            self._note(text)
        self._failing.add(call)
        if self._answered > failed[0] and len(failed) >= LAST_ATTEMPT:
            return False
        pause_s = min(0.2 * 2 ** min(len(failed), 8), 20.0) * random.uniform(0.5, 1.0)
        if time.monotonic() + pause_s > began + self._deadline_s:
            if len(self._failing) == 1:
                return False
            raise ServiceAway(f"{self._what} was away for {self._deadline_s:g} s: {error_text(error)}")
        await asyncio.sleep(pause_s)
        return True


class MainThread:
    """Runs an event loop in a thread beside, and its plain functions here, one at a time: signals, as the
    ``signal.alarm`` of verifiers, work in the main thread of a process only."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, and the functions of its ``call`` in this thread."""
        ended: Future[None] = Future()

        def _loop() -> None:
            settle(ended, asyncio.run, main)
            self._calls.put(None)

        threading.Thread(target=_loop, name="event loop", daemon=True).start()
        while (call := self._calls.get()) is not None:
            call()
        ended.result()

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a function, called in the thread of ``run``."""
        done: Future[Any] = Future()
        self._calls.put(lambda: settle(done, function, *args))
        return await asyncio.wrap_future(done)


def settle(done: Future[Any], function: Callable[..., Any], *args: Any, **columns: Any) -> None:
    """Call a function unless its call is cancelled."""
    if done.set_running_or_notify_cancel():
        try:
            done.set_result(function(*args, **columns))
        except BaseException as error:
            if isinstance(error, StopIteration) or not isinstance(error, Exception):  # asyncio takes none of them
                error = RuntimeError(error_text(error)).with_traceback(error.__traceback__)
            done.set_exception(error)


def is_away(error: BaseException | None) -> bool:
    """True for the errors of an absent service, also as a cause."""
    while error is not None:
        if not isinstance(error, AsyncFlowError) and any(each.__name__ in AWAY for each in type(error).__mro__):
            return True
        error = error.__cause__
    return False
