"""Answering: the rows of leases, generated: a request for each group, or with an agent a conversation for each row."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, DeadlineExceeded, EngineError, EngineGone, LeaseLost
from ..interfaces import Completion, Completions, Request, RolloutEngine
from ..queue import AsyncLeasedBatch, Connection
from ..queue.error_text import plain_text
from ..types import Sampling
from ..types import events as ev
from .agent import Agent, AgentFailed, Turns
from .completing import Answer, Completing, Ids, Work
from .drawing import WAIT_S, Drawing
from .text import Text, token_ids
from .user_code import FunctionFailed

GIVE_UP_AFTER = 8
"""Prompts refused in a row, with none accepted, after which a producer says so and ends."""


class Answering:
    """Answers what ``begin`` is given. ``wake`` is called when all that runs has ended or something failed, ``room`` when a row has ended; ``failure`` says why it cannot go on."""

    def __init__(
        self, engine: RolloutEngine, drawing: Drawing, completing: Completing, connection: Connection, *,
        sampling: Sampling, prompt: str, text: Text | None, agent: Agent | None, wake: Callable[[], None],
        room: Callable[[], None],
    ) -> None:  # fmt: skip
        self._engine, self._drawing, self._completing, self._connection = engine, drawing, completing, connection
        self._sampling, self._prompt, self._text, self._agent = sampling, prompt, text, agent
        self._wake, self._room = wake, room
        self.failure: BaseException | None = None
        self.rows = 0
        """Those begun and not ended."""
        self.largest = 1
        """Rows of a group."""
        self.load_ended: asyncio.Event | None = None
        """Of the load that is under way."""
        self._running: dict[asyncio.Task[None], tuple[Work, set[int]]] = {}  # and the rows that each still owes
        self._ended_early = np.empty(0, np.int64)  # rows of a lease that had not come here yet when they ended
        self._refused: set[int] = set()
        self._cpu_s = 0.0
        self._idle_since: float | None = time.monotonic()

    @property
    def running(self) -> bool:
        """Whether anything is begun and not ended."""
        return bool(self._running)

    @property
    def idle(self) -> bool:
        """Whether new weights would meet nothing: conversations may be between two turns."""
        return not self._running if self._agent is None else self._drawing.idle

    def begin(self, batch: AsyncLeasedBatch) -> None:
        """Start every group of a lease. Rows of a group share their prompt."""
        firsts = np.flatnonzero(np.diff(batch.groups, prepend=-1))
        stops = np.append(firsts[1:], batch.rows)
        most = self._engine.capabilities.max_rows
        self.largest = max(self.largest, int((stops - firsts).max()))
        if self.largest > most:
            raise ConfigError(
                f"groups of {self.largest} do not fit {type(self._engine).__name__}, which generates {most} rows at once;"
                " raise its max_rows"
            )
        assert self._drawing.loaded is not None
        self.end_wait()
        work = Work(batch, [], self._drawing.loaded, time.monotonic())
        lost, self._ended_early = work.among(self._ended_early), np.empty(0, np.int64)
        given = {} if self._agent is None else {name: batch[name] for name in self._agent.needs or ()}
        for first, stop, prompt in zip(firsts.tolist(), stops.tolist(), self._prompts(batch, firsts), strict=True):
            work.prompt_ids += [prompt] * (stop - first)
            if not lost.isdisjoint(range(first, stop)):
                continue
            if self._agent is None:
                self._start(work, range(first, stop), functools.partial(self._respond, work, first, stop, prompt))
                continue
            for row in range(first, stop):
                columns = {name: column[row] for name, column in given.items()}
                converse = functools.partial(self._converse, self._agent, work, row, prompt, columns)
                self._start(work, range(row, row + 1), converse)
        if not self._running:
            self._idle_since = time.monotonic()

    def _prompts(self, batch: AsyncLeasedBatch, firsts: Any) -> list[Ids]:
        if self._prompt == "prompt_ids":
            prompts = token_ids(batch, "prompt_ids")
            return [prompts[i].copy() for i in firsts.tolist()]
        assert self._text is not None
        texts = batch.texts(self._prompt)
        return list(self._text.encode([texts[i] for i in firsts.tolist()]))

    def _start(self, work: Work, rows: range, answer: Callable[[set[int]], Awaitable[None]]) -> None:
        waiting = set(rows)
        task = asyncio.create_task(self._answer(work, waiting, answer))
        self._running[task] = work, waiting
        work.left |= waiting
        self.rows += len(waiting)
        work.tasks += 1
        task.add_done_callback(self._ended)

    async def _answer(self, work: Work, waiting: set[int], answer: Callable[[set[int]], Awaitable[None]]) -> None:
        """See ``answer`` through; the rows that it still owes when it fails are given back."""
        group = int(work.batch.groups[min(waiting)])
        try:
            await answer(waiting)
            self._refused.clear()
            return
        except EngineGone:
            raise  # no prompt's fault, and no other will be answered
        except (EngineError, AgentFailed) as failed:
            error = failed
        lost = isinstance(error, EngineError) and self.load_ended is not None
        if lost:
            # What an engine loses with its weights is not the prompt's fault. A load that fails cancels this here.
            assert self.load_ended is not None
            await self.load_ended.wait()
        else:
            self._refuse(group, error)
        work.left -= waiting
        if waiting:
            reason = str(error) if isinstance(error, AgentFailed) else f"EngineError: {error}"
            with contextlib.suppress(LeaseLost):
                await work.batch.give_back(index=sorted(waiting), reason=reason, blame=not lost)

    def _refuse(self, group: int, error: Exception) -> None:
        self._refused.add(group)
        if len(self._refused) >= GIVE_UP_AFTER:
            text = f"{len(self._refused)} prompts in a row were refused, the last because: {error}"
            if isinstance(error, AgentFailed):
                raise FunctionFailed(text) from None  # which says already where in the agent
            raise ConfigError(text) from error
        self._note(plain_text(f"a prompt was refused: {error}"), "warning")

    def _finished(self, work: Work, waiting: set[int], rows: Sequence[int], answer: Answer) -> None:
        waiting.difference_update(rows)
        self.rows -= len(rows)  # long responses of a group must not keep the places of its short ones
        self._completing.add(work, rows, answer)
        self._room()

    async def _respond(self, work: Work, first: int, stop: int, prompt: Ids, waiting: set[int]) -> None:
        """One response to each row of a group, by one request."""

        def deliver(completed: Completion | Completions, version: int) -> None:
            index = completed.index.tolist() if isinstance(completed, Completions) else [completed.index]
            self._finished(work, waiting, [first + each for each in index], Answer(completed, version))

        request = Request(prompt, self._sampling, stop - first, self._seed(work, first))
        await self._drawing.draw(request, deliver)

    async def _converse(
        self, agent: Agent, work: Work, row: int, prompt: Ids, columns: Mapping[str, Any], waiting: set[int]
    ) -> None:
        turns = Turns(
            self._drawing.draw, prompt, self._sampling, seed=self._seed(work, row), text=self._text,
            context=self._engine.capabilities.context,
        )  # fmt: skip
        self._finished(work, waiting, [row], await agent.converse(turns, columns))

    def _seed(self, work: Work, row: int) -> int | None:
        seed = self._sampling.seed
        return None if seed is None else hash((seed, int(work.batch.ids[row]))) & 0x7FFFFFFF

    def _ended(self, task: asyncio.Task[None]) -> None:
        work, waiting = self._running.pop(task)
        self.rows -= len(waiting)
        work.tasks -= 1
        if not task.cancelled() and task.exception() is not None and self.failure is None:
            self.failure = task.exception()
        if not work.tasks:
            self._completing.through()
            cpu_s, self._cpu_s = self._engine.cpu_s - self._cpu_s, self._engine.cpu_s
            self.span(
                "generate", work.began, rows=work.batch.rows, tokens=work.tokens, version=work.version, cpu_s=cpu_s
            )
        if not self._running:
            self._idle_since = time.monotonic()
        if not self._running or self.failure is not None:
            self._wake()
        else:
            self._room()

    # ---- what is not wanted any more

    async def drain(self) -> None:
        """Until all that is begun has ended. Raises DeadlineExceeded when something does not."""
        while self._running:
            done, running = await asyncio.wait(self._running, timeout=WAIT_S)
            if not done:
                raise DeadlineExceeded(
                    f"{len(running)} requests have been in the engine for {WAIT_S:g} s without an end"
                )

    async def abort_lost(self, ended: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Rows with these ids have ended: nothing more is said of them, and what works for nothing else is aborted; a group
        ends as a whole."""
        self._ended_early = np.concatenate([self._ended_early, ended])  # their lease may be on its way
        lost = {work.batch.token: work.forget(ended) for work in self._works()}
        tasks = [task for task, (work, rows) in self._running.items() if not lost[work.batch.token].isdisjoint(rows)]
        await self._cancel(tasks)
        if tasks:
            self._note(f"{len(tasks)} requests were aborted: their rows had ended", "info")

    async def abort(self, reason: str) -> None:
        """Give back all that runs, and what is finished and not completed."""
        works = self._works()
        await self._cancel(list(self._running))
        self._completing.forget()
        for work in works:
            left = sorted(work.left)
            work.left.clear()
            if left:
                with contextlib.suppress(LeaseLost):
                    await work.batch.give_back(index=left, reason=reason)

    async def close(self) -> None:
        """End all that runs. Its rows are others' when the session ends."""
        await self._cancel(list(self._running))

    def _works(self) -> list[Work]:
        """The leases that are not completed."""
        works = [work for work, _ in self._running.values()] + self._completing.finished
        return list({work.batch.token: work for work in works}.values())

    async def _cancel(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- what is told of it

    def loaded(self, began: float, version: int) -> None:
        """A load has ended: what comes before the next prompt is waited for."""
        if not self._running:
            self._idle_since = time.monotonic()
        self.span("load", began, version=version)

    def end_wait(self) -> None:
        """Something is done again: show the time in which nothing was."""
        if self._idle_since is not None and time.monotonic() - self._idle_since > 0.001:
            self.span("wait", self._idle_since)
        self._idle_since = None

    def span(self, kind: str, began: float, **more: Any) -> None:
        """Something that began then has ended now."""
        name, seconds = self._connection.name, time.monotonic() - began
        self._connection.report(ev.Span(time_s=began, worker=name, kind=kind, seconds=seconds, **more))

    def _note(self, text: str, level: str) -> None:
        name = self._connection.name
        self._connection.report(ev.Note(time_s=time.monotonic(), worker=name, text=text, level=level))
