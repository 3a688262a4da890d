"""StreamDataLoader: read a task of a queue as a training loop reads a data loader.

    loader = af.StreamDataLoader(run.queue, "train", columns=["response_ids", "advantage"], count=32)
    for batch in loader:                    # a dict of tensors, or the result of ``collate``; ends with the stream
        loss = step(batch["response_ids"], batch["advantage"])

Asking for the next batch acknowledges the last one. Leaving the loop gives it back. torch accepts
it as an iterable dataset: ``DataLoader(loader, batch_size=None)``.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NoReturn, TypeVar

from ..errors import AsyncFlowError, ConfigError, DeadlineExceeded, Ended, LeaseLost, WireError
from ..interfaces import LeasedBatch
from ..types import events as ev
from ..types.defaults import NEXT_S
from .batches import BlockingBatch
from .client import QueueClient, QueueVerbs
from .connection import BlockingPort, LoopPort

T = TypeVar("T")


class StreamDataLoader(Generic[T]):
    """Iterates over batches of ``count`` rows of ``task`` until the stream ends. Each ``iter``
    continues at the stream's position; there is no length. A task with batch_rows gives one whole
    step each.

    ``columns``: columns to read, among the task's needs (None: all); others are not mapped or
    copied. ``collate``: turns a batch into the yielded value, in the loop's thread (default:
    ``Batch.to_torch()``, unpinned). ``rank`` of ``world_size``: each rank of ``team`` (default: the
    task's name) iterates over its own loader, and the k-th batches of all ranks are the shards, of
    ``count`` rows each, of one lease. ``shards``: as of ``get``, fewer if several ranks need the
    same rows. ``prefetch`` 1: lease the next batch while this one is in use; its lease time
    (``lease_s`` of the task) starts again when it is yielded. ``at_least``, ``partition``: as of
    ``get``. ``timeout_s``: the longest wait for a batch.

    Raises the errors of ``get``: DeadlineExceeded, and LeaseLost if the previous batch took longer
    than its lease. One thread iterates at a time. Use it only in the process that made it, not in
    worker processes of a DataLoader.
    """

    def __init__(
        self,
        queue: QueueClient,
        task: str,
        columns: Sequence[str] | None = None,
        count: int = 1,
        *,
        rank: int = 0,
        world_size: int = 1,
        team: str = "",
        shards: int = 0,
        collate: Callable[[LeasedBatch], T] | None = None,
        prefetch: int = 0,
        at_least: int = 0,
        partition: str | None = None,
        timeout_s: float = NEXT_S,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of {world_size}: ranks are 0 to world_size - 1")
        if prefetch not in (0, 1):
            raise ConfigError(f"prefetch is 0, or 1 for one batch ahead; not {prefetch}")
        self._queue, self._ahead, self._timeout_s = queue, bool(prefetch), timeout_s
        self._collate: Callable[[LeasedBatch], Any] = collate or LeasedBatch.to_torch
        self._request: dict[str, Any] = {
            "task": task, "count": count, "columns": columns, "at_least": at_least, "partition": partition,
            "timeout_s": timeout_s,
        }  # fmt: skip
        if world_size > 1:
            whole = shards or world_size
            self._request |= {
                "count": count * whole, "at_least": at_least * whole, "team": team or task, "rank": rank,
                "world_size": world_size, "shards": shards,
            }  # fmt: skip
        self.lease: LeasedBatch | None = None
        """The current batch, to complete, renew or give back parts of it directly."""
        _known_to_torch()

    def __iter__(self) -> Iterator[T]:
        try:
            self._queue.connection.wire.check()
        except WireError:
            raise
        except AsyncFlowError:
            raise AsyncFlowError(
                "a StreamDataLoader cannot be used after fork(), for example in a worker process of a DataLoader:"
                " use num_workers=0 (prefetch=1 overlaps), or make queue and loader in the child"
            ) from None
        return self._each(_Prefetcher(self._queue, self._request)) if self._ahead else self._each(None)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a StreamDataLoader cannot be sent to another process: use num_workers=0 (prefetch=1 overlaps), or make"
            " it there with af.connect(address)"
        )

    def ack(self) -> None:
        """Acknowledge the current batch now, before the next is requested. Raises LeaseLost."""
        if self.lease is not None and self.lease.left:
            self.lease.ack()

    def _each(self, ahead: _Prefetcher | None) -> Iterator[T]:
        take = self._take if ahead is None else ahead.take
        try:
            while True:
                last, began = self.lease, time.monotonic()
                try:
                    self.lease = take(last)
                except Ended:
                    self.lease = None
                    return
                self._report(began)
                made = self._collate(self.lease)
                yield made
                del made  # free the memory of a batch that the consumer dropped
        except GeneratorExit:
            self._leave(None)
            raise
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            if ahead is not None:
                ahead.close()

    def _take(self, last: LeasedBatch | None) -> LeasedBatch:
        return self._queue.get(**self._request, ack=last if last is not None and last.left else None)

    def _leave(self, error: BaseException | None) -> None:
        """Give back unacknowledged rows. An exception of ``collate`` counts as an attempt."""
        lease, self.lease = self.lease, None
        if lease is not None and not isinstance(error, WireError):
            try:
                lease.__exit__(None if error is None else type(error), error, None)
            except LeaseLost:
                if error is None:
                    raise

    def _report(self, began: float) -> None:
        waited = time.monotonic() - began
        if waited > 0.001:
            connection = self._queue.connection
            connection.report(ev.Span(time_s=began, worker=connection.name, kind="wait", seconds=waited))


class _LoopQueue(QueueVerbs[BlockingBatch, None]):
    """Leases batches on an event loop for use in a thread."""

    _batch = BlockingBatch


class _Prefetcher:
    """Leases one batch ahead, on an event loop in its own thread, so the request can be cancelled."""

    def __init__(self, queue: QueueClient, request: dict[str, Any]) -> None:
        self._queue, self._request = queue, request
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asyncflow-ahead", daemon=True)
        self._thread.start()
        self._pending: asyncio.Task[BlockingBatch] | None = None

    def take(self, last: LeasedBatch | None) -> LeasedBatch:
        """Acknowledge ``last``, return the next batch, and request the one after it."""
        if last is not None and last.left:
            last.ack()
        while True:
            early = self._pending is not None
            try:
                batch: BlockingBatch = self._run(self._wait())
                batch.move_to(BlockingPort(self._queue.connection))  # this thread uses it from now on
                self._pending = None  # not before: after a Ctrl-C in the lines above, close() gives it back
                if early:
                    batch.renew()
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

    def _run(self, coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()

    async def _begin(self) -> None:
        asking = _LoopQueue(LoopPort(self._queue.connection))
        self._pending = asyncio.create_task(asking._get(**self._request))

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
        await self._queue.connection.wire.aclose_loop()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def _known_to_torch() -> None:
    """Register the loader as an iterable dataset if torch is imported."""
    data = sys.modules.get("torch.utils.data")
    if data is not None:
        data.IterableDataset.register(StreamDataLoader)
