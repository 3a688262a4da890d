"""AgentRunner: the conversations of a rollout worker, in threads beside its event loop.

Coroutines run on one event loop in a thread, plain functions in a thread for each row. An agent blocking
its thread keeps neither the engine nor new weights from their work.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from typing import Any

from ...errors import MemoryFull
from ...queue.protocol import error_text, plain_text
from ..work import is_coroutine
from ..workers.user_code import SERVICE_S, ServiceWatch, frames_of, is_away, settle, user_error_text
from .agent import Agent, AgentFailed, Turn, Turns
from .engine_gateway import Generated

BLOCKED_S = 5.0
"""Code blocking the event loop of agents for this long is named (seconds)."""
CANCEL_S = 1.0
"""The event loop of a cancelled agent may take this long to answer (seconds)."""


class AgentRunner:
    """Runs conversations of one agent, on one event loop until ``close``. ``note``: receives warnings."""

    def __init__(self, agent: Agent, note: Callable[[str], None]) -> None:
        self.agent, self._note = agent, note
        self._loop: _AgentLoop | None = None
        self._awaits = is_coroutine(agent.function)
        self._watch = ServiceWatch(f"a service of agent {agent.name}()", max(SERVICE_S, agent.timeout_s), note)

    async def converse(self, make: Callable[[], Turns], columns: Mapping[str, Any], group: Hashable) -> Generated:
        """Return one finished row. ``make``: begins its conversation, again if a service was away or
        another agent blocked the event loop. Raises AgentFailed; EngineError of the engine; ServiceAway."""
        failed = list[float]()
        while True:
            turns = make()
            try:
                returned = await (self._await(turns, columns) if self._awaits else self._call(turns, columns))
            except _LoopLost:
                continue
            except (AgentFailed, MemoryFull):
                raise
            except Exception as error:
                if turns.failure is not None:
                    raise turns.failure from None
                began = failed[0] if failed else time.monotonic()
                if is_away(error) and await self._watch.pause(group, began, failed, error):
                    continue
                text = f"agent {self.agent.name}() raised {plain_text(error_text(error), 1000)}"
                raise AgentFailed(user_error_text(text, error)) from None
            if turns.failure is not None:
                raise turns.failure
            self._watch.succeed()
            return self.agent.row(turns, returned)

    async def close(self) -> None:
        """End the event loop of the agent, unless it is blocked."""
        if self._loop is not None:
            await self._loop.close()

    async def _await(self, turns: Turns, columns: Mapping[str, Any]) -> Any:
        """Return the result of a coroutine function. Raises _LoopLost if another one blocked the loop."""
        if self._loop is None or self._loop.lost.is_set():
            self._loop = _AgentLoop(self.agent.name, self._note)
        own = self._loop
        task = asyncio.wrap_future(own.submit(self.agent.call(turns, columns)))
        lost = asyncio.ensure_future(own.lost.wait())
        try:
            await asyncio.wait([task, lost], timeout=self.agent.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return _result(task)
            turns.close()
            task.cancel()
            while not own.lost.is_set():
                if await own.answers(CANCEL_S):
                    raise self._too_long("")
                if own.blocked_by(turns):
                    place = own.abandon()
                    raise self._too_long(f": it blocks its event loop at {place}")
            raise _LoopLost
        finally:
            turns.close()
            task.cancel()
            lost.cancel()

    async def _call(self, turns: Turns, columns: Mapping[str, Any]) -> Any:
        """Return the result of a plain function."""
        done: Future[Any] = Future()
        plain = _PlainTurns(turns, asyncio.get_running_loop())
        thread = threading.Thread(
            target=lambda: settle(done, self.agent.function, plain, **columns), name=self.agent.name, daemon=True
        )
        thread.start()
        task = asyncio.wrap_future(done)
        try:
            await asyncio.wait([task], timeout=self.agent.timeout_s)
            if task.done():
                return _result(task)
            place = _interrupt(thread)
            raise self._too_long(f": it is at {place}")
        finally:
            turns.close()
            task.cancel()
            plain.cancel()

    def _too_long(self, where: str) -> AgentFailed:
        return AgentFailed(f"agent {self.agent.name}() did not end in {self.agent.timeout_s:g} s{where}")


class _LoopLost(Exception):
    """Raised for a conversation on an event loop blocked for good by another one."""


class _AgentLoop:
    """An event loop in a daemon thread. ``lost``: it is abandoned, since an agent blocks it."""

    def __init__(self, name: str, note: Callable[[str], None]) -> None:
        self.lost = asyncio.Event()
        self._name, self._note = name, note
        made: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def _main() -> None:
            ended = asyncio.Event()
            made.set_result((asyncio.get_running_loop(), ended))
            await ended.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(_main()), name=name, daemon=True)
        self._thread.start()
        self._loop, self._ended = made.result()
        self._watching = asyncio.create_task(self._name_blocks())

    def submit(self, coroutine: Any) -> Future[Any]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def answers(self, timeout_s: float) -> bool:
        """Return True if nothing blocks the loop for this long."""
        answer = asyncio.wrap_future(self.submit(asyncio.sleep(0)))
        await asyncio.wait([answer], timeout=timeout_s)
        return answer.done()

    def blocked_by(self, turns: Turns) -> bool:
        """True if the loop runs code of this conversation, or of none."""
        frame, running = sys._current_frames().get(self._thread.ident or 0), []
        while frame is not None:
            if frame.f_code is Agent.call.__code__:
                running.append(frame.f_locals.get("turns"))
            frame = frame.f_back
        return not running or turns in running

    def abandon(self) -> str:
        """Give up the blocked loop, and return the place of the block."""
        self._watching.cancel()
        place = _interrupt(self._thread)
        self.lost.set()
        return place

    async def close(self) -> None:
        """End the thread, and all tasks of its loop."""
        self._watching.cancel()
        if not self.lost.is_set():
            self._loop.call_soon_threadsafe(self._ended.set)
            await asyncio.to_thread(self._thread.join, CANCEL_S)

    async def _name_blocks(self) -> None:
        """Warn of code blocking the loop, once of each place."""
        named = set[str]()
        while True:
            if not await self.answers(BLOCKED_S):
                place = _place_of(self._thread)
                if place and place not in named and len(named) < 8:
                    self._note(
                        f"agent {self._name}() has blocked its event loop for {BLOCKED_S:g} s, at {place}: its other"
                        " conversations wait. Await asyncio.to_thread(...), or make the agent a plain function"
                    )
                named.add(place)
            await asyncio.sleep(CANCEL_S)


class _PlainTurns:
    """``Turns`` for a plain function: ``generate`` waits for the turn."""

    def __init__(self, turns: Turns, home: asyncio.AbstractEventLoop) -> None:
        self._turns, self._home = turns, home
        self._turn: Future[Turn] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._turns, name)

    def generate(self, *args: Any, **options: Any) -> Turn:
        """Generate the model's next turn, as ``Turns.generate``."""
        self._turn = asyncio.run_coroutine_threadsafe(self._turns.generate(*args, **options), self._home)
        return self._turn.result()

    def cancel(self) -> None:
        """End the turn under way."""
        if self._turn is not None:
            self._turn.cancel()


def _result(task: asyncio.Future[Any]) -> Any:
    if task.cancelled():  # by the agent itself: it must not look like the end of this worker's request
        raise RuntimeError("CancelledError")
    return task.result()


def _place_of(thread: threading.Thread) -> str:
    """Return the innermost of the user's lines in a thread; "" without one."""
    return "".join(f"{each.filename}:{each.lineno}, in {each.name}()" for each in frames_of(thread.ident)[-1:])


def _interrupt(thread: threading.Thread) -> str:
    """End a thread as soon as it runs Python code again, and return its place."""
    place = _place_of(thread) or "an unknown line"
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    return place
