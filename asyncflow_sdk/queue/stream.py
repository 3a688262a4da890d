"""Stream: the batches of a task one after another, each asked for with the last word on the one before.

with queue.stream("reward", count=64) as stream:    # an exception gives the rows back, and counts against them
    for batch in stream:
        batch.finish({"reward": score(batch["response"])})

A turn of this loop is one request. Not thread-safe: one thread or task iterates over a stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from ..errors import AsyncFlowError, Ended, WireError
from ..interfaces import BatchStream
from .blocking import drive
from .leased import AsyncLeasedBatch, BlockingBatch, Lease

B = TypeVar("B", bound=Lease)


class Stream(Generic[B]):
    """What both kinds of stream are. After an error it can be iterated over again.

    A loop left early sends what is unsent; what the server finds wrong with it is raised by the ``with`` block,
    and without one only shown as an exception that nobody can catch.
    """

    def __init__(self, take: Callable[[B | None], Awaitable[B]]) -> None:
        self._take = take
        self._batch: B | None = None
        self._entered = False  # then __exit__ knows what ended the loop, and does what the loop's end would do

    async def _next(self) -> B:
        """The next batch. Raises what ``get`` raises, for the batch before and for this one."""
        last, self._batch = self._batch, None
        try:
            self._batch = await self._take(last)
        except AsyncFlowError as error:
            if last is not None and not isinstance(error, WireError):
                await last._close(error)  # its last word was refused: the rows are still ours
            raise
        return self._batch

    async def _close(self, error: BaseException | None = None) -> None:
        last, self._batch = self._batch, None
        if last is not None:
            await last._close(error)


class AsyncStream(Stream[AsyncLeasedBatch]):
    """``async for``, best in an ``async with``: a loop left early is else cleaned up when the event loop comes to it."""

    async def __aiter__(self) -> AsyncIterator[AsyncLeasedBatch]:
        try:
            while True:
                try:
                    batch = await self._next()
                except Ended:
                    return
                yield batch
        finally:
            if not self._entered:
                await self._close()

    async def __aenter__(self) -> AsyncStream:
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(error)


class BlockingStream(Stream[BlockingBatch], BatchStream):
    """``for``, also in a ``with``."""

    def __iter__(self) -> Iterator[BlockingBatch]:
        try:
            while True:
                try:
                    batch = drive(self._next())
                except Ended:
                    return
                yield batch
        finally:
            if not self._entered:
                drive(self._close())

    def __enter__(self) -> BlockingStream:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        drive(self._close(error))
