"""Errors of users' functions: stages, rewards and agents, as text."""

from __future__ import annotations

import asyncio
import math
import queue
import random
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future
from typing import Any

from ...errors import AsyncFlowError, ConfigError
from ...queue.protocol import SDK, error_text, user_trace

SERVICE_S = 600.0
"""A service may be away for this long (seconds)."""
AWAY = {"ConnectionError", "TimeoutError", "Timeout", "TransportError", "ClientConnectionError", "APIConnectionError"}
"""Classes of errors of an absent service: built in, and of requests, httpx, aiohttp and openai."""
LAST_ATTEMPT = 5
"""A call with this many failed attempts fails if others were answered meanwhile."""
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


class ServiceAway(ConfigError):
    """Internal: raised if a service stayed away too long. It ends the run: no row is the cause."""


class ServiceWatch:
    """Decides after failed calls to a service: wait, because it is away, or give up the call's rows.

    ``what``: the name of the service. ``deadline_s``: the longest time of waiting. Used on one event
    loop at a time.
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
        """Wait before the next attempt of ``call``, which ``began`` and ``failed`` at these times. The
        first failure of an absence is a warning. Return False if the call's rows are the cause: others
        were answered after its first failure, or it is the only one at the deadline. Raises ServiceAway
        at the deadline."""
        failed.append(time.monotonic())
        if not self._failing:
            self._note(
                f"{self._what} is away: {error_text(error)}. It is asked again for up to {self._deadline_s:g} s"
            )
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
