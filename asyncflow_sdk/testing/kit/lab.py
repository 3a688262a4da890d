"""Lab: holds the plugin under check. Threads for calls of an engine, plain or with an event loop: callers wait for
them with a deadline."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import contextlib
import queue
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .check import CheckFailed

T = TypeVar("T")
_SHOWN = 6


class EngineThread:
    """Runs one call after another; ``call`` from any other thread. ``stuck``: True if a call did not end;
    the thread is left behind.

    ``as_worker``: threads started by the engine are no daemons, as in a worker. A thread inherits
    this from its starter; without it no check would see threads keeping a process alive.
    """

    def __init__(self, *, as_worker: bool = False) -> None:
        self.stuck = False
        self._work = queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None]()
        self._thread = threading.Thread(target=self._run, args=(as_worker,), daemon=True, name="engine")
        self._thread.start()

    def start(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run ``work`` after the calls before it."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._work.put((work, future))
        return future

    def call(self, work: Callable[[], T], limit_s: float, what: str) -> T:
        """Run ``work`` and return its result. Raises CheckFailed with its position after ``limit_s`` seconds."""
        future = self.start(work)
        if not concurrent.futures.wait([future], limit_s).done:
            self.stuck = True
            raise CheckFailed(f"{what} did not end within {limit_s:g} s; its thread is in {self.stack()}")
        return future.result()

    def close(self) -> bool:
        """Let the thread end, and wait unless it is stuck. Return True if it has ended."""
        self._work.put(None)
        if not self.stuck:
            self._thread.join(10.0)
        return not self._thread.is_alive()

    def stack(self) -> str:
        """Return the innermost calls of the thread, the last one first."""
        stack = traceback.extract_stack(sys._current_frames().get(self._thread.ident or 0))
        inner = stack[: -_SHOWN - 1 : -1]
        return " < ".join(f"{part.name} ({part.filename.rsplit('/', 1)[-1]}:{part.lineno})" for part in inner)

    def _run(self, as_worker: bool) -> None:
        if as_worker:  # how this thread itself is treated was settled when it was started
            threading.current_thread()._daemonic = False  # type: ignore[attr-defined]
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del work, future, item  # an engine that was closed is not held by what was asked of it


class LoopThread:
    """A thread with an event loop, like an engine's in its worker. ``stuck``: True if a call blocks the loop."""

    def __init__(self) -> None:
        self.stuck = False
        self._loop = asyncio.new_event_loop()
        self._thread = EngineThread(as_worker=True)
        self._thread.start(self._loop.run_forever)

    def call(self, work: Coroutine[Any, Any, T], limit_s: float, what: str | Callable[[], str]) -> T:
        """Run a coroutine and return its result. Raises CheckFailed with its position after ``limit_s`` seconds."""
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

        async def _cancel() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=5.0) if left else None
            await self._loop.shutdown_asyncgens()
            await self._loop.shutdown_default_executor()

        if self.stuck:
            return
        try:
            self.call(_cancel(), 10.0, "cancelling what was left")
        except CheckFailed:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread.close():
            self._loop.close()

    def _where(self) -> str:
        """Return the position of the thread: a blocking call, or the awaits of its tasks."""
        alive = threading.Event()
        self._loop.call_soon_threadsafe(alive.set)
        if not alive.wait(1.0):
            self.stuck = True
            return f"the event loop is blocked in {self._thread.stack()}"
        waits = []
        for frame in (frame for task in asyncio.all_tasks(self._loop) for frame in task.get_stack(limit=1)):
            code = frame.f_code
            waits.append(f"{getattr(code, 'co_qualname', code.co_name)} (line {frame.f_lineno})")
        return f"what is awaited: {', '.join(waits[:_SHOWN]) or 'nothing'}"


class Lab(abc.ABC):
    """Holds the plugin under check, of one kind; for one thread.

    ``make``: the factory, called with ``options``. ``limit_s``: the limit of each wait (seconds).
    ``seed``: the seed of randomised checks; None: a fixed one. ``ever_made``: True once there was an
    engine. ``waits``: called before each wait for the engine, with its limit in seconds.
    """

    def __init__(self, make: Callable[..., Any], options: Mapping[str, Any], limit_s: float) -> None:
        self.make, self.options, self.limit_s = make, dict(options), limit_s
        self.seed: int | None = None
        self.ever_made = False
        self.waits: Callable[[float], Any] = lambda _: None

    @abc.abstractmethod
    def ask(self, body: Callable[[Any], Any], what: str) -> str | None:
        """Run a check; return its remark. Raises the error of the check, CheckFailed after a timeout."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything. Idempotent."""

    def renew(self) -> None:
        """Drop the engine after a failure, since its state is unknown; the next check gets a new one."""
        with contextlib.suppress(Exception):
            self.close()


class PlainLab(Lab):
    """Makes the plugin anew in each check. ``name``: the adapter's name."""

    def __init__(self, name: str, make: Callable[..., Any], options: Mapping[str, Any], *, limit_s: float) -> None:
        super().__init__(make, options, limit_s)
        self.name, self.ever_made = name, True
        self._open = contextlib.ExitStack()

    def made(self) -> Any:
        """Return a new plugin, with the options."""
        return self.make(**self.options)

    def directory(self) -> Path:
        """Return an empty directory, removed after the check."""
        return Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="asyncflow-check-")))

    def ask(self, body: Callable[[Any], Any], what: str) -> str | None:
        """Run a check in a thread of its own."""
        thread = EngineThread()
        self.waits(self.limit_s)
        try:
            return thread.call(lambda: body(self), self.limit_s, what)  # type: ignore[no-any-return]
        finally:
            thread.close()
            self.close()

    def close(self) -> None:
        """Remove the directories of the last check."""
        opened, self._open = self._open, contextlib.ExitStack()
        opened.close()
