"""The one thread calling an engine without an event loop; callers wait for it with a deadline."""

from __future__ import annotations

import concurrent.futures
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from .check import CheckFailed
from .loop import said

T = TypeVar("T")


class EngineThread:
    """``call`` from any other thread. ``stuck``: True if a call did not end; the thread is left
    behind."""

    def __init__(self) -> None:
        self.stuck = False
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine")
        self._thread.start()

    def call(self, work: Callable[[], T], limit_s: float, what: str) -> T:
        """Run ``work`` and return its result. Raises CheckFailed with its position after
        ``limit_s`` seconds."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._work.put((work, future))
        done, _ = concurrent.futures.wait([future], limit_s)
        if not done:
            self.stuck = True
            stack = traceback.extract_stack(sys._current_frames().get(self._thread.ident or 0))
            raise CheckFailed(f"{what} did not end within {limit_s:g} s; its thread is in {said(stack)}")
        return future.result()

    def close(self) -> None:
        """Let the thread end, and wait unless it is stuck."""
        self._work.put(None)
        if not self.stuck:
            self._thread.join(10.0)

    def _run(self) -> None:
        threading.current_thread()._daemonic = False  # type: ignore[attr-defined]  # as in LoopThread
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del work, future, item  # an engine that was closed is not held by what was asked of it
