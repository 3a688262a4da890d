"""CallLimit: the time limit of a call of a user's function. The call may hold the GIL, or block its event loop.

with limit.call("score() of row 7"):
    score(...)
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any, cast

from ...queue.protocol import FRAMES
from .user_code import frames_of, user_frames

MAX_S = 1e8
"""Largest limit of timers (seconds): three years."""
GRACE_S = 10.0
"""An awaited call may take this long to end after its cancellation (seconds)."""
_BEATS = 10
"""Signs of life of an event loop within the limit."""


class CallLimit:
    """``expire``: a function called with the reason, to give up the worker's thread. None: the process is the
    worker's own, and ends after it has written the stacks of its threads into its log."""

    def __init__(self, timeout_s: float, expire: Callable[[str], None] | None = None) -> None:
        self.timeout_s = min(timeout_s, MAX_S)
        self._expire = expire

    @contextlib.contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Limit a call in this thread. A process has one such call at a time."""
        if self._expire is not None:
            with self._watched(what, self._expire):
                yield
            return
        faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=sys.__stderr__ or 2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    @contextlib.contextmanager
    def call_beside(self, what: str) -> Iterator[None]:
        """Limit one of several calls at a time, in a thread beside an event loop."""
        with self._watched(what, self._expire or _end_process):
            yield

    def give_up(self, what: str, call: asyncio.Task[Any]) -> None:
        """End the process, or give up the worker's thread, for an awaited call still running after its
        cancellation."""
        text = (
            f"{what} did not return in {self.timeout_s:g} s (timeout_s), nor in {GRACE_S:g} s after its cancellation"
        )
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
        text = f"{what} did not return in {self.timeout_s:g} s (timeout_s)"
        own = threading.get_ident()
        timer = threading.Timer(self.timeout_s, lambda: expire(_with_stack(text, frames_of(own))))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _with_stack(text: str, frames: list[traceback.FrameSummary]) -> str:
    return f"{text}\n{''.join(traceback.format_list(frames[-FRAMES:]))}"


def _end_process(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)
