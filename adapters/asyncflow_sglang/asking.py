"""Asking: the requests that a server has of this engine. Each is seen through to its end, whoever still waits for it.

SGLang forgets a request to abort what it has not heard of yet, and goes on with what nobody listens to. So a request is never
dropped: it is aborted until its answer is there, and only then is there nothing of it in the server.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from typing import Any

from asyncflow_sdk.errors import AsyncFlowError, EngineGone

from .link import Link
from .replies import Reply
from .requests import Body

FIRST_S, MOST_S, END_S = 0.05, 1.0, 60.0


class Asked:
    """One request. ``interrupted``: its answer may be cut. ``spoiled``: why its answer does not count. ``answer`` is cancelled if it
    ends before it was ``sent``."""

    def __init__(self, rid: str) -> None:
        self.rid, self.interrupted, self.spoiled, self.sent = rid, False, "", False
        self.answer: asyncio.Task[Reply]
        self.ending: asyncio.Task[None] | None = None


class Asking:
    """Those of one engine, on one event loop. ``most``: so many are in the server at once, further ones wait in order."""

    def __init__(self, calls: Link, most: int, timeout_s: float) -> None:
        self._calls, self._timeout_s = calls, timeout_s
        self._room = asyncio.Semaphore(most)
        # All of one length: SGLang aborts whatever begins with the name it is told.
        self._names = (f"asyncflow-{secrets.token_hex(8)}-{number:016x}" for number in itertools.count())
        self._running: set[Asked] = set()

    def ask(self, body: Body, most_bytes: int) -> Asked:
        """Send it. ``answer`` raises EngineError and EngineGone."""
        asked = Asked(next(self._names))
        asked.answer = asyncio.create_task(self._send(asked, {**body, "rid": asked.rid}, most_bytes))
        self._running.add(asked)
        asked.answer.add_done_callback(lambda task: self._through(asked, task))
        return asked

    def end(self, asked: Asked) -> None:
        """It is to end with what it has. Its answer comes soon."""
        if not asked.sent:
            asked.answer.cancel()
        elif asked.ending is None and not asked.answer.done():
            asked.ending = asyncio.create_task(self._end(asked))

    def interrupt(self) -> None:
        """All are to end with what they have."""
        for asked in list(self._running):
            asked.interrupted = True
            self.end(asked)

    def spoil(self, why: str) -> None:
        """All are to end, and their answers count no more."""
        for asked in list(self._running):
            asked.spoiled = why
            self.end(asked)

    async def ended(self) -> None:
        """Wait for those that are to end. Raises EngineGone when the server does not end them."""
        while left := [each.answer for each in self._running if each.ending is not None]:
            done, _ = await asyncio.wait(left, timeout=END_S)
            if not done:
                raise EngineGone(f"{self._calls.name} has not ended {len(left)} requests in {END_S:g} s")

    async def close(self) -> None:
        """End all. Whoever waits for an answer gets EngineError. Idempotent."""
        running = list(self._running)
        for asked in running:
            self.end(asked)
        if running:
            await asyncio.wait([asked.answer for asked in running], timeout=MOST_S)
        for asked in running:
            asked.answer.cancel()
        tasks: list[asyncio.Task[Any]] = [asked.answer for asked in running]
        tasks += [asked.ending for asked in running if asked.ending is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, asked: Asked, body: Body, most_bytes: int) -> Reply:
        async with self._room:
            asked.sent = True
            return await self._calls.post("/generate", body, Reply, timeout_s=self._timeout_s, most_bytes=most_bytes)

    async def _end(self, asked: Asked) -> None:
        wait_s = FIRST_S
        while not asked.answer.done():
            try:
                await self._calls.post("/abort_request", {"rid": asked.rid}, object, timeout_s=END_S)
            except AsyncFlowError:
                return  # so is the request, or it ends by itself
            await asyncio.wait([asked.answer], timeout=wait_s)
            wait_s = min(2 * wait_s, MOST_S)

    def _through(self, asked: Asked, task: asyncio.Task[Reply]) -> None:
        self._running.discard(asked)
        if not task.cancelled():
            task.exception()  # nobody may be left who asks
