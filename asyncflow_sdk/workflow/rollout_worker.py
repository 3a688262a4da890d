"""RolloutWorker: the state machine of one rollout engine. The next state is the first that applies.

    state        applies when                                            action
    END          the stream has ended                                    finish all requests, write their rows
    PERMISSION   a version is staged, its load not requested yet (*)     request permission to load it
    LOAD         permission is granted                                   stop requests, load, verify, continue them
    END          the engine has no weights, and no version will come     the same
    LEASE        the engine has weights, and room for a group            wait for prompts, start their requests
    WAIT         none of the above                                       wait for ``wake``

    (*) with the swap policy "boundary" only while nothing runs

``wake`` ends LEASE and WAIT. The parts set it: a version is staged or permitted, a request has
ended, there is room, or something has failed. The worker calls its parts, and they call in one
direction:

    PromptReader        RequestScheduler → EngineGateway → engine
    ReplicaSubscriber   RequestScheduler → CompletionBatcher → queue
    EngineLoader
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from ..errors import DeadlineExceeded, Ended
from ..interfaces import RolloutEngine
from ..queue import AsyncLeasedBatch, QueueClient
from ..queue.coroutines import wait_for_event
from ..types import Sampling
from ..types.defaults import NEXT_S
from ..weights import EngineLoader, ReplicaSubscriber, SubscriberState
from .agent import Agent
from .completion_batcher import CompletionBatcher, ResponseColumns
from .engine_gateway import EngineGateway
from .prompt_lease import PromptReader
from .request_scheduler import RequestScheduler
from .swap_policy import SwapPolicy
from .tokenizer import Tokenizer
from .worker_log import WorkerLog

CLOSE_S = 30.0
"""An engine may take this long to close (seconds)."""


class RolloutState(enum.Enum):
    """The states of a rollout worker; see the module."""

    END = "end"
    PERMISSION = "permission"
    LOAD = "load"
    LEASE = "lease"
    WAIT = "wait"


class RolloutWorker:
    """One engine's loop, on an event loop. Run it once.

    ``swap``: policy of loading new versions; None: the engine keeps its weights, and the session is
    no replica. ``needs_first``: generate nothing before a published version is loaded; else the
    engine's own weights are version 0. ``kind``: of its spans. Raises ConfigError for an
    unsupported ``verify``.
    """

    def __init__(
        self, queue: QueueClient, engine: RolloutEngine, *, task: str, prompts: PromptReader, columns: ResponseColumns,
        sampling: Sampling, tokenizer: Tokenizer | None = None, agent: Agent | None = None, kind: str = "generate",
        swap: str | None = None, verify: Sequence[str] = (), needs_first: bool = False,
    ) -> None:  # fmt: skip
        self._queue, self._engine, self._task, self._prompts = queue, engine, task, prompts
        self._wake = wake = asyncio.Event()
        self._log = WorkerLog(queue.connection)
        self._gateway = EngineGateway(engine, None if needs_first else 0, wake)
        self._batcher = CompletionBatcher(columns, self._log)
        self._requests = RequestScheduler(
            engine, self._gateway, self._batcher, self._log, wake, sampling=sampling, tokenizer=tokenizer, agent=agent, kind=kind
        )  # fmt: skip
        self._policy = SwapPolicy(swap or "drain")
        self._loader = EngineLoader(engine, verify, running=not self._policy.stops)
        self._replica: ReplicaSubscriber | None = None
        if swap is not None:
            self._replica = ReplicaSubscriber(queue, self._gateway.loaded, wake, rename=engine.weight_name)
        self._lease: asyncio.Task[AsyncLeasedBatch] | None = None  # the request for prompts
        self._ended = False
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Generate until the stream ends. Raises errors of the engine and of the queue, and
        DeadlineExceeded with the reason."""
        actions: dict[RolloutState, Callable[[], Awaitable[None]]] = {
            RolloutState.PERMISSION: self._request_permission, RolloutState.LOAD: self._load_weights,
            RolloutState.LEASE: self._lease_prompts, RolloutState.WAIT: self._wait,
        }  # fmt: skip
        background = [asyncio.create_task(self._guard(work)) for work in (self._batcher.run(), self._abort_ended())]
        try:
            if self._replica is not None:
                await self._replica.open()
            while (state := self._next_state()) is not RolloutState.END:
                await actions[state]()
            await self._drain()
        finally:
            await self._close(background)

    def _next_state(self) -> RolloutState:
        self._wake.clear()
        self._raise_failure()
        replica, unloaded = self._replica, self._gateway.loaded is None
        if self._ended:
            return RolloutState.END
        if replica is not None:
            if replica.state is SubscriberState.STAGED and (
                self._requests.idle or not self._policy.waits_for_boundary
            ):
                return RolloutState.PERMISSION
            if replica.state is SubscriberState.PERMITTED:
                return RolloutState.LOAD
            if unloaded and replica.ended:
                return RolloutState.END
        if self._lease is not None or (self._requests.room and not unloaded):
            return RolloutState.LEASE
        return RolloutState.WAIT

    # ---- actions

    async def _lease_prompts(self) -> None:
        """Wait for prompts, and start their requests."""
        if self._lease is None:
            most = self._engine.capabilities.max_rows if self._replica is not None else 0
            get = self._queue.aio.get(self._task, self._requests.room, most=most, timeout_s=NEXT_S)
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

    async def _request_permission(self) -> None:
        assert self._replica is not None
        if not self._policy.waits_for_boundary:
            self._replica.request_permission()
            return
        with self._gateway.held():  # no request starts in the meantime
            lease, self._lease = self._lease, None
            if lease is not None:
                lease.cancel()  # the server withdraws the request, or the rows if it has leased them
                await asyncio.gather(lease, return_exceptions=True)
                if not lease.cancelled() and lease.exception() is None:
                    self._begin(lease.result())
            if self._requests.idle and not await self._replica.try_permission():
                self._replica.request_permission()

    async def _load_weights(self) -> None:
        """Load the permitted version. Completions are held back until it is verified."""
        replica, policy, requests = self._replica, self._policy, self._requests
        assert replica is not None
        update = replica.take()
        async with contextlib.AsyncExitStack() as stack:
            if policy.stops:
                began, ran = time.monotonic(), not requests.idle
                try:
                    if policy.drains:
                        await self._drain()
                    else:
                        await stack.enter_async_context(self._gateway.stopped(interrupt=policy.interrupts))
                        self._raise_failure()
                    if ran and not policy.interrupts:
                        self._log.span("wait", began, detail=f"draining for version {update.version}")
                    update = await replica.take_newer()
                except BaseException:
                    update.release()
                    raise
            await stack.enter_async_context(self._batcher.held)
            # Hazard: unverified weights may generate tokens of these requests, and some may end before the load fails.
            unproven = requests.running and not policy.stops
            with requests.load(update.version):
                self._gateway.newest = update.version
                try:
                    await self._loader.load(update)
                except Exception as error:
                    if unproven:
                        await requests.abort("a load of new weights failed")
                    await replica.recover(self._loader, error)
                else:
                    await replica.commit()
                self._gateway.loaded = replica.loaded

    async def _wait(self) -> None:
        """Wait for ``wake``. Raises DeadlineExceeded with the reason."""
        if not await wait_for_event(self._wake, NEXT_S):
            why = await self._replica.diagnose() if self._replica is not None else ""
            raise DeadlineExceeded(f"in {NEXT_S:g} s no version was staged and no row finished{why}")

    def _begin(self, batch: AsyncLeasedBatch) -> None:
        assert self._gateway.loaded is not None
        self._requests.begin(self._prompts.read(batch, self._gateway.loaded))

    async def _drain(self) -> None:
        """Finish all requests, and write their rows."""
        await self._requests.drain()
        await self._batcher.flush()
        self._raise_failure()

    # ---- in the background

    async def _abort_ended(self) -> None:
        """Abort requests for rows that end early: too stale, cancelled, or of a failed group."""
        while True:
            with contextlib.suppress(DeadlineExceeded):
                await self._requests.abort_rows(await self._queue.aio.lost(timeout_s=NEXT_S))

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._failure = self._failure or error
            self._wake.set()

    def _raise_failure(self) -> None:
        replica_failure = self._replica.failure if self._replica is not None else None
        for failure in (self._failure, self._requests.failure, replica_failure):
            if failure is not None:
                raise failure

    async def _close(self, background: Sequence[asyncio.Task[None]]) -> None:
        """End everything, also after errors and a cancellation. Leave the run's replicas."""
        tasks = [*background, *([self._lease] if self._lease is not None else [])]
        try:
            for task in tasks:
                task.cancel()
            await asyncio.gather(self._requests.close(), *tasks, return_exceptions=True)
            with contextlib.suppress(asyncio.TimeoutError):  # an engine that hangs must not hide the error
                await asyncio.wait_for(self._engine.close(), CLOSE_S)
        finally:
            try:
                if self._replica is not None:
                    await self._replica.close()
            finally:
                await self._queue.connection.wire.aclose_loop()
