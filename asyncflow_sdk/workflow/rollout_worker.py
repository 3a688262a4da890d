"""RolloutWorker: lease prompts, generate responses with one engine, complete the rows, and load new weights in between.

    PromptReader → RequestScheduler → EngineGateway → engine      prompts of a lease, running requests, requests in the engine
                   RequestScheduler → CompletionBatcher → queue   finished rows
    WeightSwap → RequestScheduler, EngineGateway, CompletionBatcher

The worker calls its parts; none calls it. They set one event, ``wake``, when its next state may be another.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from ..errors import DeadlineExceeded, Ended
from ..interfaces import RolloutEngine
from ..queue import AsyncLeasedBatch, QueueClient
from ..queue.coroutines import wait_for_event
from ..types import Sampling
from ..types.defaults import NEXT_S
from .agent_worker import Agent
from .completion_batcher import ColumnWriter, CompletionBatcher
from .engine_gateway import EngineGateway
from .prompt_lease import PromptReader
from .request_scheduler import RequestScheduler
from .tokenizer import Tokenizer
from .weight_swap import WeightSwap
from .worker_log import WorkerLog

CLOSE_S = 30.0
"""An engine may take this long to close (seconds)."""


class State(enum.Enum):
    """The next action of a rollout worker."""

    BOUNDARY = "withdraw the request for prompts, and ask if weights may be loaded"
    LOAD = "load new weights"
    LEASE = "wait for prompts"
    WAIT = "wait for room, or for the first weights"
    END = "finish all requests"


class RolloutWorker:
    """One engine's loop, on an event loop. Run it once.

    ``swap``: policy of loading new versions; None: the engine keeps its weights, and the session is no replica. ``needs_first``:
    generate nothing before a published version is loaded; else the engine's own weights are version 0. ``kind``: of its spans.
    Raises ConfigError for an unsupported ``verify``.
    """

    def __init__(
        self, queue: QueueClient, engine: RolloutEngine, *, task: str, prompts: PromptReader, columns: ColumnWriter,
        sampling: Sampling, tokenizer: Tokenizer | None = None, agent: Agent | None = None, kind: str = "generate",
        swap: str | None = None, verify: Sequence[str] = (), needs_first: bool = False,
    ) -> None:  # fmt: skip
        self._queue, self._engine, self._task, self._prompts = queue, engine, task, prompts
        self._wake = wake = asyncio.Event()
        log = WorkerLog(queue.connection)
        self._gateway = EngineGateway(engine, None if needs_first else 0, wake)
        self._batcher = CompletionBatcher(columns, log)
        self._requests = RequestScheduler(
            engine, self._gateway, self._batcher, log, wake, sampling=sampling, tokenizer=tokenizer, agent=agent, kind=kind
        )  # fmt: skip
        self._swap: WeightSwap | None = None
        if swap is not None:
            self._swap = WeightSwap(
                queue, engine, self._gateway, self._requests, self._batcher, log, wake, policy=swap, verify=verify
            )
        self._lease: asyncio.Task[AsyncLeasedBatch] | None = None  # the request for prompts
        self._ended = False
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Generate until the stream ends. Raises the errors of the engine and of the queue, and DeadlineExceeded with the reason of
        a wait without an end."""
        self._aio = self._queue.aio
        actions: dict[State, Callable[[], Awaitable[None]]] = {
            State.BOUNDARY: self._ask_at_boundary, State.LEASE: self._lease_prompts, State.WAIT: self._wait,
        }  # fmt: skip
        if self._swap is not None:
            actions[State.LOAD] = self._swap.load
            self._swap.claim()
        background = [asyncio.create_task(self._guard(work)) for work in (self._batcher.run(), self._abort_ended())]
        try:
            if self._swap is not None:
                await self._swap.join()
            while (state := self._next_state()) is not State.END:
                await actions[state]()
            await self._requests.drain()
            await self._batcher.flush()
            self._raise_failure()
        finally:
            await self._close(background)

    def _next_state(self) -> State:
        self._wake.clear()
        self._raise_failure()
        if self._ended:
            return State.END
        idle, swap = self._requests.idle, self._swap
        if swap is not None and swap.waits_for_boundary and idle:
            return State.BOUNDARY
        if swap is not None and swap.due(idle):
            return State.LOAD
        unloaded = self._gateway.loaded is None
        if unloaded and swap is not None and swap.ended:
            return State.END  # without a first version nothing may be generated
        if self._lease is not None or (self._requests.room and not unloaded):
            return State.LEASE
        return State.WAIT

    async def _lease_prompts(self) -> None:
        """Request prompts, and begin them once they are there. The server may answer first that a version must be loaded."""
        if self._lease is None:
            most = self._engine.capabilities.max_rows
            get = self._aio.get(self._task, self._requests.room, most=most if self._swap else 0, timeout_s=NEXT_S)
            self._lease = asyncio.create_task(get)
        woken = asyncio.ensure_future(self._wake.wait())
        await asyncio.wait([self._lease, woken], return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        if self._lease.done():
            lease, self._lease = self._lease, None
            try:
                self._begin(lease.result())
            except Ended:
                self._ended = True
            except DeadlineExceeded:
                if not self._requests.running:
                    raise

    async def _ask_at_boundary(self) -> None:
        """Ask for permission to load while nothing runs. The request for prompts is withdrawn before."""
        assert self._swap is not None
        with self._gateway.held():  # no request starts in the meantime
            lease, self._lease = self._lease, None
            if lease is not None:
                lease.cancel()  # the server withdraws the request, or the rows if it has leased them
                await asyncio.gather(lease, return_exceptions=True)
                if not lease.cancelled() and lease.exception() is None:
                    self._begin(lease.result())
            if self._requests.idle:
                await self._swap.request_now()
                self._swap.due(idle=True)

    def _begin(self, batch: AsyncLeasedBatch) -> None:
        assert self._gateway.loaded is not None
        self._requests.begin(self._prompts.read(batch, self._gateway.loaded))

    async def _abort_ended(self) -> None:
        """Abort requests for rows that end early: too stale for any step, cancelled, or of a failed group."""
        while True:
            with contextlib.suppress(DeadlineExceeded):
                await self._requests.abort_rows(await self._aio.lost(timeout_s=NEXT_S))

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._failure = self._failure or error
            self._wake.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._requests.raise_failure()
        if self._swap is not None:
            self._swap.raise_failure()

    async def _wait(self) -> None:
        """Wait for room, or for a version. Raises DeadlineExceeded with the reason."""
        if not await wait_for_event(self._wake, NEXT_S):
            why = await self._swap.why() if self._swap is not None else ""
            raise DeadlineExceeded(f"in {NEXT_S:g} s no version was staged and no row finished{why}")

    async def _close(self, background: Sequence[asyncio.Task[None]]) -> None:
        """End everything, also after errors and a cancellation: the session is no replica afterwards."""
        tasks = [*background, *([self._lease] if self._lease is not None else [])]
        try:
            if self._swap is not None:
                self._swap.cancel_request()
            for task in tasks:
                task.cancel()
            await asyncio.gather(self._requests.close(), *tasks, return_exceptions=True)
            with contextlib.suppress(asyncio.TimeoutError):  # an engine that hangs must not hide the error
                await asyncio.wait_for(self._engine.close(), CLOSE_S)
        finally:
            try:
                if self._swap is not None:
                    await self._swap.close()
            finally:
                await self._queue.connection.wire.aclose_loop()
