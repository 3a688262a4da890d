"""A thread with an event loop, like an engine's in its worker; callers wait for it with a deadline."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .check import CheckFailed

T = TypeVar("T")
_SHOWN = 6


class LoopThread:
    """``call`` from any other thread. ``stuck``: True if a call blocks the loop."""

    def __init__(self) -> None:
        self.stuck = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine-loop")
        self._thread.start()

    def _run(self) -> None:
        # A thread inherits this from the one that starts it, and a worker's is none: else no check would see threads
        # that keep a process alive. How this one itself is treated was settled when it was started.
        threading.current_thread()._daemonic = False  # type: ignore[attr-defined]
        self._loop.run_forever()

    def call(self, work: Coroutine[Any, Any, T], limit_s: float, what: str | Callable[[], str]) -> T:
        """Run a coroutine and return its result. Raises CheckFailed with its position after
        ``limit_s`` seconds."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit_s)
        except concurrent.futures.TimeoutError:
            if future.done():  # a TimeoutError of its own
                return future.result()
            where = self._where()
            future.cancel()
            said = what if isinstance(what, str) else what()
            raise CheckFailed(f"{said} did not end within {limit_s:g} s; {where}") from None

    def close(self) -> None:
        """Cancel remaining tasks and stop. A blocked loop is left behind."""

        async def cancel() -> None:
            """Cancel all other tasks."""
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=5.0) if left else None
            await self._loop.shutdown_asyncgens()
            await self._loop.shutdown_default_executor()

        if self.stuck:
            return
        try:
            self.call(cancel(), 10.0, "cancelling what was left")
        except CheckFailed:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        if not self._thread.is_alive():
            self._loop.close()

    def _where(self) -> str:
        """Return the position of the thread: a blocking call, or the awaits of its tasks."""
        alive = threading.Event()
        self._loop.call_soon_threadsafe(alive.set)
        if not alive.wait(1.0):
            self.stuck = True
            stack = traceback.extract_stack(sys._current_frames().get(self._thread.ident or 0))
            return "the event loop is blocked in " + said(stack)
        waits = []
        for task in asyncio.all_tasks(self._loop):
            frames = task.get_stack(limit=1)
            if frames:
                waits.append(
                    f"{frames[-1].f_code.co_qualname if sys.version_info >= (3, 11) else frames[-1].f_code.co_name}"
                    f" (line {frames[-1].f_lineno})"
                )
        return f"what is awaited: {', '.join(waits[:_SHOWN]) or 'nothing'}"


def said(stack: traceback.StackSummary) -> str:
    """Return the innermost calls of a stack, the last one first."""
    return " < ".join(
        f"{part.name} ({part.filename.rsplit('/', 1)[-1]}:{part.lineno})" for part in stack[: -_SHOWN - 1 : -1]
    )
