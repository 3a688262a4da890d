"""Streams: the batches or steps of a task, one after another, blocking and for event loops.

    with queue.stream("reward", count=64) as stream:    # an exception gives the rows back, and counts as an attempt
        for batch in stream:
            batch.finish({"reward": score(batch["response"])})

The completion of one batch is sent with the request for the next: a batch costs one request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from ..errors import AsyncFlowError, DeadlineExceeded, Ended, LeaseLost, WireError
from ..interfaces import Consumer, StepConsumer
from .batches import AsyncContext, BlockingBatch, BlockingContext, BlockingStep, Lease
from .connection import BlockingPort, Connection
from .coroutines import run_blocking

L = TypeVar("L", bound=Lease)
LeaseNext = Callable[[L | None], Awaitable[L]]
"""Sends the last message about a lease together with the request for the next one, which it returns."""


class Stream(Generic[L]):
    """Base of all streams. After an error it can be iterated over again. One thread or task iterates
    over it. Waits of more than a millisecond are reported as events. ``current``: the lease of this turn of the loop.

    A loop that is left early sends its unsent completion. If the server rejects it, the ``with``
    block raises the error; without a ``with`` block Python only prints it.
    """

    current: L | None = None

    def __init__(self, connection: Connection, lease: LeaseNext[L]) -> None:
        self._connection, self._lease = connection, lease

    async def _next(self, lease: LeaseNext[L]) -> L:
        """Return the next lease. Raises the errors of ``get``, for the previous batch and this one."""
        began = time.monotonic()
        last, self.current = self.current, None
        try:
            self.current = await lease(last)
        except Exception as error:
            if last is not None and not isinstance(error, WireError):
                await last._close(error)  # its completion was rejected, or a check failed: this client holds its rows
            raise
        self._connection.report_wait(began)
        return self.current

    async def _close(self, error: BaseException | None = None) -> None:
        last, self.current = self.current, None
        if last is not None:
            await last._close(error)


class AsyncStream(Stream[L], AsyncContext):
    """Leases for ``async for``; without ``async with`` an abandoned loop is cleaned up late."""

    async def __aiter__(self) -> AsyncIterator[L]:
        try:
            while True:
                try:
                    lease = await self._next(self._lease)
                except Ended:
                    return
                yield lease
        finally:
            if not self._entered:
                await self._close()


class BlockingStream(Stream[L], BlockingContext):
    """Leases for a thread."""

    def __iter__(self) -> Generator[L, None, None]:
        return self._each(self._lease)

    def _each(self, lease: LeaseNext[L]) -> Generator[L, None, None]:
        try:
            while True:
                try:
                    found = run_blocking(self._next(lease))
                except Ended:
                    return
                yield found
        finally:
            if not self._entered:
                run_blocking(self._close())


class StepStream(BlockingStream[BlockingStep], StepConsumer):
    """``StepConsumer`` over a connection."""


class BatchStream(BlockingStream[BlockingBatch], Consumer):
    """``Consumer`` over a connection. ``ahead``: a request for a batch, on an event loop; then one
    batch is leased while the last one is in use."""

    def __init__(
        self,
        connection: Connection,
        lease: LeaseNext[BlockingBatch],
        ahead: Callable[[], Coroutine[Any, Any, BlockingBatch]] | None = None,
    ) -> None:
        super().__init__(connection, lease)
        self._ahead = ahead

    def __iter__(self) -> Generator[BlockingBatch, None, None]:
        if self._ahead is None:
            yield from self._each(self._lease)
            return
        prefetcher = _Prefetcher(self._connection, self._ahead)
        try:
            yield from self._each(prefetcher.lease)
        finally:
            prefetcher.close()


class _Prefetcher:
    """Leases one batch ahead, on an event loop in its own thread, so the request can be cancelled."""

    def __init__(self, connection: Connection, request: Callable[[], Coroutine[Any, Any, BlockingBatch]]) -> None:
        self._connection, self._request = connection, request
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asyncflow-ahead", daemon=True)
        self._thread.start()
        self._pending: asyncio.Task[BlockingBatch] | None = None

    async def lease(self, last: BlockingBatch | None) -> BlockingBatch:
        """Send the last message about batch ``last``, return the next batch, and request the one after it. Blocks."""
        if last is not None:
            await last._send_last()
        while True:
            early = self._pending is not None
            try:
                batch: BlockingBatch = self._run(self._wait())
                batch.move_to(BlockingPort(self._connection))  # this thread uses it from now on
                self._pending = None  # not before: after a Ctrl-C in the lines above, close() gives it back
                if early:
                    await batch._renew()
            except AsyncFlowError as error:
                self._pending = None
                # A request made early may time out before it is waited for, and its batch's lease may have expired.
                if early and isinstance(error, (DeadlineExceeded, LeaseLost)):
                    continue
                raise
            self._run(self._begin())
            return batch

    def close(self) -> None:
        """Cancel the request, or give its batch back, and end the thread."""
        try:
            self._run(self._end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()

    async def _begin(self) -> None:
        self._pending = asyncio.create_task(self._request())

    async def _wait(self) -> BlockingBatch:
        if self._pending is None:
            await self._begin()
        assert self._pending is not None
        return await self._pending

    async def _end(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()
            for batch in await asyncio.gather(pending, return_exceptions=True):
                if isinstance(batch, BlockingBatch):
                    await batch._close(None)
        await self._connection.wire.aclose_loop()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
