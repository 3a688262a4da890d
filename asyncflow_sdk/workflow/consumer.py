"""LeaseConsumer: the steps of a training task, one lease after another.

for step in run.consumer("train", batch_size=256):
    engine.step(step.to_torch())
    weights.publish(step.version + 1, engine.named_weights())
    step.ack()
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from ..errors import AsyncFlowError, Ended, WireError
from ..interfaces import Consumer, LeasedBatch
from ..queue import QueueClient
from ..types import events as ev
from ..types.defaults import NEXT_S


class LeaseConsumer(Consumer):
    """Iterates over leased batches until the stream ends. Each must be acknowledged (or completed) before the
    next is asked for; one that is not is given back. What ``finish`` said of one is sent with the request for the next, which
    raises what is wrong with it; one may iterate again then. ``timeout_s``: the longest it waits for one batch before
    DeadlineExceeded says what is missing. ``ahead``: lease the next batch while this one is worked on, for
    loops that run to their end: what is leased ahead goes back only when the connection closes. ``ranks``: what
    ``get`` takes of a rank of a team.
    """

    def __init__(
        self, source: QueueClient, task: str, *, count: int = 1, timeout_s: float = NEXT_S, ahead: bool = False,
        ranks: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._queue, self._task, self._count, self._timeout_s = source, task, count, timeout_s
        self._ahead = ahead
        self._ranks = dict(ranks or {})
        self.current: LeasedBatch | None = None
        """The batch that is being worked on."""

    def __iter__(self) -> Iterator[LeasedBatch]:
        if not self._ahead:
            return self._each(self._after)
        return self._each_ahead()

    def _each_ahead(self) -> Iterator[LeasedBatch]:
        asked: queue.SimpleQueue[Future[LeasedBatch] | None] = queue.SimpleQueue()

        def ask() -> None:
            while (future := asked.get()) is not None:
                try:
                    future.set_result(self._get())
                except BaseException as error:
                    future.set_exception(error)

        # A thread of this loop's own; daemon, because nobody may be left to end a wait when the loop fails.
        threading.Thread(target=ask, name="asyncflow-ahead", daemon=True).start()
        coming: Future[LeasedBatch] = Future()
        asked.put(coming)

        def take(last: LeasedBatch | None) -> LeasedBatch:
            nonlocal coming
            if last is not None:  # the request for the next is under way
                last.__exit__(None, None, None)
            batch = coming.result()
            coming = Future()
            asked.put(coming)
            return batch

        try:
            yield from self._each(take)
        finally:
            asked.put(None)

    def _each(self, take: Callable[[LeasedBatch | None], LeasedBatch]) -> Iterator[LeasedBatch]:
        """``take`` also sends the last word on the batch before."""
        connection, last = self._queue.connection, None
        while True:
            began = time.monotonic()
            try:
                batch = take(last)
            except Ended:
                return
            waited = time.monotonic() - began
            if waited > 0.001:
                connection.report(ev.Span(time_s=began, worker=connection.name, kind="wait", seconds=waited))
            with contextlib.ExitStack() as held:
                held.enter_context(batch)
                self.current = batch
                yield batch
                self.current, last = None, batch if batch.finished else None
                if last is not None:
                    held.pop_all()

    def _after(self, last: LeasedBatch | None) -> LeasedBatch:
        try:
            return self._get(last)
        except WireError:
            raise
        except AsyncFlowError as error:
            if last is not None:  # its last word was refused: the rows are still ours
                last.__exit__(type(error), error, None)
            raise

    def _get(self, last: LeasedBatch | None = None) -> LeasedBatch:
        """The next batch. The last word on batch ``last`` rides with the request for it."""
        return self._queue.get(self._task, self._count, timeout_s=self._timeout_s, ack=last, **self._ranks)
