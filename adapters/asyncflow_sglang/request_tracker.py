"""RequestTracker: requests of one engine to SGLang, each followed to its end, even if its caller is gone.

SGLang ignores an abort of a request that it has not received yet, and continues requests without listeners. So a
request is never dropped: the tracker aborts it until it is answered.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from asyncflow_http.client import ANSWER_BYTES, HTTP_CALL_S, AnswerType
from asyncflow_sdk.errors import AsyncFlowError, EngineGone
from asyncflow_sdk.interfaces import StopWatch

from .replies import SGLangReply
from .requests import Body

FIRST_WAIT_S, LONGEST_WAIT_S, ABORT_S = 0.05, 1.0, 60.0


class Link(Protocol):
    """Calls to SGLang, in this process (`InProcessLink`) or by HTTP (`HttpServer`), by the routes of its server.
    ``name``: of this SGLang in errors."""

    name: str

    async def post(
        self, path: str, body: Mapping[str, Any], answer: type[AnswerType], *, timeout_s: float = HTTP_CALL_S,
        most_bytes: int = ANSWER_BYTES, part: Callable[[AnswerType], None] | None = None,
    ) -> AnswerType:  # fmt: skip
        """Return the answer as an ``answer``; for ``object``, unread. ``part``: called on this event loop with each
        part of a streamed answer; the last part is returned. Raises EngineError for a refused call and an unreadable
        answer, EngineGone after ``timeout_s`` and if SGLang is lost; both contain the name."""

    async def close(self) -> None:
        """Release SGLang, and end it if it was started for this engine. Idempotent."""


class TrackedRequest:
    """``interrupted``: True if its answer may be incomplete. ``spoiled``: reason to ignore its
    answer, "" for none. ``answer`` is cancelled if the request is aborted before it is ``sent``.
    ``watch``: finds the stop text of its response."""

    def __init__(self, rid: str, watch: StopWatch | None) -> None:
        self.rid, self.interrupted, self.spoiled, self.sent, self.watch = rid, False, "", False, watch
        self.answer: asyncio.Task[SGLangReply]
        self.abort: asyncio.Task[None] | None = None


class RequestTracker:
    """``most``: maximum of requests in SGLang at once; others wait in order. Used on one event loop."""

    def __init__(self, link: Link, most: int, timeout_s: float) -> None:
        self._link, self._timeout_s = link, timeout_s
        self._slots = asyncio.Semaphore(most)
        # All have one length: SGLang aborts each request whose name begins with a given one.
        self._names = (f"asyncflow-{secrets.token_hex(8)}-{number:016x}" for number in itertools.count())
        self._running: set[TrackedRequest] = set()

    def send(self, body: Body, most_bytes: int, watch: StopWatch | None = None) -> TrackedRequest:
        """Send a request, and abort it once ``watch`` finds a stop text. Its ``answer`` raises
        EngineError and EngineGone."""
        request = TrackedRequest(next(self._names), watch)
        request.answer = asyncio.create_task(self._send(request, {**body, "rid": request.rid}, most_bytes))
        self._running.add(request)
        request.answer.add_done_callback(lambda task: self._answered(request, task))
        return request

    def abort(self, request: TrackedRequest) -> None:
        """End a request with the tokens drawn so far. Its answer comes soon."""
        if not request.sent:
            request.answer.cancel()
        elif request.abort is None and not request.answer.done():
            request.abort = asyncio.create_task(self._abort_until_answered(request))

    def interrupt(self) -> None:
        """End all requests with the tokens drawn so far."""
        for request in list(self._running):
            request.interrupted = True
            self.abort(request)

    def spoil(self, reason: str) -> None:
        """Abort all requests and ignore their answers."""
        for request in list(self._running):
            request.spoiled = reason
            self.abort(request)

    async def wait_aborted(self) -> None:
        """Wait until all aborted requests are answered. Raises EngineGone if none is answered within 60 s."""
        while left := [each.answer for each in self._running if each.abort is not None]:
            done, _ = await asyncio.wait(left, timeout=ABORT_S)
            if not done:
                raise EngineGone(f"{self._link.name} has not ended {len(left)} requests in {ABORT_S:g} s")

    async def close(self) -> None:
        """Abort all requests; waiting callers get EngineError. Idempotent."""
        running = list(self._running)
        for request in running:
            self.abort(request)
        tasks: list[asyncio.Task[Any]] = [request.answer for request in running]
        if tasks:
            await asyncio.wait(tasks, timeout=LONGEST_WAIT_S)
        tasks += [request.abort for request in running if request.abort is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, request: TrackedRequest, body: Body, most_bytes: int) -> SGLangReply:
        async with self._slots:
            request.sent = True
            search = None if request.watch is None else functools.partial(self._search, request)
            return await self._link.post(
                "/generate", body, SGLangReply, timeout_s=self._timeout_s, most_bytes=most_bytes, part=search
            )

    def _search(self, request: TrackedRequest, reply: SGLangReply) -> None:
        if request.watch is not None and request.watch.found(reply.output_ids):
            self.abort(request)

    async def _abort_until_answered(self, request: TrackedRequest) -> None:
        wait_s = FIRST_WAIT_S
        while not request.answer.done():
            try:
                await self._link.post("/abort_request", {"rid": request.rid}, object, timeout_s=ABORT_S)
            except AsyncFlowError:
                return  # the request fails as well, or ends without an abort
            await asyncio.wait([request.answer], timeout=wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _answered(self, request: TrackedRequest, task: asyncio.Task[SGLangReply]) -> None:
        self._running.discard(request)
        if not task.cancelled():
            task.exception()  # read, since the caller may be gone
